"""The order of sequences: a function of (seed, step) for shuffling, mixing and curricula."""
