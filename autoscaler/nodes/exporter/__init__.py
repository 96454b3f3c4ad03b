"""The exporter of a node: its GPUs and its CPUs' energy counters, as a page for Prometheus and the autoscaler."""
