"""Elastic training: workers join and leave, ranks are assigned again, and the run goes on."""
