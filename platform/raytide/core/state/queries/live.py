"""Conditions that select the records that are not final.

They list the states, because databases use an index for IN, but read the whole table for NOT IN. Final records stay
for months, and every tick selects the others.
"""

from __future__ import annotations

from raytide.core.objects.gang import LeaseState
from raytide.core.objects.job import FINAL_STATES, JobState
from raytide.core.objects.node import NodeState
from raytide.core.state import tables as t

JOB_IS_LIVE = t.jobs.c.state.in_([state for state in JobState if state not in FINAL_STATES])
LEASE_IS_LIVE = t.leases.c.state.in_([state for state in LeaseState if state is not LeaseState.RELEASED])
NODE_IS_LIVE = t.nodes.c.state.in_([state for state in NodeState if state is not NodeState.GONE])
