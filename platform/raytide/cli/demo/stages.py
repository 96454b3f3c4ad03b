"""The demo's stages. Each performs one real operation, shows its progress, and records its results in the report."""

from __future__ import annotations

import time
from pathlib import Path

from raytide.autoscaler.providers.local.spot import reclaim
from raytide.cli.demo import specs
from raytide.cli.demo.report import Report
from raytide.cli.demo.view import Say
from raytide.core.objects.gang import Lease
from raytide.core.objects.node import NodeState
from raytide.sdk.bench import BenchProgress, BenchReport
from raytide.sdk.client import Client
from raytide.sdk.jobs.job_run import Run, explain
from raytide.sdk.serving.endpoint import EndpointHandle

_POLL_S = 0.2
_STAGE_TIMEOUT_S = 600.0
"""The timeout of a stage, in seconds: several times its duration on two idle cores."""
_LONGEST_LOAD_S = 90.0
"""The time in seconds after which no further wave of load begins. On two idle cores, a node for a replica is ready
within a tenth of it.
"""


def build_dataset(client: Client, out: Path, say: Say, report: Report) -> None:
    run = client.data(specs.data(out))
    for view in run.updates(timeout_s=_STAGE_TIMEOUT_S):
        progress = view.job.progress
        say(_doing(run, f"{progress.get('stage', '')}, {int(progress.get('documents', 0)):,} documents"))
    run.wait()
    report.documents, report.tokens = int(run.progress["documents"]), int(run.progress["tokens"])
    report.documents_per_s = float(run.progress["documents_per_s"])
    report.tokens_per_s = float(run.progress["tokens_per_s"])
    say(f"{report.documents:,} documents, {report.tokens:,} tokens")


def train(client: Client, run_dir: Path, out: Path, say: Say, report: Report) -> str:
    """Trains a model, and reclaims one node after a third of the steps. Returns the directory of the exported model."""
    spec = specs.train(out)
    run = client.train(spec)
    reclaimed_s = 0.0
    losses: list[float] = []
    for view in run.updates(timeout_s=_STAGE_TIMEOUT_S):
        progress = view.job.progress
        step = int(progress.get("step", 0))
        if "loss" in progress:
            losses.append(float(progress["loss"]))
        report.train_tokens_per_s = max(report.train_tokens_per_s, float(progress.get("tokens_per_s", 0.0)))
        if not reclaimed_s and step >= spec.steps // 3 and view.lease is not None:
            victim = _last_node(view.lease)
            reclaimed_s = time.time()
            reclaim(run_dir, victim)
            say(f"step {step}: reclaimed {victim}")
        else:
            say(_doing(run, f"step {step} of {spec.steps}" + (f", loss {losses[-1]:.3f}" if losses else "")))
    run.wait()
    progress = run.progress
    report.first_loss, report.last_loss = float(progress["first_loss"]), float(progress["loss"])
    report.restarts = int(progress.get("restarts", 0))
    report.recovery_s = float(progress.get("recovery_s", float("nan")))
    say(f"loss {report.first_loss:.3f} to {report.last_loss:.3f}, recovered in {report.recovery_s:.1f} s")
    return run.output()


def start_endpoint(client: Client, model: str, say: Say) -> EndpointHandle:
    handle = client.serve(specs.serve(model))
    for status in handle.updates(timeout_s=_STAGE_TIMEOUT_S):
        say(status.waiting.reason if status.waiting else "loading the model")
    say(f"answers at {handle.base_url}")
    return handle


def ask(handle: EndpointHandle, report: Report) -> None:
    """Requests one completion. The demo prints it at the end."""
    answer = handle.openai(timeout=_STAGE_TIMEOUT_S).completions.create(
        model=handle.name, prompt=specs.PROMPT, max_tokens=32, temperature=0.7, frequency_penalty=1.0, seed=7
    )
    report.completion = answer.choices[0].text


def load(client: Client, handle: EndpointHandle, say: Say, report: Report) -> None:
    """Sends waves of concurrent streams until replicas and nodes have scaled up. Reports on the last wave."""
    deadline, wave = time.monotonic() + _LONGEST_LOAD_S, 0
    while wave == 0 or time.monotonic() < deadline:
        wave += 1
        report.load = _wave(client, handle, say, report, wave)
        if report.most_replicas > 1 and report.most_serving_nodes > 1:
            break
    say(f"{specs.STREAMS} streams, {report.load.output_tokens_per_s if report.load else 0:,.0f} tokens/s")


def calm(client: Client, handle: EndpointHandle, say: Say, report: Report) -> None:
    """Waits until the endpoint has given up its idle replicas and their nodes, down to the minimum."""
    deadline = time.monotonic() + _STAGE_TIMEOUT_S
    while time.monotonic() < deadline:
        report.last_replicas = handle.refresh().status.ready_replicas
        serving = _serving_nodes(client)
        say(f"replicas {report.last_replicas}, nodes {serving}")
        if report.last_replicas == 1 and serving == 1:
            return
        time.sleep(_POLL_S)


def _wave(client: Client, handle: EndpointHandle, say: Say, report: Report, wave: int) -> BenchReport:
    def look(_: BenchProgress) -> None:
        status = handle.refresh().status
        nodes = _serving_nodes(client)
        report.most_replicas = max(report.most_replicas, status.ready_replicas)
        report.most_serving_nodes = max(report.most_serving_nodes, nodes)
        say(f"wave {wave}: requests {status.ongoing:.0f}, replicas {status.ready_replicas}, nodes {nodes}")

    return handle.bench(**specs.LOAD, seed=wave, on_progress=look)


def _serving_nodes(client: Client) -> int:
    """Returns the number of ready on-demand nodes. While nothing else runs, all of them host replicas."""
    return sum(1 for node in client.status().nodes if node.state is NodeState.READY and node.market == "on-demand")


def _last_node(lease: Lease) -> str:
    return max(lease.usable, key=lambda member: member.index).node_id


def _doing(run: Run, progress: str) -> str:
    return explain(run.view) if run.view.waiting is not None or not run.view.job.progress else progress
