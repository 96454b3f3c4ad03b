"""Admission: chooses the jobs that get a lease in this tick, and the members that are preempted for them."""
