"""An AWS on this machine, for the whole session. The root conftest takes its fixtures from here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def aws(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty account, and nothing of the caller's own."""
    import httpx

    for name, value in {
        "AWS_ENDPOINT_URL": moto_url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    httpx.post(f"{moto_url}/moto-api/reset", timeout=180.0).raise_for_status()


@pytest.fixture
def aws_for_ray(aws: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home in which Ray keeps the key pair that it makes; and its role, else it makes one and waits 15 s for it."""
    import boto3
    from ray.autoscaler._private.aws import utils

    for cache in (utils.resource_cache, utils.client_cache):  # they may hold connections without credentials
        cache.cache_clear()
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    iam = boto3.client("iam")
    iam.create_role(RoleName="ray-autoscaler-v1", AssumeRolePolicyDocument="{}")
    iam.create_instance_profile(InstanceProfileName="ray-autoscaler-v1")
    iam.add_role_to_instance_profile(InstanceProfileName="ray-autoscaler-v1", RoleName="ray-autoscaler-v1")
    return tmp_path
