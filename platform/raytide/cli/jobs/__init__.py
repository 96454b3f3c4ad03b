"""The commands that submit jobs, watch jobs, and read the records of training runs."""
