"""The job queue as pure functions from a Snapshot to decisions: admission, preemption, and the states of jobs and
leases.
"""
