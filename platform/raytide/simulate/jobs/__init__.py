"""Queue policies on recorded jobs, with baselines."""
