"""The demo's report: its measurements, the table printed at its end, and the check of its promises."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from raytide.control.views import CostReport
from raytide.core.money import format_usd
from raytide.core.objects.node import Node, NodeState
from raytide.sdk.bench import BenchReport


@dataclass(slots=True)
class Report:
    documents: int = 0
    documents_per_s: float = 0.0
    tokens: int = 0
    tokens_per_s: float = 0.0
    first_loss: float = float("nan")
    last_loss: float = float("nan")
    train_tokens_per_s: float = 0.0
    restarts: int = 0
    recovery_s: float = float("nan")
    """The time from the reclaim of the node to the next training step."""
    completion: str = ""
    load: BenchReport | None = None
    most_replicas: int = 0
    most_serving_nodes: int = 0
    last_replicas: int = 0
    nodes: tuple[Node, ...] = ()
    """All nodes of the demo, as they were when the ledger was closed."""
    cost: CostReport | None = None
    problems: list[str] = field(default_factory=list)
    """The promises of the demo that were not met, or the error that ended it; wrongly booked nodes, too."""

    def check(self, *, kept: bool) -> None:
        """Compares the report with the demo's promises. Adds each promise that was not kept to `problems`."""
        self._expect(self.documents > 0 and self.tokens > 0, "no dataset was built")
        self._expect(
            self.last_loss < self.first_loss, f"the loss did not fall ({self.first_loss:g} to {self.last_loss:g})"
        )
        self._expect(self.restarts >= 1, "the trainer did not have to recover")
        self._expect(self.recovery_s == self.recovery_s, "the trainer did not take another step after the reclaim")
        if self.load is None:
            self.problems.append("no request was answered")
        else:
            failed = sum(self.load.errors.values())
            self._expect(failed == 0, f"{failed} requests failed: {', '.join(self.load.errors)}")
        self._expect(bool(self.completion), "the model did not answer")
        self._expect(self.most_replicas > 1, "replicas did not scale up")
        self._expect(self.most_serving_nodes > 1, "nodes did not follow the replicas")
        self._expect(self.last_replicas == 1, f"replicas did not scale down: {self.last_replicas} are left")
        if kept:
            return
        self._expect(bool(self.nodes) and all(node.state is NodeState.GONE for node in self.nodes), "nodes were left")
        if self.cost is None:
            self.problems.append("the ledger was not closed")
        else:
            cost = self.cost
            self._expect(
                cost.booked_micro_usd == cost.billed_micro_usd == cost.booked_ended_micro_usd > 0,
                f"the ledger ({cost.booked_micro_usd}) is not the bill ({cost.billed_micro_usd}), in micro-dollars",
            )

    def show(self, console: Console) -> None:
        table = Table(title="what happened", show_header=False, title_justify="left")
        for name, value in self.rows():
            table.add_row(name, value)
        console.print(table)
        if self.cost is not None:
            money = Table("for", "whose", "dollars", title="what it cost", title_justify="left")
            for line in self.cost.lines:
                money.add_row(line.kind, line.subject or "-", format_usd(line.amount_micro_usd))
            money.add_row("total", "the provider's bill, exactly", format_usd(self.cost.billed_micro_usd))
            console.print(money)
        for problem in self.problems:
            console.print(f"did not happen: {problem}", style="red", markup=False)

    def rows(self) -> list[tuple[str, str]]:
        """Returns the rows of the table. A stage that was not reached has no row."""
        rows: list[tuple[str, str]] = []
        if self.documents:
            rows.append(("dataset", f"{self.documents:,} documents, {self.tokens:,} tokens"))
            rows.append(("prepared", f"{self.documents_per_s:,.0f} documents/s, {self.tokens_per_s:,.0f} tokens/s"))
        if self.first_loss == self.first_loss:
            rows.append(("loss", f"{self.first_loss:.3f} to {self.last_loss:.3f}"))
            rows.append(("training", f"{self.train_tokens_per_s:,.0f} tokens/s on 2 spot nodes"))
            recovered = f"next step after {self.recovery_s:.1f} s, {self.restarts} re-formed"
            rows.append(("a node reclaimed", recovered))
        if self.most_replicas:
            rows.append(("replicas", f"1 to {self.most_replicas} and back to {self.last_replicas}"))
        if self.load is not None:
            speed = f"{self.load.output_tokens_per_s:,.0f} tokens/s over {self.load.sent} streams"
            rows.append(("serving", speed))
            if (first := self.load.ttft_s).p50 is not None:
                rows.append(("first token", f"median {first.p50:.2f} s, slowest {first.max:.2f} s"))
        launched = Counter(node.type for node in self.nodes)
        removed = Counter(node.type for node in self.nodes if node.state is NodeState.GONE)
        for node_type, count in sorted(launched.items()):
            rows.append((f"nodes {node_type}", f"{count} launched, {removed[node_type]} removed"))
        return rows

    def _expect(self, held: bool, otherwise: str) -> None:
        if not held:
            self.problems.append(otherwise)
