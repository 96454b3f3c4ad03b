"""The command `eval`, which evaluates a model and its parent with a suite. A suite consists of held-out texts, tasks
and a quality gate.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raytide.cli.show import Json, as_json, as_table, check_folder
from raytide.core.config import environment, load_yaml

if TYPE_CHECKING:
    from raytide.actors.quality.evaluate import QualityReport


def evaluation(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model directory, a run, or the base URL of an endpoint.")
    ],
    suite: Annotated[Path, typer.Argument(metavar="SUITE", help="A YAML file: corpora, tasks, parent and gate.")],
    parent: Annotated[str, typer.Option(help="The directory to compare with; the suite's by default.")] = "",
    endpoint_model: Annotated[str, typer.Option("--model", help="The model's name at the endpoint.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write the results as JSON, too.")] = None,
    json: Json = False,
) -> None:
    """Evaluate a model and its parent with a suite, and show the results side by side.

    The exit code is 1 if the model does not pass the gate. A key for an endpoint is taken from RAYTIDE_API_KEY.
    """
    from raytide.actors.quality.evaluate import evaluate
    from raytide.actors.quality.suite import QualitySuite, broken_limits
    from raytide.core.io.atomic_file import write_json

    check_folder(out)
    fields = load_yaml(suite)
    asked = QualitySuite.parse({**fields, "parent": parent} if parent else fields, where=str(suite))
    report = evaluate(
        model, asked, endpoint_model=endpoint_model, api_key=environment("API_KEY") or "", on_progress=_show_progress
    )
    body = report.to_json(asked.gate)
    if out is not None:
        write_json(out, body)
    if json:
        as_json(body)
    else:
        show(report)
    broken = broken_limits(asked.gate, report.metrics())
    if broken:
        sys.stderr.write("".join(f"gate: {each}\n" for each in broken))
        raise typer.Exit(1)


def show(report: QualityReport) -> None:
    """Prints a table of the held-out corpora, and a table of the tasks."""
    if report.corpora:
        columns = ("CORPUS", "TOKENS", "PERPLEXITY", "PARENT", "CHANGE", "DNLL", "KL", "KL P99", "SAME TOP-1")
        rows = []
        for name, each in report.corpora.items():
            error = "" if each.dnll_error is None else f" ± {each.dnll_error:.4f}"
            rows.append(
                (
                    name,
                    each.tokens,
                    f"{each.perplexity:.4g}",
                    _number(each.parent_perplexity, ".4g"),
                    _number(each.ppl_change, "+.2%"),
                    "-" if each.dnll is None else f"{each.dnll:+.4f}{error}",
                    _number(each.kl, ".4f"),
                    _number(each.kl_p99, ".4f"),
                    _number(each.same_top1, ".1%"),
                )
            )
        as_table(columns, rows)
    if report.tasks:
        as_table(
            ("TASK", "SAMPLES", "ACCURACY", "PARENT", "FLIPS", "BITS/BYTE", "PARENT"),
            [
                (
                    name,
                    each.samples,
                    _number(each.accuracy, ".1%"),
                    _number(each.parent_accuracy, ".1%"),
                    _number(each.flips, ".1%"),
                    _number(each.bits_per_byte, ".4f"),
                    _number(each.parent_bits_per_byte, ".4f"),
                )
                for name, each in report.tasks.items()
            ],
        )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _show_progress(name: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{name}: {done:,} of {total:,} tokens" + ("\n" if done >= total else ""))
