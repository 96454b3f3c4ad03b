"""The ledger's part of a tick: intervals, losses, usage of teams, final accounts."""
