"""The history of metrics: a bounded store of their values, written by the monitor and read by the API."""
