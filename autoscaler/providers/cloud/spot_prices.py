"""AWS's present spot prices by node type and zone, polled every few minutes in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from raytide.core.clock import Clock, utc
from raytide.core.errors import ClusterError
from raytide.core.logs import logger
from raytide.core.money import micro_usd
from raytide.core.objects.node import CapacityType, NodeType

PERIOD_S = 300.0
STALE_S = 3600.0
"""The age from which prices are no longer used."""
_LINUX = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")

Prices = Mapping[tuple[str, str], int]

log = logger(__name__)


class SpotPrices:
    """Polls AWS's present spot prices in a thread.

    `ec2` is boto3's client. `types` maps each spot node type to its AWS instance type.
    """

    def __init__(self, ec2: Any, types: Mapping[str, str], clock: Clock) -> None:
        self._ec2, self._types, self._clock = ec2, types, clock
        self._heard: tuple[float, Prices] | None = None
        self._failure = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spot-prices", daemon=True)

    def now(self) -> Prices:
        """Returns the last prices in micro-dollars an hour by node type and zone. The first call starts the polling.

        Raises ClusterError if the last prices are too old, or if every poll so far has failed. The configured prices
        hold in that case.
        """
        if self._types and not self._thread.is_alive() and not self._stop.is_set():
            self._thread.start()
        if self._is_fresh() or (self._heard is None and not self._failure):
            return self.last()
        since = "never" if self._heard is None else f"last at {utc(self._heard[0])}"
        raise ClusterError(
            f"spot prices were {since} received: {self._failure or 'no answer'}. The configured ones hold.",
            hint="The head's role needs ec2:DescribeSpotPriceHistory.",
        )

    def last(self) -> Prices:
        """Returns the last prices. The result is empty if there are none or if they are too old."""
        return self._heard[1] if self._heard is not None and self._is_fresh() else {}

    def ask(self) -> None:
        """Polls AWS once. An error is stored, and `now` raises it later."""
        try:
            prices = self._ask()
        except Exception as error:  # botocore has its own errors for each service
            self._failure = str(error)
            log.warning("source failed", extra={"source": "spot prices", "error": self._failure})
        else:
            self._heard, self._failure = (self._clock.now_s(), prices), ""

    def close(self) -> None:
        self._stop.set()

    def _is_fresh(self) -> bool:
        return self._heard is not None and self._clock.now_s() - self._heard[0] <= STALE_S

    def _run(self) -> None:
        while not self._stop.is_set():
            self.ask()
            self._stop.wait(PERIOD_S)

    def _ask(self) -> Prices:
        """Fetches the prices; with a start time of now AWS returns the present price of each zone."""
        pages = self._ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=sorted(set(self._types.values())),
            ProductDescriptions=list(_LINUX),
            StartTime=datetime.fromtimestamp(self._clock.now_s(), UTC),
        )
        entries = sorted((entry for page in pages for entry in page["SpotPriceHistory"]), key=lambda e: e["Timestamp"])
        latest = {(e["InstanceType"], e["AvailabilityZone"]): micro_usd(e["SpotPrice"]) for e in entries}
        return {
            (name, zone): price
            for name, machine in self._types.items()
            for (type_, zone), price in latest.items()
            if type_ == machine
        }


def instance_types(config: Mapping[str, Any], node_types: Iterable[NodeType]) -> dict[str, str]:
    """Returns the AWS instance type of each spot node type in a cluster.yaml."""
    ray_types = config["available_node_types"]
    machines = {
        t.name: ray_types[t.name].get("node_config", {}).get("InstanceType")
        for t in node_types
        if t.market is CapacityType.SPOT
    }
    return {name: str(machine) for name, machine in machines.items() if machine}
