"""The pure scheduler of the native engine: it decides what runs in the next step, what waits and what is preempted."""
