"""The kinds of stages, with the spec, the submission and the results of each kind."""
