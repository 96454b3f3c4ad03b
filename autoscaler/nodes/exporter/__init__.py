"""The metrics exporter of a node. Prometheus and the autoscaler read its page. The page shows the node's GPUs, the
energy of the node's CPUs, and the kernel's count of OOM kills.
"""
