"""Planner, storage and checked metadata for torch.distributed.checkpoint."""
