"""Makes models smaller by quantisation, pruning and distillation. A recipe chains these steps."""
