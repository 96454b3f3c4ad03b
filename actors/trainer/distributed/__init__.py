"""Process groups, collectives and local tensor shards, built on torch.distributed."""
