"""Makes models smaller by quantisation, pruning and distillation, which a recipe chains."""
