"""Conditions that select the records that are not final.

They list the states, because databases use an index for IN, but read the whole table for NOT IN. Final records stay
for months, and every tick selects the others.
"""

from __future__ import annotations

from raytide.core.objects.gang import LeaseState
from raytide.core.objects.job import FINAL_STATES, JobState
from raytide.core.objects.node import NodeState
from raytide.core.state import tables as t

LIVE_JOBS = t.jobs.c.state.in_([state for state in JobState if state not in FINAL_STATES])
LIVE_LEASES = t.leases.c.state.in_([state for state in LeaseState if state is not LeaseState.RELEASED])
LIVE_NODES = t.nodes.c.state.in_([state for state in NodeState if state is not NodeState.GONE])
