"""A submitted job in the SDK: wait for it, watch it, or ask why it waits. `train_run.py` extends it for trainings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, Self, TypeVar, overload

from raytide.control.client import ApiClient
from raytide.control.views import JobView, LogPart, WhyView, to_json
from raytide.core.bounds import printable
from raytide.core.clock import ago
from raytide.core.errors import ClusterError, RaytideError, WaitTimeoutError
from raytide.core.io.html import ShownList, ShownText, framed, table
from raytide.core.money import format_usd
from raytide.core.objects.job import JobKind, JobState
from raytide.sdk.display import Glance, LiveView

_POLL_S = 0.3
AWAY_S = 60.0

T = TypeVar("T")


class Run:
    """A submitted job with its last known state. `refresh`, `wait`, `watch` and `updates` renew the state."""

    def __init__(self, client: ApiClient, view: JobView) -> None:
        self._client = client
        self.view = view

    @property
    def id(self) -> str:
        return self.view.job.id

    @property
    def state(self) -> JobState:
        return self.view.job.state

    @property
    def progress(self) -> Mapping[str, float | int | str]:
        return self.view.job.progress

    @property
    def cost_usd(self) -> float:
        return self.view.cost_micro_usd / 1e6

    @property
    def out(self) -> str:
        """The directory or URL to which the job writes: the `out` of the job's spec. An empty text for scripts and
        gangs.
        """
        return str(self.view.job.spec.config.get("out", ""))

    def refresh(self) -> Self:
        self.view = self._client.job(self.id)
        return self

    def updates(self, timeout_s: float = 86_400.0) -> Iterator[JobView]:
        """Yields the job's JobView whenever it has changed, until the job ends. Raises WaitTimeoutError after
        `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        seen: JobView | None = None
        while True:
            view = patiently(self.id, self.refresh).view
            if view != seen:
                seen = view
                yield view
            if view.job.is_final:
                return
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"{self.id} is still {self.state} after {timeout_s:g} s.",
                    hint=f"`raytide why {self.id}` shows why.",
                )
            time.sleep(_POLL_S)

    def watch(self, timeout_s: float = 86_400.0) -> Self:
        """Shows the job live in a notebook or on a terminal until it ends. Returns the job, even if it failed.

        Without a notebook or a terminal it only waits. Raises WaitTimeoutError after `timeout_s` seconds.
        """
        with LiveView() as live:
            for _ in self.updates(timeout_s=timeout_s):
                live.show(partial(self.glance, is_whole=True))
        return self

    def wait(self, timeout_s: float = 86_400.0) -> Self:
        """Blocks until the job ends and returns the job. A notebook or a terminal shows its progress meanwhile.

        Raises RaytideError if the job failed, and WaitTimeoutError after `timeout_s` seconds.
        """
        with LiveView(is_shown=not self.view.job.is_final) as live:
            for _ in self.updates(timeout_s=timeout_s):
                live.show(self.glance)
        if self.state is not JobState.SUCCEEDED:
            raise RaytideError(
                f"{self.id} {self.state}: {self.view.job.reason}", hint=f"`raytide logs {self.id}` prints its output."
            )
        return self

    def glance(self, *, is_whole: bool = False) -> Glance:
        """Returns the job's state and progress for a live view. With `is_whole` it includes the curves of a
        training.
        """
        view, progress = self.view, self.progress
        total = float(view.job.spec.config.get("steps", 0)) if view.job.spec.kind is JobKind.TRAIN else 0.0  # type: ignore[arg-type]
        done = view.job.progress_number("step") or 0.0  # a script may report a text
        facts = {"state": str(self.state), "cost": format_usd(view.cost_micro_usd)}
        if view.waiting is not None or view.job.is_final or not progress:
            facts["why"] = explain(view)
        facts |= {name: short(value) for name, value in progress.items() if value != ""}
        return Glance(f"{view.job.spec.kind} {view.job.spec.name} ({self.id})", done, total, facts)

    def output(self) -> str:
        """Waits until the job ends and returns the directory of its result: the dataset, or the exported model."""
        self.wait()
        return str(self.progress.get("model", self.out))

    @overload
    def logs(self, *, follow: Literal[False] = False, tail: int | None = None) -> str: ...

    @overload
    def logs(self, *, follow: Literal[True], tail: int | None = None) -> Iterator[str]: ...

    def logs(self, *, follow: bool = False, tail: int | None = None) -> str | Iterator[str]:
        """Returns the job's output. With `tail` it returns only the last `tail` lines.

        With `follow` it yields the output as it is printed, until the job ends.
        """
        return self._follow(tail) if follow else "".join(part.text for part in self.log_parts(tail=tail))

    def _follow(self, tail: int | None) -> Iterator[str]:
        after, is_over = "", False
        while not is_over:
            is_over = patiently(self.id, self.refresh).view.job.is_final  # first, so that no output is missed
            for part in self.log_parts(after, tail=tail):
                after, tail = part.after, None
                if part.text:
                    yield part.text
            if not is_over:
                time.sleep(_POLL_S)

    def log_parts(self, after: str = "", *, tail: int | None = None) -> Iterator[LogPart]:
        """Yields the parts of the job's output that follow the position `after`. The output is divided into parts
        because a log may be larger than memory.
        """
        part = LogPart("", after, has_more=True)
        while part.has_more:
            ask = partial(self._client.log_part, self.id, after=part.after, tail=tail)
            part = patiently(self.id, ask, goes_on=not self.view.job.is_final)
            tail = None
            yield part

    def stop(self) -> Self:
        self.view = self._client.stop(self.id)
        return self

    def why(self) -> str:
        """Returns a text that says what the job waits for, or why it ended."""
        return ShownText(explain(self.refresh().view))

    def waits_for(self) -> WhyView:
        """Returns why the job waits: the first unmet constraint, what would meet this constraint, and the expected
        start time.
        """
        return self._client.why(self.id)

    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = to_json(self.view)
        return value

    def __repr__(self) -> str:
        return f"Run({self.id}, {self.state}, {format_usd(self.view.cost_micro_usd)})"

    def _repr_html_(self) -> str:
        rows = [("state", self.state), ("why", explain(self.view)), ("cost", format_usd(self.view.cost_micro_usd))]
        return framed(table(f"{self.view.job.spec.name} ({self.id})", ("", ""), [*rows, *self.progress.items()]))


def listing(runs: Iterable[Run]) -> ShownList[Run]:
    """Returns the jobs as a list that notebooks show as a table."""

    def row(run: Run) -> tuple[object, ...]:
        job = run.view.job
        until_s = job.ended_at_s if job.ended_at_s is not None else time.time()
        step = job.progress.get("step", job.progress.get("stage", ""))
        why = run.view.waiting.reason if run.view.waiting is not None and not job.is_final else job.reason
        age, cost = ago(until_s - job.submitted_at_s), format_usd(run.view.cost_micro_usd)
        return job.id, job.spec.name, job.spec.kind, job.spec.team, job.state, age, step, cost, why.partition("\n")[0]

    columns = ("job", "name", "kind", "team", "state", "age", "step", "cost", "why")
    return ShownList(runs, "jobs", columns, row)


def short(value: float | int | str) -> str:
    """Formats a value of a job's progress in few characters."""
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def patiently(job_id: str, ask: Callable[[], T], *, goes_on: bool = True) -> T:
    """Returns the result of `ask`. While the API does not answer, `ask` is repeated for up to a minute.

    Raises ClusterError if the API still does not answer after that minute. With `goes_on`, the error's hint says that
    the job keeps running.
    """
    deadline = time.monotonic() + AWAY_S
    while True:
        try:
            return ask()
        except ClusterError as error:
            if time.monotonic() >= deadline:
                hint = f"{job_id} keeps running: `raytide logs -f {job_id}` follows it." if goes_on else error.hint
                raise ClusterError(error.message, hint=hint) from None
            time.sleep(_POLL_S)


def explain(view: JobView) -> str:
    """Returns one line of text about a job: its state and the reason, what it waits for, what would help, its deadline,
    and the cost of moving data to its nodes.
    """
    job, waiting = view.job, view.waiting
    parts = [f"{job.id} is {job.state}"]
    if view.position is not None:
        parts.append(f"number {view.position} in the queue")
    text = ", ".join(parts) + "."
    data = "" if not view.data else f"For its data the planner counts {view.data}."
    if (lacks := job.progress.get("not_joined")) and not job.is_final:
        data = " ".join(filter(None, [f"It runs without some members: {lacks}.", data]))
    due = "" if view.stance is None else f"Deadline: {view.stance.reason}."
    if waiting is not None and not job.is_final:
        soon = (
            "" if waiting.wait_s is None else f"It starts in {ago(waiting.wait_s)} or so, if nothing else is submitted."
        )
        due = "" if waiting.constraint == "deadline" else due
        return printable(" ".join(part for part in (text, waiting.reason, waiting.remedy, soon, due, data) if part))
    reason = f"{job.reason}." if (due or data) and job.reason else job.reason
    return printable(" ".join(part for part in (text, reason, due, data) if part))
