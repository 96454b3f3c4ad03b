"""The control plane of one cluster: supervisor, controller and API."""
