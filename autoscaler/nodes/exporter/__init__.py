"""The exporter of a node: its GPUs, its CPUs' energy and the kernel's counts, as a page for Prometheus and the
autoscaler.
"""
