"""The metrics of the API: what the records, the ledger and the controller's last observation say."""
