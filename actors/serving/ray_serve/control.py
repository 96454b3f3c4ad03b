"""Controls Ray Serve for raytide's controller: deploys endpoints, publishes their replica counts and reads their loads.

Calls block, and each call has a timeout. No state is kept here but the ids of placement groups. Serve's controller is a
detached actor, and endpoints answer while raytide's controller is down. A new controller makes the same calls again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields

from raytide.actors.engine.backends.remote import wire
from raytide.actors.serving.ray_serve.application import Application
from raytide.actors.serving.ray_serve.keys import (
    KV_NAMESPACE,
    ReplicaAddress,
    begun_key,
    failure_of,
    install_key,
    live_prefix,
    load_key,
    queue_prefix,
    replica_key,
    replica_prefix,
    route_key,
    spec_key,
    startup_prefix,
    target_key,
    wire_key,
)
from raytide.actors.serving.ray_serve.replica_log import MOST_LOGS, forgotten, logs_of
from raytide.actors.serving.ray_serve.spanning import SpanningGroups
from raytide.actors.serving.ray_serve.startup import startup_of
from raytide.core import ray_internals
from raytide.core.io.timeout import call_with_timeout
from raytide.core.objects.endpoint import LIVE_FIELDS, Endpoint, ServeSpec
from raytide.core.objects.endpoint_load import Counters, EndpointLoad, ReplicaLive, ReplicaLoad
from raytide.core.specs.rollout import endpoint_of

_REPORTS = (b"/queue/", b"/startup/", b"/live/", b"/replica/", b"/log/")
_QUEUE_REPORT_S = 5.0
"""The age in seconds from which a report on waiting requests is ignored, because its gateway has ended."""
LOOK_TIMEOUT_S = 4.0
"""The timeout, in seconds, of one reading of the loads of all endpoints. A tick waits for it."""
LIST_TIMEOUT_S = 60.0
"""The timeout, in seconds, for listing Serve's applications. No tick waits for that. A busy Serve takes seconds for it,
and if it fails, nothing is deployed or deleted.
"""
CALL_TIMEOUT_S, START_TIMEOUT_S = 10.0, 90.0
_UNRECORDED_WIRE = b"9"
"""The version of `wire` that replicas speak if none was recorded at their deployment, by an earlier release."""


class ServeControl:
    """Reads and sets the state of Ray Serve: deployments, replica counts, loads.

    Its methods need a process that is connected to the cluster (`ray.init`).
    """

    def __init__(self, *, look_timeout_s: float = LOOK_TIMEOUT_S) -> None:
        self._look_timeout_s = look_timeout_s
        self._groups_of_looks, self._groups_of_lists = SpanningGroups(), SpanningGroups()  # one per thread

    def start(self) -> None:
        """Starts Serve's controller unless it is running. The controller reserves no CPU of the cluster.

        Serve's own proxy stays off, because it would serve requests without API keys. Requests come through
        raytide's gateway.
        """

        def call() -> None:
            from ray import serve

            serve.start(proxy_location="Disabled")

        call_with_timeout(START_TIMEOUT_S, "Ray Serve to start", call)

    def deploy(self, endpoint: Endpoint, *, is_there: bool) -> bool:
        """Deploys an endpoint. The endpoint's replicas start in the background. An unchanged endpoint is not deployed
        again.

        `is_there` is true if `applications` lists an application of the endpoint's name. Returns whether Serve was
        called. If only live fields have changed, running replicas apply them by themselves, and Serve is not called. A
        new release deploys an endpoint again only if the gateways cannot talk to its replicas any more.
        """
        spec = f"{endpoint.created_at_s} {endpoint.spec.model_dump_json(exclude={'price'})}".encode()
        keys = spec_key(endpoint.name), wire_key(endpoint.name)
        found = self._get(keys) if is_there else {}
        deployed, own_wire = found.get(keys[0], b""), str(wire.VERSION).encode()
        is_understood = found.get(keys[1], _UNRECORDED_WIRE) == own_wire  # else no gateway can reach the replicas
        if is_understood and deployed == spec:
            return False
        if is_understood and _work(deployed) == _work(spec):
            what = f"the GCS to store the spec of {endpoint.name}"
            call_with_timeout(CALL_TIMEOUT_S, what, lambda: self._put(spec_key(endpoint.name), spec))
            return False

        def call() -> None:
            from ray import serve

            from raytide.actors.serving.ray_serve.deployment import application

            self._publish(endpoint.name, endpoint.target_replicas)
            self._forget([install_key(endpoint.name), begun_key(endpoint.name)])
            nothing = json.dumps({"at_s": time.time()}).encode()
            self._put(load_key(endpoint.name), nothing, overwrite=False)  # its policy reports seconds later
            target = serve.RunTarget(application(endpoint), name=endpoint.name, route_prefix=None)
            serve.run_many([target], wait_for_applications_running=False)
            self._put(keys[1], own_wire)
            self._put(keys[0], spec)

        call_with_timeout(START_TIMEOUT_S, f"Ray Serve to accept endpoint {endpoint.name}", call)
        return True

    def publish(self, name: str, target: int) -> None:
        """Publishes an endpoint's replica count. Serve's controller follows it within about a second."""
        what = f"the GCS to store the target of {name}"
        call_with_timeout(CALL_TIMEOUT_S, what, lambda: self._publish(name, target))

    def publish_route(self, name: str, route: bytes) -> None:
        """Publishes an endpoint's route, which names the applications that answer its requests. Gateways follow within
        half a second.
        """
        what = f"the GCS to store the route of {name}"
        call_with_timeout(CALL_TIMEOUT_S, what, lambda: self._put(route_key(name), route))

    def loads(self, names: Iterable[str]) -> dict[str, EndpointLoad]:
        """Returns the loads of the named endpoints. An endpoint is left out if Serve has no application for it or has
        published no load for it. Also deletes the GCS records of replicas that no longer exist.
        """
        wanted = tuple(names)

        def call() -> dict[str, EndpointLoad]:
            keys = self._keys()  # before the look at Serve: what registers after that is not taken for gone
            applications = _applications(self._look_timeout_s, self._groups_of_looks)
            reports = [key for key in keys if any(kind in key for kind in _REPORTS)]
            published = self._get([key(name) for name in wanted for key in (load_key, install_key)] + reports)
            for name in wanted:
                if name in applications:
                    self._forget_replicas(name, applications[name], keys)
                    self._forget(forgotten(name, logs_of(name, published)))
            return {
                name: _load(name, applications[name], published)
                for name in wanted
                if name in applications and load_key(name) in published
            }

        return call_with_timeout(self._look_timeout_s, "Ray Serve to report its load", call)

    def applications(self) -> dict[str, Application]:
        """Returns Serve's applications by name. Deleted applications are included while their replicas finish
        requests.
        """
        what = "Ray Serve's controller to answer"
        return call_with_timeout(LIST_TIMEOUT_S, what, lambda: _applications(LIST_TIMEOUT_S, self._groups_of_lists))

    def delete(self, name: str, *, is_there: bool) -> None:
        """Deletes an endpoint's GCS records, except its route. If Serve has an application for the endpoint
        (`is_there`), deletes the application. Replicas finish their running requests first.
        """

        def call() -> None:
            from ray import serve

            gcs = ray_internals.connected_gcs()
            gcs.internal_kv_del(f"{name}/".encode(), True, KV_NAMESPACE, timeout=CALL_TIMEOUT_S)
            if is_there:
                serve.delete(name, _blocking=False)

        call_with_timeout(START_TIMEOUT_S, f"Ray Serve to delete endpoint {name}", call)

    def restart_replica(self, name: str, replica: str) -> bool:
        """Kills a replica. Serve starts another replica in its place at once, and the killed replica's requests
        continue elsewhere.

        Returns whether the replica existed. Serve uses no replica id twice, so that a second call with the same id does
        nothing.
        """
        return call_with_timeout(
            CALL_TIMEOUT_S,
            f"Ray to end replica {replica} of {name}",
            lambda: _kill_replica(name, replica, self._look_timeout_s),
        )

    def _forget_replicas(self, name: str, application: Application, keys: Iterable[bytes]) -> None:
        """Deletes the addresses, starts and live fields of replicas that have ended without deleting them."""
        for prefix in (replica_prefix(name), startup_prefix(name), live_prefix(name)):
            for key in keys:
                if key.startswith(prefix) and key.removeprefix(prefix).decode() not in application.replica_ids:
                    self._forget([key])

    def _forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            ray_internals.connected_gcs().internal_kv_del(key, False, KV_NAMESPACE, timeout=CALL_TIMEOUT_S)

    def _keys(self) -> list[bytes]:
        gcs = ray_internals.connected_gcs()
        return list(gcs.internal_kv_keys(b"", KV_NAMESPACE, timeout=self._look_timeout_s))

    def _publish(self, name: str, target: int) -> None:
        self._put(target_key(name), str(target).encode())

    def _put(self, key: bytes, value: bytes, *, overwrite: bool = True) -> None:
        gcs = ray_internals.connected_gcs()
        gcs.internal_kv_put(key, value, overwrite, KV_NAMESPACE, timeout=CALL_TIMEOUT_S)

    def _get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Returns the values of those keys that exist, with one call to the GCS."""
        gcs = ray_internals.connected_gcs()
        return dict(gcs.internal_kv_multi_get(list(keys), KV_NAMESPACE, timeout=self._look_timeout_s))


