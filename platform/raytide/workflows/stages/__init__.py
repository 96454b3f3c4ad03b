"""The kinds of stages of a workflow. Each kind has a spec, a way of submission, and results."""
