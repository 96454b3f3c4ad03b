"""Jobs of a Slurm cluster as nodes."""
