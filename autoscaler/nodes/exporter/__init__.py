"""The metrics exporter of a node. It shows the node's GPUs, the energy of its CPUs and counts of the kernel, on a page
for Prometheus and the autoscaler.
"""
