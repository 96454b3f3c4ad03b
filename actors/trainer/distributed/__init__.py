"""Process groups, collectives and local shards of tensors, built on torch.distributed."""
