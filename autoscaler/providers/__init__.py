"""Node providers behind one interface: clouds, KubeRay, Slurm, the operator's own hosts, local processes, a fake."""
