"""The queue, jobs and leases as pure functions: what was read in, what shall be out. The controller applies it."""
