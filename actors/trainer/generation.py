"""One generation of ranks: seat the workers, watch them and the lease, and say how it ended.

Every wait has a bound. A rank that does not answer within it is named with its host, and its process ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from raytide.actors.trainer.core import Beat, Outcome, Seat
from raytide.actors.trainer.crew import Crew, Hand, first_line
from raytide.actors.trainer.leases import LeaseWatch
from raytide.actors.trainer.pulse import Pulse
from raytide.actors.trainer.record import Record
from raytide.core.errors import RaytideError, TrainError
from raytide.core.gang import MemberState
from raytide.core.train_spec import TrainSpec

if TYPE_CHECKING:
    from raytide.core.gang import Lease

TICK_S = 0.1
OPEN_TIMEOUT_S = 30.0
SILENCE_S = 5.0
"""For an answer, once a peer's collective broke: a rank that only waits in a collective still answers."""
LAST_BEATS_S = 2.0
SETTLE_S = 10.0
"""Beyond the collectives' own timeout, before a rank that has not ended like its peers is taken for hung."""


@dataclass(frozen=True, slots=True)
class Ending:
    kind: Literal["done", "paused", "broken", "failed"]
    why: str = ""
    error: RaytideError | None = None
    began_s: float = 0.0
    """Monotonic: the first sign of it."""


class Generation:
    def __init__(
        self, number: int, spec: TrainSpec, hands: list[Hand], crew: Crew, watch: LeaseWatch, record: Record
    ) -> None:
        self.number, self.spec, self.hands = number, spec, hands
        self.crew, self.watch, self.record = crew, watch, record
        self.steps = 0
        self._refs: dict[Any, int] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._pulse = Pulse(hands)
        self._broke_s: float | None = None
        self._sign: tuple[float, str] | None = None
        """When and why this generation began to end."""

    def run(self, *, on_steps: Callable[[int, float], None]) -> Ending:
        """Train to the generation's end. `on_steps(world, tokens_per_s)` is called when steps were done."""
        if not self._seat():
            return self._ending()
        while len(self._outcomes) < len(self.hands):
            self._collect(TICK_S)
            for beat in self._pulse.beats(self._refs.values()):
                self._take(beat, on_steps)
            self._follow_lease()
            self._find_hung()
            self._find_stalled()
        for beat in self._pulse.last(LAST_BEATS_S):
            self._take(beat, on_steps)
        return self._ending()

    def _seat(self) -> bool:
        """Have rank 0 open the meeting place and start `train` everywhere."""
        import ray

        first, world = self.hands[0], len(self.hands)
        try:
            port = ray.get(first.actor.open_store.remote(first.member.address, world), timeout=OPEN_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            self._drop(0, f"rank 0 on {first.host} did not open the gang's store: {first_line(error)}")
            return False
        for rank, hand in enumerate(self.hands):
            seat = Seat(self.number, rank, world, (first.member.address, port), hand.member.address)
            self._refs[hand.actor.train.remote(seat)] = rank
        return True

    def _collect(self, timeout_s: float) -> None:
        import ray

        done, _ = ray.wait(list(self._refs), num_returns=len(self._refs), timeout=timeout_s)
        for ref in done:
            rank = self._refs.pop(ref)
            try:
                outcome: Outcome = ray.get(ref)
            except ray.exceptions.RayError as error:
                self._drop(rank, f"rank {rank} on {self.hands[rank].host} died: {first_line(error)}")
                continue
            self._outcomes[rank] = outcome
            if outcome.kind in ("broken", "failed"):
                self._broke_s = self._broke_s or time.monotonic()
                self._note(f"rank {rank} on {self.hands[rank].host}: {outcome.detail.splitlines()[-1]}")

    def _follow_lease(self) -> None:
        """React to what happens to members: lost ones are gone, leaving and new ones ask for a planned change."""
        lease = self.watch.latest()
        if lease is None:
            return
        lost = self.crew.staff(lease)
        for rank, hand in enumerate(self.hands):
            if hand in lost and rank not in self._outcomes:
                self._note(f"{hand.host} was lost")
        self.crew.check()
        if self._sign is None and (why := self._change(lease)):
            self._note(why)
            self.hands[0].actor.pause.remote(self.number)

    def _change(self, lease: Lease) -> str:
        leaving = [hand for hand in self.hands if hand.member.state is MemberState.LEAVING]
        if leaving:
            return f"{leaving[0].host} leaves soon"
        new = [hand for hand in self.crew.able(lease.shape) if hand not in self.hands]
        return f"{new[0].host} joins" if new else ""

    def _find_hung(self) -> None:
        """Name the ranks that do not answer, and, once a collective broke, those that do not end like their peers."""
        broke = self._broke_s is not None
        patience_s = self.spec.collective_timeout_s + SETTLE_S
        silence_s = SILENCE_S if broke else patience_s
        for rank in sorted(self._refs.values()):
            if self._pulse.silent_s(rank) > silence_s:
                self._hung(rank, f"it has not answered for {silence_s:.0f} s")
            elif self._broke_s is not None and time.monotonic() - self._broke_s > patience_s:
                self._hung(rank, f"{patience_s:.0f} s after its peers' collective failed it has not ended")

    def _find_stalled(self) -> None:
        """A rank that answers and gets nowhere (its storage hangs, say) would do no better in another generation."""
        for rank in sorted(self._refs.values()):
            if self._pulse.still_s(rank) > self.spec.stall_timeout_s:
                why = f"rank {rank} on {self.hands[rank].host} gets nowhere: {self._pulse.phase(rank)}"
                error = TrainError(f"{self.spec.name} stalled: {why}.", hint="Mend that, or raise stall_timeout_s.")
                self._hung(rank, f"stall_timeout_s is {self.spec.stall_timeout_s:g} s")
                self._outcomes[rank] = Outcome("failed", why, error)

    def _hung(self, rank: int, why: str) -> None:
        host, phase = self.hands[rank].host, self._pulse.phase(rank)
        self.record.event("hung", generation=self.number, rank=rank, host=host, phase=phase, why=why)
        self._drop(rank, f"rank {rank} on {host} hung in {phase}: {why}")
        self._refs = {ref: other for ref, other in self._refs.items() if other != rank}

    def _drop(self, rank: int, why: str) -> None:
        self._note(why)
        self._broke_s = self._broke_s or time.monotonic()
        self._outcomes[rank] = Outcome("broken", why)
        self.crew.dismiss(self.hands[rank])

    def _note(self, why: str) -> None:
        if self._sign is None:
            self._sign = (time.monotonic(), why)

    def _take(self, beat: Beat, on_steps: Callable[[int, float], None]) -> None:
        if beat.generation != self.number:
            return
        for why in beat.skipped:
            self.record.event("skipped", why=why)
        new = [step for step in beat.steps if self.steps == 0 or step.step > self.record.steps]
        for step in new:
            self.record.step(step)
        if new:
            self.steps += len(new)
            on_steps(new[-1].world, sum(s.tokens for s in new) / max(sum(s.step_s for s in new), 1e-9))

    def _ending(self) -> Ending:
        kinds = {outcome.kind for outcome in self._outcomes.values()}
        began_s, why = self._sign or (time.monotonic(), "")
        failed = next((outcome for outcome in self._outcomes.values() if outcome.kind == "failed"), None)
        if failed is not None:
            return Ending("failed", failed.detail, failed.error, began_s)
        if "done" in kinds:  # a rank ends so only after all of them saved and exported
            return Ending("done", began_s=began_s)
        return Ending("broken" if "broken" in kinds else "paused", why, began_s=began_s)
