"""Floor 4: the control plane of one cluster: supervisor, controller, API."""
