"""Makes models small: quantisation, pruning and distillation, chained by a recipe."""
