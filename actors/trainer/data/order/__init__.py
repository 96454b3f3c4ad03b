"""The order of training sequences, as a function of (seed, step): shuffling, mixing and curricula."""
