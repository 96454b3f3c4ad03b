"""The accounting in each controller tick: billing intervals, lost work, team usage and final accounts."""
