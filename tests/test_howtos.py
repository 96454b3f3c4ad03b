"""The how-tos work as they are written: every file in them is written, every command is run, in their order.

A block of YAML or Python is the file that the prose before it names last; a block of sh is run. `/tmp/tide` is a folder
of the test's own, `raytide up --local` has been said (the session's cluster), and commands stand in the repository.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import pytest
from tests.dashboards.prometheus_fixture import needs_prometheus

import raytide as rt
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.core.objects.endpoint import EndpointState
from raytide.core.objects.job import JobKind, JobState

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[1]
HOWTOS = ROOT / "docs" / "howto"
FOLDER = "/tmp/tide"
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(rf"`{FOLDER}/([\w.-]+\.(?:yaml|py))`")
TIMEOUT_S = 400.0

HowTo = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    text: str
    file: str
    """The name of a block that is a file."""


def blocks(name: str) -> list[Block]:
    document = (HOWTOS / f"{name}.md").read_text()
    found, prose_from = [], 0
    for match in FENCE.finditer(document):
        _, language, text = match.groups()
        named = NAMED.findall(document[prose_from : match.start()])
        found.append(Block(language, textwrap.dedent(text), named[-1] if named else ""))
        prose_from = match.end()
    return found


@pytest.fixture(scope="module")
def how_to(live: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> HowTo:
    """`how_to(name)` follows that how-to and returns all that its commands printed."""
    folder = tmp_path_factory.mktemp("tide")
    environment = {name: value for name, value in live.environment().items() if not name.startswith("RAY_")}

    def follow(name: str) -> str:
        printed = ""
        for block in blocks(name):
            text = block.text.replace(FOLDER, str(folder))
            if block.language == "sh":
                printed += run(text, environment)
            else:
                assert block.file, f"{name}.md has a {block.language} block that is no file and no command"
                (folder / block.file).write_text(text)
        return printed

    return follow


def run(script: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["sh", "-eu"],
        input=script,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def trained(how_to: HowTo) -> str:
    """Returns the output of train-your-own; its dataset is there for the other how-tos."""
    return how_to("train-your-own")


def test_every_how_to_is_followed_here() -> None:
    followed = set(re.findall(r'how_to\("([\w-]+)"\)', Path(__file__).read_text()))
    assert {path.stem for path in HOWTOS.glob("*.md")} == followed


def test_a_user_trains_and_serves_a_model_on_text_of_their_own(trained: str, tide: rt.Client) -> None:
    runs = {run.view.job.spec.name: run for run in tide.jobs()}
    assert runs["my-text"].state is JobState.SUCCEEDED
    assert runs["my-model"].state is JobState.SUCCEEDED
    assert int(runs["my-model"].progress["step"]) == 40
    dataset = tide.datasets.get("my-text")
    assert tide.datasets.uses(dataset).jobs == (runs["my-model"].id,)
    assert f"{dataset.spec.tokens:,}, of a vocabulary of 512" in trained
    assert tide.datasets.manifest("my-text").tokens == dataset.spec.tokens
    endpoint = tide.endpoint("my-model")
    assert f"my-model answers at {endpoint.base_url}" in trained


def test_a_training_is_planned_and_its_gang_chosen(how_to: HowTo, tide: rt.Client) -> None:
    printed = how_to("plan-a-training")
    assert "h100x8.spot" in printed
    assert "Besiroglu 2024" in printed
    (run,) = (run for run in tide.jobs() if run.view.job.spec.name == "planned")
    assert run.state is JobState.SUCCEEDED
    assert run.view.job.spec.config["auto"] == []


def test_a_driver_holds_a_gang(how_to: HowTo, live: LocalCluster, tide: rt.Client) -> None:
    session = live.ray_temp_dir / "session_latest"

    def packages() -> set[Path]:
        # unlike pathlib's, this glob passes over a folder that goes meanwhile
        found = map(Path, glob(f"{session}/runtime_resources*/working_dir_files/_ray_pkg_*"))
        return {each for each in found if not each.suffix}  # neither archives nor locks

    before, unpacked = packages(), set[Path]()
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(lambda: how_to("gang-from-ray-code"))
        while not following.done():  # a node's folder goes when the node ends
            unpacked |= packages() - before
            time.sleep(0.05)
        printed = following.result()
    copies = Counter(folder.name for folder in unpacked)
    assert len(copies) == 2 and min(copies.values()) >= 2, f"the head and each node unpack both themselves: {copies}"
    assert "1 squared is 1, computed on node-" in printed
    assert str({part: sum(range(part * 1000)) for part in range(4)}) in printed
    runs = {run.view.job.spec.name: run for run in tide.jobs()}
    assert runs["squares"].state is runs["stubborn"].state is JobState.SUCCEEDED
    assert runs["squares"].view.job.spec.kind is JobKind.GANG


def test_a_key_is_made_used_and_ended(how_to: HowTo, tide: rt.Client) -> None:
    printed = how_to("serve-with-keys")
    assert "high tide  1999" in printed, "the text, and what is left of the limit"
    assert '"completion_tokens": 10' in printed
    tide.endpoint("chat").delete()


def test_a_script_runs_on_a_gang(how_to: HowTo, tide: rt.Client, eventually: Callable[..., None]) -> None:
    printed = how_to("run-a-script")
    assert {f"[{rank}] the sum of 2 ranks is 3" for rank in range(2)} <= set(printed.splitlines()), printed
    (run,) = (run for run in tide.jobs() if run.view.job.spec.name == "sum")
    assert (run.view.job.spec.kind, run.state) == (JobKind.SCRIPT, JobState.SUCCEEDED)
    eventually(lambda: run.refresh().cost_usd > 0)


@pytest.mark.usefixtures("trained")
def test_a_run_outlives_a_spot_notice(how_to: HowTo, tide: rt.Client) -> None:
    printed = how_to("spot-notices")
    assert re.search(r"^node-\S+ was given notice at step \d+$", printed, re.MULTILINE)
    assert re.search(r"^resize .*", printed, re.MULTILINE), printed
    (run,) = (run for run in tide.jobs() if run.view.job.spec.name == "spot")
    assert run.state is JobState.SUCCEEDED
    steps = Path(str(run.view.job.spec.config["out"]), "metrics.jsonl").read_text().splitlines()
    assert sorted({json.loads(line)["step"] for line in steps}) == list(range(1, 151))


@pytest.mark.usefixtures("trained")
def test_a_file_of_requests_is_answered(how_to: HowTo, tide: rt.Client) -> None:
    printed = how_to("batch")
    assert "completed BatchRequestCounts(completed=40, failed=0, total=40)" in printed
    assert "40 answers from the endpoint" in printed
    assert "40 rows answered, 0 failed" in printed
    (run,) = (run for run in tide.jobs() if run.view.job.spec.name == "requests")
    assert run.state is JobState.SUCCEEDED
    assert (run.view.job.spec.priority, run.view.job.spec.is_preemptible) == ("low", True)
    out = Path(run.view.job.spec.config["command"][4])  # type: ignore[index]
    assert [json.loads(line)["custom_id"] for line in out.read_text().splitlines()] == [f"row-{i}" for i in range(40)]


@pytest.mark.usefixtures("trained")
def test_a_version_is_rolled_out_and_taken_back(how_to: HowTo, tide: rt.Client) -> None:
    printed = how_to("roll-out-a-version")
    assert re.search(r"^lineage.config.steps\t40\t10$", printed, re.MULTILINE)
    assert "metrics.taste\t-\t0.8" in printed
    assert "canary of revision 2 of assistant: starting" in printed
    assert "revision 2 gave the last answer" in printed
    assert "canary of revision 2 of assistant: promoted: all steps passed" in printed
    assert re.search(r"canary 1 -> 2\tpromoted\ttrained on for 10 steps", printed)
    assert re.search(r"^2\t.*\tmy-model:2\t.*\t[0-9]+ up, 0 down\t", printed, re.MULTILINE)
    assert "assistant is at revision 3: rollback to revision 1" in printed
    assert "my-model:1 is intact" in printed
    history = tide.models.history("my-model", alias="champion")
    assert [(x.before, x.after, x.why) for x in history] == [
        (2, 1, "version 2 invents words"),
        (1, 2, "it tastes better"),
        (None, 1, "it is the first"),
    ]
    first = tide.models.get("my-model:1").spec
    assert first.lineage.dataset_sha256
    assert first.lineage.job
    assert tide.models.get("my-model:2").spec.lineage.base == str(Path(first.location).parent)
    assert tide.endpoint("assistant").status.endpoint.spec.version == "my-model:1"


@pytest.mark.usefixtures("trained")
def test_adapters_are_served_beside_their_base_model(how_to: HowTo) -> None:
    printed = how_to("adapters")
    texts = dict(re.findall(r"^(adapted\S*): (.+)$", printed, re.MULTILINE))
    assert texts.keys() == {"adapted", "adapted:mine", "adapted:other"}
    assert texts["adapted:mine"] == texts["adapted:other"] != texts["adapted"]
    assert re.search(r"^adapted:other\s+1/1\s", printed, re.MULTILINE), printed


@pytest.mark.soak  # tests/workflows/test_flow_cluster.py has its parts
def test_a_flow_goes_from_text_to_an_endpoint_and_a_worse_model_is_not_served(how_to: HowTo, tide: rt.Client) -> None:
    printed = how_to("text-to-endpoint")
    assert re.search(r"^eval done: job-\d+: loss \d", printed, re.MULTILINE), printed
    assert re.search(r"^serve done: from-text: http://\S+/from-text/v1$", printed, re.MULTILINE), printed
    assert re.search(r"^text cached: ", printed, re.MULTILINE), printed
    assert re.search(r"^serve skipped: .*from-text:2 is not served in place of from-text:1", printed, re.MULTILINE)
    assert tide.models.get("from-text:1").spec.metrics["eval_loss"] > 0
    ends = (EndpointState.DELETING, EndpointState.DELETED)
    assert tide.endpoint("from-text").status.endpoint.state in ends, "the how-to ends with its deletion"


@pytest.mark.soak
def test_a_commit_is_released_and_its_pipeline_may_run_again(how_to: HowTo, tide: rt.Client) -> None:
    printed = how_to("release-from-ci")
    assert re.search(r"^serve\s+serve\s+done\s", printed, re.MULTILINE), printed
    version = tide.models.get("released:1")
    assert version.spec.note == "commit 4f2c1d0" and version.spec.metrics["eval_loss"] > 0
    assert "released:2" not in printed, "the second run finds every stage done"


@pytest.mark.usefixtures("trained")
def test_a_trained_model_becomes_an_eight_bit_endpoint_with_its_gate(how_to: HowTo) -> None:
    printed = how_to("compress-a-model")
    small, parent = map(float, re.findall(r"/small/model: ([\d.]+) MB of ([\d.]+) MB", printed)[0])
    assert small < parent
    (kl,) = (float(each) for each in re.findall(r"^kl: (\S+)$", printed, re.MULTILINE))
    assert 0 < kl < 0.015
    assert "my-small answers at http" in printed
    assert re.search(r"^code\t500\t", printed, re.MULTILINE), printed


@pytest.mark.soak  # tests/live/test_monitoring.py has an alert that acts, on the session's cluster
def test_an_alert_acts(how_to: HowTo) -> None:
    printed = how_to("an-alert-that-acts")
    (node,) = re.findall(r"^the GPUs of (node-\d+) have uncorrectable errors$", printed, re.MULTILINE)
    assert f"{node} is in quarantine" in printed
    assert re.search(rf"GpuEccUncorrectable\tcommand\t\w+\tdone\t{node} has a sick GPU", printed), printed
    assert re.search(rf"GpuEccUncorrectable\tquarantine_node\t{node}\tdone\t", printed), printed
    assert re.search(rf"admin\torder.quarantine_node\t{node}\t", printed), printed
    assert re.search(r"quarantine_node\tnode-9\tdry_run\tit would: quarantine_node node-9", printed), printed


@needs_prometheus
@pytest.mark.soak  # tests/live/test_prometheus.py has the pages on the session's cluster
def test_dashboards_are_there_in_five_minutes(how_to: HowTo, live: LocalCluster) -> None:
    try:
        printed = how_to("dashboards-in-five-minutes")
    finally:
        local.down("seen")
    where = r"http://127\.0\.\d+\.1"
    assert re.search(rf"^Prometheus {where}:7490, Alertmanager {where}:7493$", printed, re.MULTILINE), printed
    (rate,) = re.findall(r"^\{'outcome': 'ok'\} requests per second: (\S+)$", printed, re.MULTILINE)
    assert float(rate) > 0
    assert re.search(r"^pages: \{.*'raytide-gateway': 2\b", printed, re.MULTILINE), printed
    names = {"serving.json", "training.json", "capacity.json", "queue.json", "cost.json", "nodes.json"}
    assert names <= set(printed.split())


@pytest.mark.usefixtures("trained")
def test_the_ledger_is_read(how_to: HowTo) -> None:
    printed = how_to("where-did-the-money-go")
    assert re.search(r"^ +0\.\d{6} \$  job +job-", printed, re.MULTILINE)
    assert re.search(r"^TEAM\tCOST\tPER_HOUR\tFORECAST\tLOST\tLOST_TO(\tKWH\tCO2_KG)?$", printed, re.MULTILINE), printed
    assert re.search(r"^day,cost,per_hour,lost,lost_to(,kwh,co2_kg)?$", printed, re.MULTILINE), printed
    assert re.search(r"^job-\d+: \$0\.\d{6}, \$0\.\d{6} of it lost$", printed, re.MULTILINE), printed
    assert "my-model succeeded: $0." in printed


def test_the_example_of_the_api_page_runs(live: LocalCluster, tide: rt.Client, tmp_path: Path) -> None:
    """In a process of its own, in a folder with the files that it names, each call of the page."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL)
    missing = [name for name in rt.__all__ if inspect.isfunction(getattr(rt, name)) and f"rt.{name}(" not in example]
    assert set(missing) <= {"connect", "local"}, "they make the cluster on which the example runs"
    stdlib = Path(inspect.__file__).parent
    (tmp_path / "data.yaml").write_text(
        f"{{name: api-text, inputs: [{stdlib}/json], include: [.py], tokenizer: {{train: {{vocab_size: 300}}}}, "
        f"out: {tmp_path}/dataset}}"
    )
    (tmp_path / "train.yaml").write_text(
        f"{{name: api-model, dataset: {tmp_path}/dataset, out: {tmp_path}/run, steps: 5, global_batch: 4, "
        "micro_batch: 2, seq_len: 32, model: {dim: 32, layers: 1, heads: 2, max_seq_len: 64}}"
    )
    (tmp_path / "hello.py").write_text("import sys, raytide as rt; rt.report(step=3); print(sys.argv)")
    shutil.copy(ROOT / "cluster.yaml", tmp_path)
    hello = "{kind: script, spec: {command: [python, hello.py]}}"
    (tmp_path / "flow.yaml").write_text(f"{{name: api-flow, out: {tmp_path}/flow, stages: {{hello: {hello}}}}}")
    (tmp_path / "example.py").write_text(example)
    environment = {name: value for name, value in live.environment().items() if not name.startswith("RAY_")}
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "9 [1, 4] 16" in done.stdout
    runs = {run.view.job.spec.name: run for run in tide.jobs()}
    assert runs["api-flow"].state is runs["api-flow-hello"].state is JobState.SUCCEEDED
    assert runs["hello"].progress["step"] == 3
