"""`raytide demo`: the whole life of a model on this machine, on real processes, in minutes and without a network."""

from __future__ import annotations

import json as jsonlib
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from raytide.cli.demo import specs, stages
from raytide.cli.demo.report import Report
from raytide.cli.demo.view import View
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import run_dir_of
from raytide.control.client import ApiClient
from raytide.core.errors import RaytideError, WaitTimeoutError
from raytide.core.io.process import Process
from raytide.sdk.client import Client

NAME = "demo"
TITLES = ["start a cluster", "build a dataset", "train on spot nodes", "serve the model", "load", "calm", "shut down"]


def run(*, keep: bool, out: Path | None, json: bool) -> int:
    """Runs the demo and returns its exit code. The exit code is 0 if the demo had no problem and its final checks pass.
    Otherwise it is 1.
    """
    console = Console(stderr=json)
    report = Report()
    folder = out.resolve() if out is not None else Path(tempfile.mkdtemp(prefix="raytide-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    base_url = ""
    try:
        with View(TITLES, console) as view:
            base_url = _live(view, folder, report, keep=keep)
    except WaitTimeoutError as error:
        report.problems.append(error.message)  # its hint names a command for a cluster that is gone by now
    except RaytideError as error:
        report.problems.append(str(error))
    finally:
        if out is None and not (keep and base_url):
            shutil.rmtree(folder, ignore_errors=True)
    if not report.problems:
        report.check(kept=keep)
    report.show(console)
    if json:
        load = None if report.load is None else report.load.json()
        sys.stdout.write(jsonlib.dumps({**asdict(replace(report, load=None)), "load": load}, default=str) + "\n")
    if base_url and (keep or report.completion):
        text = _last_words(report, base_url, keep=keep, temporary=folder if out is None else None)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if report.problems:
        console.print(f"the logs: {run_dir_of(NAME) / 'logs'}", markup=False, highlight=False, soft_wrap=True)
    return 1 if report.problems else 0


def _last_words(report: Report, base_url: str, *, keep: bool, temporary: Path | None) -> str:
    """Returns the final text: the model's answer, its address, and the next commands."""
    command = shutil.which("raytide") or str(Path(sys.executable).with_name("raytide"))
    answer = f"prompted with {specs.PROMPT!r}, the model continues:\n\n{specs.PROMPT}{report.completion}\n\n"
    if not keep:
        return (
            f"{answer}it answered at {base_url}, which ended with the cluster\n"
            f"keep it:   {command} demo --keep\n"
            f"your own:  {command} up --local    # then docs/howto/train-your-own.md"
        )
    body = jsonlib.dumps({"model": specs.MODEL, "prompt": specs.PROMPT, "max_tokens": 48})
    return (
        f"{answer}it answers at {base_url}\n"
        f"ask it:  curl {base_url}/completions -H 'content-type: application/json' -d '{body}'\n"
        f"end it:  {command} down --name {NAME}" + (f" && rm -r {temporary}" if temporary else "")
    )


def _live(view: View, folder: Path, report: Report, *, keep: bool) -> str:
    with view.stage("start a cluster") as say:
        started = local.up(None, name=NAME, owner=None if keep else Process.of(os.getpid()))
        say(f"API {started.api_url}")
    client = Client(ApiClient.from_run_dir(started.run_dir))
    finished = False
    try:
        with view.stage("build a dataset") as say:
            stages.build_dataset(client, folder, say, report)
        with view.stage("train on spot nodes") as say:
            model = stages.train(client, started.run_dir, folder, say, report)
        with view.stage("serve the model") as say:
            handle = stages.start_endpoint(client, model, say)
            stages.ask(handle, report)
        with view.stage("load") as say:
            stages.load(client, handle, say, report)
        with view.stage("calm") as say:
            stages.calm(client, handle, say, report)
        finished = True
    finally:
        client.close()
        if not (keep and finished):
            with view.stage(TITLES[-1]) as say:
                closed = local.down(NAME)
                if closed is not None:
                    report.nodes, report.cost = closed.nodes, closed.cost
                    report.problems += [f"{d.node_id} is booked wrongly: {d.what}" for d in closed.differences]
                say("nothing is left")
    return handle.base_url
