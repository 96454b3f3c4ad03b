"""`raytide up` on a cloud: what it would do, and which files cannot work.

That `ray up` does the same is tested with the cloud (tests/autoscaler/providers/test_cloud.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytide.autoscaler.providers.cloud.setup import RAY_TOKEN
from raytide.control.bootstrap.cloud_launch import SetUpStep, dry_run, up
from raytide.control.bootstrap.exposure import check_file
from raytide.core.errors import ConfigError, RaytideError, UsageError

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "cluster.yaml"


@pytest.fixture(autouse=True)
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to say `raytide up` in, with raytide's wheel."""
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "raytide-0-py3-none-any.whl").touch()
    (tmp_path / "constraints.txt").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_dry_run_of_own_machines_shows_how_each_is_reached_and_switched() -> None:
    steps = dry_run(ROOT / "examples" / "hosts.yaml")
    bmc = "ipmitool -I lanplus -H a100-1-bmc -f /etc/raytide/bmc-password power"
    assert of(steps, "a100-1") == [
        f"switch on {bmc} on",
        "run ssh -p 22 raytide@10.0.1.11 'exec ~/venv/bin/python -m raytide.autoscaler.providers.hosts.agent'",
        f"switch off {bmc} soft",
    ]
    assert of(steps, "cpu-2")[0] == "switch on wakeonlan 52:54:00:12:34:56"
    with pytest.raises(UsageError, match="no cloud in which a head could be started"):
        up(ROOT / "examples" / "hosts.yaml")


def test_a_dry_run_of_slurm_shows_the_submission_of_each_node_type_and_what_its_job_runs() -> None:
    steps = dry_run(ROOT / "examples" / "slurm.yaml")
    assert {step.machine for step in steps} == {"a100x4", "scavenge"}
    submitted, run = of(steps, "a100x4")
    assert submitted.startswith("submit sbatch --parsable --job-name=raytide-a100x4 --comment=raytide:CLUSTER:node-1 ")
    assert submitted.endswith(
        "--cpus-per-task=64 --partition=gpu --gres=gpu:a100:4 --account=ml --qos=normal --mem=409600M --time=1440"
    )
    assert run == "run exec ~/venv/bin/python -m raytide.autoscaler.providers.slurm.node FOLDER/node-1.json"
    with pytest.raises(UsageError, match="no cloud in which a head could be started"):
        up(ROOT / "examples" / "slurm.yaml")


def test_a_dry_run_of_several_regions_shows_a_node_of_each_with_its_own_commands() -> None:
    steps = dry_run(ROOT / "examples" / "regions.yaml")
    assert {step.machine for step in steps} == {"head", "l4", "l4.west", "l4-google"}
    for machine, size in (("l4", "g6.xlarge"), ("l4.west", "g6.xlarge"), ("l4-google", "g2-standard-8")):
        bought, *rest = of(steps, machine)
        assert bought.startswith("buy ") and size in bought
        assert f"copy {RAY_TOKEN} to {RAY_TOKEN}" in rest
        assert [line for line in rest if "pip install" in line]
    (notices,) = (line for line in of(steps, "l4-google") if "watch-notices" in line)
    assert notices.endswith("raytide watch-notices gcp")
    west = next(line for line in of(steps, "l4.west") if "ray start" in line)
    assert '"raytide.io/provider": "west"' in west


def test_a_dry_run_of_a_cloud_with_own_machines_buys_only_the_clouds(built: Path) -> None:
    (built / "own_machines").mkdir()
    steps = dry_run(ROOT / "examples" / "burst.yaml")
    assert {step.machine for step in steps} == {"head", "l4", "own-1", "own-2"}
    assert of(steps, "own-2")[0].startswith("run ssh -p 22 raytide@10.8.0.12 ")
    assert in_order(of(steps, "l4"), "g6.xlarge", "rm -rf ~/.ssh/own_machines", "ray start --address")


def of(steps: list[SetUpStep], machine: str) -> list[str]:
    return [f"{step.what} {step.text}" for step in steps if step.machine == machine]


def in_order(texts: list[str], *parts: str) -> bool:
    found = iter(texts)
    return all(any(part in text for text in found) for part in parts)


