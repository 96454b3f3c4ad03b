"""The metrics of the API, computed from the records, the ledger and the controller's last observation."""
