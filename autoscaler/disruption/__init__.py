"""The ways to take nodes away: termination of idle ones, consolidation, cost limits, market migration."""
