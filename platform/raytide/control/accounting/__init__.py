"""The accounting of one controller tick: billing intervals, lost work, team usage and final accounts."""
