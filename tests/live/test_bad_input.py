"""Bad input gets one clear error with a hint and its exit code; what was there before stays."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import raytide as rt
from raytide.control.bootstrap import local
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.bootstrap.loopback import claim
from raytide.core.errors import ConflictError
from raytide.core.specs.train import TrainSpec

pytestmark = pytest.mark.cluster

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def refused(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, (done.stdout, done.stderr)
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("raytide: ")]
    assert done.stderr.rstrip().endswith(message)
    assert "Traceback" not in done.stderr
    return message


def write(path: Path, data: object) -> str:
    path.write_text(yaml.safe_dump(data))
    return str(path)


def test_a_missing_spec_file(raytide_cli: Cli, tmp_path: Path) -> None:
    assert "none.yaml" in refused(raytide_cli("train", str(tmp_path / "none.yaml")), 2)


def test_a_missing_input_file_ends_the_build_with_its_name(raytide_cli: Cli, tmp_path: Path) -> None:
    spec = write(tmp_path / "data.yaml", {"inputs": [str(tmp_path / "gone.txt")], "out": str(tmp_path / "out")})
    done = raytide_cli("data", "build", spec, "--json")
    assert done.returncode == 1
    assert "gone.txt" in json.loads(done.stdout)["job"]["reason"]
    assert not (tmp_path / "out").exists()


def test_an_empty_corpus_says_what_was_dropped(raytide_cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    spec = write(tmp_path / "data.yaml", {"inputs": [str(tmp_path / "empty.txt")], "out": str(tmp_path / "out")})
    done = raytide_cli("data", "build", spec, "--json")
    assert done.returncode == 1
    assert "the corpus is empty" in json.loads(done.stdout)["job"]["reason"]


def test_a_missing_dataset_is_refused_before_it_waits(raytide_cli: Cli, tmp_path: Path) -> None:
    spec = write(tmp_path / "t.yaml", {"dataset": str(tmp_path / "none"), "out": str(tmp_path / "out"), "steps": 1})
    assert "is not a token dataset" in refused(raytide_cli("train", spec), 2)


def test_a_gang_that_no_node_type_can_hold(raytide_cli: Cli, dataset: Path, tmp_path: Path) -> None:
    gang = {"shapes": [{"members": 1, "resources": {"CPU": 64}}]}
    body = {"dataset": str(dataset), "out": str(tmp_path / "out"), "steps": 1, "gang": gang}
    message = refused(raytide_cli("train", write(tmp_path / "t.yaml", body)), 2)
    assert "no node type fits" in message
    assert "needs 64 CPU" in message
    assert "2 CPU (cpu2)" in message


@pytest.mark.parametrize(
    ("change", "says"),
    [({"max_wrokers": 1}, "max_wrokers"), ({"price": -1.0}, "price_usd_h"), ({"extra": 1}, "did you mean")],
    ids=["an unknown key of Ray's", "a negative price", "an unknown key of ours"],
)
def test_a_bad_cluster_file_starts_nothing(
    raytide_cli: Cli, tmp_path: Path, change: dict[str, float], says: str
) -> None:
    body = yaml.safe_load(local.DEFAULT_CONFIG.read_text())
    node_type = body["metadata"]["raytide"]["node_types"]["cpu2"]
    if "price" in change:
        node_type["price_usd_h"] = change["price"]
    elif "extra" in change:
        node_type["price_usd"] = change["extra"]
    else:
        body |= change
    path = write(tmp_path / "cluster.yaml", body)
    assert says in refused(raytide_cli("up", path, "--local", "--name", "bad"), 2)
    assert "no cluster" in refused(raytide_cli("status", "--cluster", "bad"), 4)


def test_a_second_up_of_the_same_name_is_refused_with_what_to_do(raytide_cli: Cli, live: LocalCluster) -> None:
    message = refused(raytide_cli("up", "--local", "--name", live.name), 1)
    assert "is already up" in message
    assert "raytide down" in message


def test_a_port_in_use_is_named_and_leaves_nothing(live: LocalCluster, tmp_path: Path) -> None:
    taken, claimed = claim({k: [(f"127.0.{k}.1", 8265)] for k in range(240, 250)})
    with socket.socket() as holder:
        holder.bind((f"127.0.{taken}.1", 8265))
        holder.listen()
        claimed.close()
        with pytest.raises(ConflictError, match="8265"):
            local.up(name="busy", k=taken)
    assert local.down("busy") is None


def test_an_unknown_job_and_a_bad_usage_have_their_exit_codes(raytide_cli: Cli) -> None:
    assert "job-9999" in refused(raytide_cli("why", "job-9999"), 4)
    assert raytide_cli("ps", "--no-such-flag").returncode == 2


def test_a_flipped_byte_in_the_only_checkpoint_is_found_and_named(
    tide: rt.Client, train_spec: Callable[..., TrainSpec]
) -> None:
    spec = train_spec(steps=4, checkpoint_every=2, keep_checkpoints=1, export=False)
    tide.train(spec).wait(timeout_s=360.0)
    (checkpoint,) = sorted(Path(spec.out, "checkpoints").iterdir())
    victim = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    body = bytearray(victim.read_bytes())
    body[len(body) // 2] ^= 1
    victim.write_bytes(body)

    again = tide.train(spec.model_copy(update={"steps": 6}))
    with pytest.raises(rt.RaytideError) as caught:
        again.wait(timeout_s=360.0)
    assert victim.name in str(caught.value) or checkpoint.name in str(caught.value)
