"""The quality of a model beside its parent: divergence, loss, tasks, and the gate that they must pass."""
