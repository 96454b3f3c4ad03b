"""Admission: chooses the jobs that get a lease in this tick, and the victims that are preempted for them."""
