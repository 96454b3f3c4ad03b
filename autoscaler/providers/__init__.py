"""Node providers behind one interface: clouds, KubeRay, local processes, and a fake."""
