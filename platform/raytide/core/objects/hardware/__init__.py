"""The configuration of own machines, further clouds and Slurm, and the keywords for the resources that work needs."""
