"""The configuration of own machines, further clouds and Slurm, and the keywords with which jobs and endpoints request
resources.
"""
