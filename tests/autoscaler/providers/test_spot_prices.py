"""AWS's spot prices: what is asked, what is made of the answer, and what holds while there is none."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.autoscaler.providers.test_cloud import SHIPPED

from raytide.autoscaler.providers.cloud.spot_prices import STALE_S, SpotPrices, instance_types
from raytide.core.clock import VirtualClock
from raytide.core.errors import ClusterError
from raytide.core.objects.cluster_config import load_cluster

TYPES = {"big.spot": "p5.48xlarge", "big2.spot": "p5.48xlarge", "small.spot": "g6.xlarge"}


class Ec2:
    """A client that answers in pages, or fails."""

    def __init__(self, *pages: list[dict[str, Any]]) -> None:
        self.pages, self.asked, self.is_down = pages, {}, False

    def get_paginator(self, name: str) -> Ec2:
        assert name == "describe_spot_price_history"
        return self

    def paginate(self, **asked: Any) -> Iterator[dict[str, Any]]:
        if self.is_down:
            raise OSError("no route to host")
        self.asked = asked
        return ({"SpotPriceHistory": page} for page in self.pages)


def entry(machine: str, zone: str, price: str, hour: int) -> dict[str, Any]:
    at = datetime(2026, 7, 1, hour, tzinfo=UTC)
    return {"InstanceType": machine, "AvailabilityZone": zone, "SpotPrice": price, "Timestamp": at}


def asked_once(ec2: Ec2, clock: VirtualClock) -> SpotPrices:
    prices = SpotPrices(ec2, TYPES, clock)
    prices.ask()
    prices.close()
    return prices


def test_the_latest_price_of_each_zone_holds_for_every_node_type_of_that_machine() -> None:
    ec2 = Ec2(
        [entry("p5.48xlarge", "us-1a", "20.5", 9), entry("p5.48xlarge", "us-1a", "19.25", 8)],
        [entry("g6.xlarge", "us-1b", "0.3001", 7), entry("m5.large", "us-1b", "0.01", 7)],
    )
    prices = asked_once(ec2, VirtualClock(1_000.0))
    big = 20_500_000
    assert prices.now() == {("big.spot", "us-1a"): big, ("big2.spot", "us-1a"): big, ("small.spot", "us-1b"): 300_100}
    assert ec2.asked["InstanceTypes"] == ["g6.xlarge", "p5.48xlarge"]
    assert ec2.asked["StartTime"] == datetime.fromtimestamp(1_000.0, UTC)


def test_a_price_that_is_old_is_not_believed_and_that_is_said_until_there_is_a_new_one() -> None:
    ec2, clock = Ec2([entry("g6.xlarge", "us-1b", "0.3", 7)]), VirtualClock(1_000.0)
    prices = asked_once(ec2, clock)
    ec2.is_down = True
    prices.ask()
    clock.advance(STALE_S)
    assert len(prices.now()) == 1
    clock.advance(1.0)
    with pytest.raises(ClusterError, match=r"last at .* received: no route to host. The configured ones hold"):
        prices.now()
    ec2.is_down = False
    prices.ask()
    assert len(prices.now()) == 1


def test_where_nothing_was_ever_heard_the_failure_is_said_and_before_the_first_answer_nothing() -> None:
    ec2 = Ec2()
    ec2.is_down = True
    prices = SpotPrices(ec2, {}, VirtualClock(0.0))
    assert prices.now() == {}
    prices.ask()
    with pytest.raises(ClusterError, match="never received: no route to host"):
        prices.now()


def test_an_aws_tells_the_prices_of_the_shipped_file_s_spot_types(aws: None) -> None:
    import boto3
    import yaml

    node_types = load_cluster(SHIPPED).node_types
    machines = instance_types(yaml.safe_load(SHIPPED.read_text()), node_types)
    assert machines == {"a100x8.spot": "p4d.24xlarge", "h100x8.spot": "p5.48xlarge"}
    prices = SpotPrices(boto3.client("ec2"), machines, VirtualClock(1_000.0))
    prices.ask()
    assert ("a100x8.spot", "us-east-1a") in prices.now()
    assert set(prices.now().values()) == {10}
