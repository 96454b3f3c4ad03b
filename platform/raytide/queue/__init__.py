"""The queue as pure functions from a Snapshot to decisions: admission, preemption, the states of jobs and leases."""
