"""The history of metrics: a bounded store of metric values, written by the monitor and read by the API."""
