"""The kinds of stages of a workflow. Each kind defines its spec, its submission and its results."""
