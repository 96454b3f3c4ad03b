"""raytide's controller's hand on Ray Serve: deploy endpoints, publish their numbers of replicas, read their loads.

Blocking calls, each with a timeout. Nothing here owns anything: Serve's controller and proxy are detached actors, so
endpoints go on answering while raytide's controller is dead, and the next one calls the same verbs again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from raytide.actors.serving import edge, policy
from raytide.core.endpoint import Endpoint, EndpointLoad
from raytide.core.errors import ClusterError, RaytideError, WaitTimeoutError

__all__ = ["ServeControl"]

_T = TypeVar("_T")
_STAYING = frozenset({"STARTING", "UPDATING", "RECOVERING", "RUNNING", "PENDING_MIGRATION"})
_READY = frozenset({"RUNNING", "PENDING_MIGRATION"})


class ServeControl:
    """Needs a process that is connected to the cluster (`ray.init`) whenever a verb is called."""

    def __init__(
        self, http_host: str, http_port: int, *, call_timeout_s: float = 10.0, start_timeout_s: float = 90.0
    ) -> None:
        self._http_host = http_host
        self._http_port = http_port
        self._call_timeout_s = call_timeout_s
        self._start_timeout_s = start_timeout_s

    def base_url(self, name: str) -> str:
        """What an OpenAI client is given. Each endpoint has a path prefix of its own behind the one proxy."""
        return f"http://{self._http_host}:{self._http_port}/{name}/v1"

    def start(self) -> None:
        """Serve's controller, and one HTTP proxy on the head; neither takes a CPU. Does nothing when they run."""

        def call() -> None:
            from ray import serve

            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": self._http_host, "port": self._http_port},
                controller_options={
                    "runtime_env": {"env_vars": {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": edge.IMPORT_PATH}}
                },
            )

        _within(self._start_timeout_s, "Ray Serve to start", call)

    def deploy(self, endpoint: Endpoint) -> None:
        """Ask Serve for the endpoint; its replicas start in the background. The same one again changes nothing."""
        spec = f"{endpoint.created_at_s} {endpoint.spec.model_dump_json()}".encode()
        if endpoint.name in self.names() and self._get(_spec_key(endpoint.name)) == spec:
            return

        def call() -> None:
            from ray import serve

            from raytide.actors.serving.deployment import application

            self._publish(endpoint.name, endpoint.target_replicas)
            target = serve.RunTarget(application(endpoint), name=endpoint.name, route_prefix=f"/{endpoint.name}")
            serve.run_many([target], wait_for_applications_running=False)
            self._put(_spec_key(endpoint.name), spec)

        _within(self._start_timeout_s, f"Ray Serve to accept endpoint {endpoint.name}", call)

    def publish(self, name: str, target: int) -> None:
        """How many replicas the endpoint is to have; Serve's controller acts on it within about a second."""
        _within(self._call_timeout_s, f"the GCS to store the target of {name}", lambda: self._publish(name, target))

    def load(self, name: str) -> EndpointLoad | None:
        """None until Serve has said something about the endpoint."""
        application = self._details().get(name)
        seen = self._get(policy.load_key(name))
        if application is None or seen is None:
            return None
        said = json.loads(seen)
        replicas = [
            replica
            for deployment in application["deployments"].values()
            for replica in deployment["replicas"]
            if replica["state"] in _STAYING
        ]
        return EndpointLoad(
            at_s=said["at_s"],
            ongoing=said["ongoing"],
            ready=sum(replica["state"] in _READY for replica in replicas),
            replica_nodes=tuple(sorted(replica["node_id"] for replica in replicas if replica.get("node_id"))),
        )

    def failure(self, name: str) -> str:
        """Why Serve gave the endpoint up, in Serve's words; empty while it has not: an UNHEALTHY one it still mends."""
        application = self._details().get(name, {})
        if application.get("status") != "DEPLOY_FAILED":
            return ""
        said = [str(deployment.get("message", "")) for deployment in application["deployments"].values()]
        return "\n".join(filter(None, [str(application.get("message", "")), *said])) or str(application["status"])

    def delete(self, name: str) -> None:
        """Take the endpoint away; its replicas finish what they answer. Nothing happens when there is none."""

        def call() -> None:
            from ray import serve

            for key in (_spec_key(name), policy.target_key(name), policy.load_key(name)):
                _gcs().internal_kv_del(key, False, policy.KV_NAMESPACE, timeout=self._call_timeout_s)
            if name in self._details():
                serve.delete(name, _blocking=False)

        _within(self._start_timeout_s, f"Ray Serve to delete endpoint {name}", call)

    def names(self) -> frozenset[str]:
        """The endpoints that Serve has, those included whose replicas still finish what they answer."""
        return frozenset(self._details())

    def _details(self) -> dict[str, Any]:
        """Serve's applications by name; none when Serve does not run."""

        def call() -> dict[str, Any]:
            import ray
            from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

            try:
                controller: Any = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
            except ValueError:
                return {}
            details = ray.get(controller.get_serve_instance_details.remote(), timeout=self._call_timeout_s)
            applications: dict[str, Any] = details["applications"]
            return applications

        return _within(self._call_timeout_s + 1.0, "Ray Serve's controller to answer", call)

    def _publish(self, name: str, target: int) -> None:
        self._put(policy.target_key(name), str(target).encode())

    def _put(self, key: bytes, value: bytes) -> None:
        _gcs().internal_kv_put(key, value, True, policy.KV_NAMESPACE, timeout=self._call_timeout_s)

    def _get(self, key: bytes) -> bytes | None:
        value: bytes | None = _gcs().internal_kv_get(key, policy.KV_NAMESPACE, timeout=self._call_timeout_s)
        return value


def _spec_key(name: str) -> bytes:
    """What was last deployed, and when it was created: a restarted controller tells a new one from the old."""
    return f"{name}/spec".encode()


def _gcs() -> Any:
    from ray._private.worker import global_worker

    worker: Any = global_worker
    worker.check_connected()
    return worker.gcs_client


def _within(timeout_s: float, what: str, call: Callable[[], _T]) -> _T:
    """Serve's own calls wait without limit, so they run in a thread that is left behind when it takes too long."""
    done: list[_T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(call())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise WaitTimeoutError(f"waited {timeout_s:g} s for {what}.", hint="`raytide status` says how the cluster is.")
    if not failed:
        return done[0]
    if isinstance(failed[0], RaytideError):
        raise failed[0]
    raise ClusterError(f"while waiting for {what}: {failed[0]}", hint="Serve's own logs have more.") from failed[0]
