"""The network that is trained, its loss, and the memory options of its layers."""
