"""The pure scheduler of the native engine: what runs in the next step, what waits, what is preempted."""
