"""Queue policies on recorded jobs, beside baselines."""
