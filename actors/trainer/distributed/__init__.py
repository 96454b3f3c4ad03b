"""Process groups, collectives and the shards of tensors, over torch.distributed."""
