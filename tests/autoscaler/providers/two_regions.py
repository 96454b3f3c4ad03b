"""A cluster in two regions of a moto AWS and a fake cloud, with providers as the controller makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from raytide.autoscaler.providers.base import Provider
from raytide.autoscaler.providers.mixed import MixedProvider
from raytide.control.bootstrap.cluster_record import HeadCluster
from raytide.control.bootstrap.wiring import provider
from raytide.core import ray_internals

REGIONS = ("us-east-1", "us-west-2")
ZONES = {"cpu": "us-east-1a", "cpu.west": "us-west-2b", "cpu.fake": "nowhere-1"}


def regions_file() -> dict[str, Any]:
    """Returns the file as its author writes it."""
    sold = {"resources": {"CPU": 2}, "node_config": {"InstanceType": "m7i.large"}, "max_workers": 4}
    west = {"type": "aws", "region": "us-west-2", "cache_stopped_nodes": False}
    price = {"price_usd_h": 0.01}
    return {
        "cluster_name": "tide",
        "provider": {**west, "region": "us-east-1"},
        "auth": {"ssh_user": "ubuntu"},
        "head_node_type": "head",
        "available_node_types": {"head": {**sold, "max_workers": 0}, "cpu": sold},
        "worker_start_ray_commands": ["ray start --address=$RAY_HEAD_IP:6379"],
        "metadata": {
            "raytide": {
                "node_types": {name: {**price, "zones": [zone]} for name, zone in ZONES.items()},
                "providers": {
                    "west": {"provider": west, "available_node_types": {"cpu.west": sold}},
                    "other": {"provider": {"type": "fake"}, "available_node_types": {"cpu.fake": sold}},
                },
            }
        },
    }


def regions_cluster(folder: Path) -> HeadCluster:
    """Returns the record of a cluster with that file, its own section completed by Ray as `ray up` does."""
    completed = ray_internals.bootstrapped_config(regions_file())
    del completed["head_node"]  # Ray copies the file to the head without it
    (folder / "cluster.yaml").write_text(yaml.safe_dump(completed))
    return HeadCluster(
        name="tide",
        cluster_id="tide-1",
        run_dir=folder,
        gcs_address="127.0.9.1:6388",
        dashboard_url="",
        api_url="",
        serve_url="",
        state_url="",
        config_path=folder / "cluster.yaml",
        created_at_s=0.0,
        version="",
    )


def regions_provider(folder: Path) -> MixedProvider:
    return patient(provider(regions_cluster(folder)))


def patient(made: Provider) -> MixedProvider:
    """Lets each call take as long as Ray's bootstrap of a region does on a busy machine."""
    assert isinstance(made, MixedProvider)
    for source in made._sources.values():
        source._answer_s = source._patience_s = 300.0
    return made


def instances(region: str) -> list[Any]:
    """Returns the machines that run in a region."""
    import boto3

    live = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    return list(boto3.resource("ec2", region_name=region).instances.filter(Filters=live))
