"""Own machines, further clouds, Slurm, and the keywords for what work needs of a machine."""
