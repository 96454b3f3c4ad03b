"""Process groups, collectives and local shards of tensors, over torch.distributed."""
