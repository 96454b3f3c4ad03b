"""torch.distributed.checkpoint's planner and storage, and the checks on what is read through them."""
