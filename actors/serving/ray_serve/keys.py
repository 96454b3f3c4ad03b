"""The keys of Ray's internal key-value store (in the GCS). The controller, Serve's policy, the replicas and the
gateways use these keys to exchange data.

`policy.py` defines the keys that it uses itself. It cannot import them from this module: Serve pickles `policy.py`
by value, so `policy.py` must not import anything of raytide.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from raytide.actors.serving.ray_serve.policy import KV_NAMESPACE as KV_NAMESPACE
from raytide.actors.serving.ray_serve.policy import load_key as load_key
from raytide.actors.serving.ray_serve.policy import target_key as target_key
from raytide.core.objects.endpoint_load import InstallFailure

ROUTES = b"~route/"
"""The prefix of the keys of routes. No application's name begins with it."""


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """The address of a replica's engine process, and the secret that a connection to the process needs."""

    host: str
    port: int
    secret: str
    metrics: str = ""
    """`host:port` of the engine process's metrics page."""

    def dump(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, value: bytes) -> ReplicaAddress:
        return cls(**json.loads(value))


def spec_key(endpoint: str) -> bytes:
    """Returns the key of an endpoint's last deployed spec. The value is the endpoint's creation time, a space, and the
    spec as JSON. The creation time distinguishes the endpoint from an earlier, deleted endpoint of the same name.
    """
    return f"{endpoint}/spec".encode()


def wire_key(endpoint: str) -> bytes:
    """Returns the key of the version of `wire` with which the endpoint was last deployed, which its replicas speak."""
    return f"{endpoint}/wire".encode()


def replica_key(endpoint: str, replica: str) -> bytes:
    """Returns the key of a replica's address. If the replica was killed, the controller deletes the key."""
    return replica_prefix(endpoint) + replica.encode()


def replica_prefix(endpoint: str) -> bytes:
    return f"{endpoint}/replica/".encode()


def live_prefix(endpoint: str) -> bytes:
    """Returns the prefix of the keys under which an endpoint's replicas report the state of the spec's live fields. A
    key ends with a replica's id. The value is ReplicaLive as JSON, without the id.
    """
    return f"{endpoint}/live/".encode()


def log_prefix(endpoint: str) -> bytes:
    """Returns the prefix of the keys under which an endpoint's replica logs are stored. Each key is this prefix and a
    replica's id. The value under the key is a ReplicaLog as JSON, without the id. The newest logs are kept after their
    replicas have ended.
    """
    return f"{endpoint}/log/".encode()


def startup_prefix(endpoint: str) -> bytes:
    """Returns the prefix of the keys under which an endpoint's replicas publish the phases of their start. A key ends
    with a replica's id.
    """
    return f"{endpoint}/startup/".encode()


def route_key(endpoint: str) -> bytes:
    """Returns the key of an endpoint's route. The value is EndpointRoute as JSON. The route may outlive the
    applications that it names.
    """
    return ROUTES + endpoint.encode()


def install_key(endpoint: str) -> bytes:
    """Returns the key under which the GCS stores the last failure to install an endpoint's packages. The stored value
    is an InstallFailure as JSON.
    """
    return f"{endpoint}/install".encode()


def install_record(failure: InstallFailure) -> bytes:
    return json.dumps(asdict(failure)).encode()


def failure_of(record: bytes | None) -> InstallFailure | None:
    """Returns the failure that `record` describes. `record` is a value that was stored under `install_key`. Returns
    None if `record` is None.
    """
    return None if record is None else InstallFailure(**json.loads(record))


def begun_key(endpoint: str) -> bytes:
    """Returns the key that exists once a replica of the current deployment has become ready."""
    return f"{endpoint}/begun".encode()


def queue_key(endpoint: str, gateway: str) -> bytes:
    """Returns the key of a gateway's queue length: how many of the endpoint's requests wait in the gateway for a
    replica. The value is JSON with `at_s` and `queued`.
    """
    return queue_prefix(endpoint) + gateway.encode()


def queue_prefix(endpoint: str) -> bytes:
    return f"{endpoint}/queue/".encode()
