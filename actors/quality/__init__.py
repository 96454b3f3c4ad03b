"""The quality of a model compared with its parent: divergence, loss, tasks, and a gate with limits for them."""