def _applications(timeout_s: float, groups: SpanningGroups) -> dict[str, Application]:
    """Returns Serve's applications by name; empty if Serve does not run."""
    import ray

    try:
        controller = ray_internals.serve_controller()
    except ValueError:
        return {}
    details = ray.get(controller.get_serve_instance_details.remote(), timeout=timeout_s)
    nodes_of = groups.look()  # one for all applications
    return {
        name: Application.of(application, ray_internals.replica_node, nodes_of)
        for name, application in details["applications"].items()
    }


def _kill_replica(name: str, replica: str, timeout_s: float) -> bool:
    import ray

    controller = ray_internals.serve_controller()
    details = ray.get(controller.get_serve_instance_details.remote(), timeout=timeout_s)
    actors = {
        str(each.get("replica_id")): each["actor_name"]
        for application, seen in details["applications"].items()
        if endpoint_of(application) == name
        for deployment in seen["deployments"].values()
        for each in deployment["replicas"]
    }
    return replica in actors and ray_internals.kill_serve_actor(actors[replica])


def _work(deployed: bytes) -> tuple[str, dict[str, object]]:
    """Returns the parts of a deployed spec that take effect only when a replica starts: the creation time, and all
    fields but the live ones.
    """
    created_at_s, _, spec = deployed.decode().partition(" ")
    fields = json.loads(spec) if spec else {}
    with suppress(ValueError):  # fields that a later release has added are as if they had been left out
        fields = ServeSpec.model_validate(fields).model_dump(mode="json", exclude={"price"})
    return created_at_s, {name: value for name, value in fields.items() if name not in LIVE_FIELDS}


