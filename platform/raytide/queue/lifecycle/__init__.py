"""The states of jobs and leases, and the events that change them."""
