"""The metrics of the API, computed from the stored records, the ledger and the controller's last observation."""
