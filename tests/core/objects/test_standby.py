"""`metadata.raytide.standby`: what is accepted, and what is refused and why."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytide.core.errors import ConfigError
from raytide.core.objects.cluster_config import load_cluster

ROOT = Path(__file__).parents[3]
STANDBY = {"address": "10.0.0.9", "redis_url": "redis://10.0.0.5:6379", "shared_dir": "/mnt/tide"}


@pytest.fixture
def file() -> dict[str, Any]:
    file: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "hosts.yaml").read_text())
    file["metadata"]["raytide"] |= {"state_url": "postgresql://raytide@db/tide", "standby": dict(STANDBY)}
    return file


def load(file: dict[str, Any], tmp_path: Path) -> Any:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(file))
    return load_cluster(path).settings.standby


def refusal(file: dict[str, Any], tmp_path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(file, tmp_path)
    assert caught.value.hint
    return caught.value


def test_address_redis_and_a_shared_folder_are_enough(file: dict[str, Any], tmp_path: Path) -> None:
    found = load(file, tmp_path)
    assert (found.gcs_address, found.redis_address, found.has_tls) == ("10.0.0.9:6379", ("10.0.0.5", 6379), False)
    assert found.redis_password() == ""


def test_a_state_on_the_disk_of_one_machine_is_refused_with_the_reason(file: dict[str, Any], tmp_path: Path) -> None:
    for url, named in (("", "a SQLite file in the run folder"), ("sqlite:////mnt/state.db", "sqlite is")):
        other = copy.deepcopy(file)
        other["metadata"]["raytide"]["state_url"] = url
        error = refusal(other, tmp_path)
        assert "standby needs state in PostgreSQL" in str(error) and named in str(error)
        assert "cannot keep a former head from writing" in str(error)
        assert "state_url" in error.hint


def test_a_backup_without_the_shared_folder_is_refused(file: dict[str, Any], tmp_path: Path) -> None:
    file["metadata"]["raytide"]["backup"] = {"repository": "/backups", "password_file": "/password"}
    error = refusal(file, tmp_path)
    assert "backups would lack tokens and purchases" in str(error) and "/mnt/tide" in error.hint
    file["metadata"]["raytide"]["backup"]["paths"] = ["/mnt/tide"]
    assert load(file, tmp_path) is not None


def test_kubernetes_restarts_a_head_itself(file: dict[str, Any], tmp_path: Path) -> None:
    file["provider"] = {"type": "kuberay"}
    assert "Kubernetes restarts the head's pod" in str(refusal(file, tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("address", "head.internal", "address 'head.internal' is not an IP address"),
        ("redis_url", "redis://:secret@10.0.0.5", "the password belongs in redis_password_file"),
        ("redis_url", "http://10.0.0.5", "redis_url"),
        ("ray_options", ["--port=7000"], "raytide sets --port itself"),
        ("ray_options", ["--redis-password=x"], "raytide sets --redis-password itself"),
        ("ray_options", ["--node-ip-address=1.2.3.4"], "raytide sets --node-ip-address itself"),
        ("lease_s", 1, "lease_s"),
        ("shared_dir", "tide", "shared_dir"),
        ("adress", "10.0.0.9", "did you mean address"),
    ],
)
def test_a_wrong_key_is_named(file: dict[str, Any], tmp_path: Path, key: str, value: object, named: str) -> None:
    file["metadata"]["raytide"]["standby"][key] = value
    assert named in str(refusal(file, tmp_path))


def test_a_password_that_cannot_be_read_is_named_when_it_is_needed(file: dict[str, Any], tmp_path: Path) -> None:
    file["metadata"]["raytide"]["standby"]["redis_password_file"] = str(tmp_path / "password")
    found = load(file, tmp_path)
    with pytest.raises(ConfigError, match="redis_password_file: cannot read"):
        found.redis_password()
    (tmp_path / "password").write_text("secret\n")
    assert found.redis_password() == "secret"
