"""Random deaths of ranks: seated or spare, in a step or in the middle of the recovery from the last one."""

from __future__ import annotations

import os
import random
import signal
import time

from tests.actors.trainer.gang_processes import Run

RECOVERY_S = 0.8
"""About what one takes: a kill this soon after the last mostly falls into it."""
HANGS = 0.1
"""The share of victims that are stopped rather than killed, each of which takes a collective's timeout."""


def kill_at_random(run: Run, *, kills: int, chance: random.Random) -> list[str]:
    """Says what was done to whom. A dead rank's member is lost with it, and comes back at once or after the next kill.
    A stopped rank keeps its member: nobody tells the driver."""
    told: list[str] = []
    away: list[int] = []
    victims: set[int] = set()
    while len(told) < kills:
        if chance.random() < 0.6:
            run.until_step(last_step(run) + chance.randint(1, 3))
            time.sleep(chance.uniform(0.0, 0.05))
        else:
            time.sleep(chance.uniform(0.0, RECOVERY_S))
        there = {member: pid for member, pid in run.workers().items() if member not in away and pid not in victims}
        back, away = away, []
        if there:
            member, pid = chance.choice(sorted(there.items()))
            victims.add(pid)
            stops = chance.random() < HANGS
            if _signalled(pid, signal.SIGSTOP if stops else signal.SIGKILL):
                told.append(f"{'stopped' if stops else 'killed'} {member} at step {last_step(run)}")
                if not stops:
                    run.leases.take(member)
                    away = [member]
        if chance.random() < 0.5:
            back, away = back + away, []
        run.leases.give(*back)
    run.leases.give(*away)
    return told


def _signalled(pid: int, number: signal.Signals) -> bool:
    """False when it is gone: the driver ended it, and no other is ready on that member yet."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def last_step(run: Run) -> int:
    steps = run.steps()
    return steps[-1] if steps else 0