def test_a_dry_run_shows_every_step_of_the_head_and_of_each_node_type() -> None:
    steps = dry_run(SHIPPED)
    head = of(steps, "head")
    assert head[0] == 'buy {"InstanceType": "m7i.xlarge"}'
    assert in_order(
        head,
        "copy dist/ to ~/raytide/",
        "copy this file to ~/ray_bootstrap_config.yaml",
        "pip install -c ~/constraints.txt",
        "umask 077; ~/venv/bin/ray get-auth-token --generate",
        "ray stop",
        "RAY_AUTH_MODE=token ray start --head --no-monitor",
        "raytide head ~/ray_bootstrap_config.yaml",
    )
    assert not any("autoscaling-config" in text for text in head)
    spot = of(steps, "h100x8.spot")
    assert '"MarketType": "spot"' in spot[0]
    assert in_order(spot, "copy ~/.ray/auth_token to ~/.ray/auth_token", "pip install -c", "ray start --address")
    assert in_order(spot, "ray start --address=$RAY_HEAD_IP:6379", "raytide watch-notices aws")
    assert "export RAY_AUTH_MODE='token'" in spot[-1]
    assert "export RAY_CLOUD_INSTANCE_ID='node-1'" in spot[-1]
    assert len({step.machine for step in steps}) == len(yaml.safe_load(SHIPPED.read_text())["available_node_types"])


TOKEN = "RAY_AUTH_MODE=token "
OPEN = "ray start --head --no-monitor && raytide head x"


@pytest.mark.parametrize(
    ("head", "worker", "message"),
    [
        (OPEN, TOKEN + "ray start", "head_start_ray_commands start Ray without its token"),
        (TOKEN + OPEN, "ray start --address=x", "worker_start_ray_commands start Ray without its token"),
        ("RAY_AUTH_MODE=disabled " + OPEN, TOKEN + "ray start", "head_start_ray_commands start Ray without"),
        (TOKEN + OPEN.replace("--no", "--dashboard-host=0.0.0.0 --no"), TOKEN + "ray start", r"listen on 0\.0\.0\.0"),
        (TOKEN + OPEN.replace("--no", "--dashboard-host '::' --no"), TOKEN + "ray start", "listen on ::"),
        (TOKEN + OPEN.replace("--no", "--dashboard-host=$IP --no"), TOKEN + "ray start", r"listen on \$IP"),
    ],
)
def test_a_ray_that_is_open_to_others_is_refused_unless_wanted(
    head: str, worker: str, message: str, built: Path
) -> None:
    file = yaml.safe_load(SHIPPED.read_text())
    file |= {"setup_commands": [], "head_start_ray_commands": [head], "worker_start_ray_commands": [worker]}
    (built / "open.yaml").write_text(yaml.safe_dump(file))
    for act in (up, dry_run):
        with pytest.raises(ConfigError, match=message) as refused:
            act(built / "open.yaml")
        assert "--insecure" in refused.value.hint
    assert dry_run(built / "open.yaml", insecure=True)


@pytest.mark.parametrize(
    "said",
    [
        {"setup_commands": ["echo export RAY_AUTH_MODE=token >> ~/.bashrc"]},
        {"docker": {"image": "x", "container_name": "y", "run_options": ["-e RAY_AUTH_MODE=token"]}},
        {"initialization_commands": ["echo RAY_AUTH_MODE=TOKEN >> /etc/environment"]},
    ],
)
def test_the_token_may_be_asked_for_elsewhere(said: dict[str, Any]) -> None:
    file = {"head_start_ray_commands": [OPEN], "worker_start_ray_commands": ["ray start"], **said}
    check_file(file, where="file")


Change = Callable[[dict[str, Any]], None]


def head_commands(*commands: str) -> Change:
    return lambda file: file.update(head_start_ray_commands=list(commands))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (head_commands("ray start --head --autoscaling-config=x"), "Ray's own autoscaler"),
        (head_commands("ray start --head"), "Ray's own autoscaler"),
        (head_commands("ray start --head --no-monitor"), "does not start raytide"),
        (lambda file: file["provider"].update(type="asw"), r"no provider of type 'asw' \(did you mean aws\?\)"),
        (lambda file: file.update(file_mounts={"~/raytide": "nowhere"}), "nowhere does not exist"),
        (lambda file: file["provider"].pop("cache_stopped_nodes"), "instead of ending them"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_done(change: Change, message: str, built: Path) -> None:
    file = yaml.safe_load(SHIPPED.read_text())
    change(file)
    (built / "changed.yaml").write_text(yaml.safe_dump(file))
    for act in (up, dry_run):
        with pytest.raises(ConfigError, match=message):
            act(built / "changed.yaml")


@pytest.mark.parametrize(
    ("kind", "hint"), [("local", "--local"), ("fake", "--local"), ("kuberay", "docs/providers.md")]
)
def test_what_no_launcher_starts_says_how_it_is_started(kind: str, hint: str, built: Path) -> None:
    file = yaml.safe_load(SHIPPED.read_text())
    file["provider"] = {"type": kind}
    (built / "other.yaml").write_text(yaml.safe_dump(file))
    with pytest.raises(UsageError) as refused:
        up(built / "other.yaml")
    assert isinstance(refused.value, RaytideError)
    assert hint in refused.value.hint