def _queued(name: str, published: Mapping[bytes, bytes]) -> float:
    """Returns the number of requests that wait in gateways for a replica, summed over recent reports."""
    reports = [json.loads(value) for key, value in published.items() if key.startswith(queue_prefix(name))]
    return sum(float(report["queued"]) for report in reports if time.time() - report["at_s"] < _QUEUE_REPORT_S)


def _load(name: str, application: Application, published: Mapping[bytes, bytes]) -> EndpointLoad:
    seen, queued, now_s = json.loads(published[load_key(name)]), _queued(name, published), time.time()
    known = application.replica_ids - application.stopping_ids  # Serve keeps the last reports of others for a while
    by_replica = sorted((replica, stats) for replica, stats in seen.get("replicas", {}).items() if replica in known)
    replicas = tuple(_replica(replica, stats, application.ready_on.get(replica, "")) for replica, stats in by_replica)
    held = sum(replica.running + replica.waiting for replica in replicas)
    return EndpointLoad(
        at_s=seen["at_s"],
        ongoing=held + queued,
        ready=application.ready,
        replica_nodes=application.replica_nodes,
        moving=application.moving,
        replicas=replicas,
        queued=queued,
        startups=tuple(
            startup_of(replica, at_s, published.get(startup_prefix(name) + replica.encode()), now_s)
            for replica, at_s in sorted(application.ordered_at_s.items())
        ),
        live=tuple(
            ReplicaLive(replica, **json.loads(report))
            for replica in sorted(application.ready_on)
            if (report := published.get(live_prefix(name) + replica.encode())) is not None
        ),
        logs=logs_of(name, published)[:MOST_LOGS],
        pages={
            replica: ReplicaAddress.parse(address).metrics
            for replica in sorted(application.ready_on)
            if (address := published.get(replica_key(name, replica))) is not None
        },
        install=failure_of(published.get(install_key(name))),
    )


def _replica(name: str, stats: Mapping[str, float], node: str) -> ReplicaLoad:
    now, since = (
        {field.name: stats[field.name] for field in fields(kind) if field.name in stats}
        for kind in (ReplicaLoad, Counters)
    )
    return ReplicaLoad(id=name, node=node, counters=Counters(**since), **now)
