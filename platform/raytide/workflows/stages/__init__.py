"""The kinds of stages: the spec, the submission and the results of each."""
