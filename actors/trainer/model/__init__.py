"""The trained network, its loss, and its precision and memory options."""
