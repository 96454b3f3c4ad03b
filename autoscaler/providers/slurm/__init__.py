"""The provider that uses jobs of a Slurm cluster as nodes."""
