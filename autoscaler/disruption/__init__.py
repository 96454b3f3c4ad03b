"""The ways to take nodes away: termination of idle nodes, consolidation, the cost limit, and market migration."""
