"""Admission: which jobs get a lease in this tick, and which jobs are preempted for them."""
