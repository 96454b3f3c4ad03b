"""The few calls of the Kubernetes API that the KubeRay provider needs, with a service account's token."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raytide.core.errors import ClusterError, ConfigError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 30.0

Patch = Sequence[dict[str, object]]
"""RFC 6902 operations, applied all or none."""


class KubeApi:
    """The Kubernetes API of one namespace. Each call reads the token from its file, because Kubernetes renews the token
    there.
    """

    def __init__(self, url: str, namespace: str, *, account: Path = _ACCOUNT) -> None:
        import httpx

        ca = account / "ca.crt"
        self._token = account / "token"
        self._namespace = namespace
        self._http = httpx.Client(
            base_url=url, timeout=_TIMEOUT_S, verify=str(ca) if ca.exists() else url.startswith("https")
        )

    @classmethod
    def of_this_pod(cls) -> KubeApi:
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
        if host is None or not (_ACCOUNT / "namespace").exists():
            raise ConfigError(
                "this process does not run in a pod with a service account.",
                hint="Run `raytide head` in the RayCluster's head pod; docs/providers.md has the manifest.",
            )
        return cls(f"https://{host}:{port}", (_ACCOUNT / "namespace").read_text().strip())

    def cluster(self, name: str) -> dict[str, Any]:
        return self._call("GET", self._cluster_path(name))

    def patch_cluster(self, name: str, patch: Patch) -> None:
        self._call("PATCH", self._cluster_path(name), patch)

    def workers(self, cluster: str) -> list[dict[str, Any]]:
        """Returns the cluster's worker pods, including terminating ones."""
        selector = f"ray.io/cluster={cluster},ray.io/node-type=worker"
        found: list[dict[str, Any]] = self._call("GET", f"{self._pods_path}?labelSelector={selector}")["items"]
        return found

    def patch_pod(self, name: str, patch: Patch) -> None:
        self._call("PATCH", f"{self._pods_path}/{name}", patch)

    def nodes(self) -> list[dict[str, Any]]:
        """Returns the nodes of the whole Kubernetes cluster."""
        found: list[dict[str, Any]] = self._call("GET", "/api/v1/nodes")["items"]
        return found

    def close(self) -> None:
        self._http.close()

    @property
    def _pods_path(self) -> str:
        return f"/api/v1/namespaces/{self._namespace}/pods"

    def _cluster_path(self, name: str) -> str:
        return f"/apis/ray.io/v1/namespaces/{self._namespace}/rayclusters/{name}"

    def _call(self, method: str, path: str, patch: Patch | None = None) -> dict[str, Any]:
        import httpx

        headers = {"Authorization": f"Bearer {self._token.read_text().strip()}"} if self._token.exists() else {}
        if patch is not None:
            headers["Content-Type"] = "application/json-patch+json"
        try:
            answer = self._http.request(method, path, headers=headers, json=None if patch is None else list(patch))
            answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            raise ClusterError(
                f"Kubernetes refused {method} {path}: {error.response.status_code} {error.response.text[:300]}",
                hint="raytide's service account must be allowed to; docs/providers.md has its roles.",
            ) from None
        except httpx.HTTPError as error:
            raise ClusterError(f"Kubernetes does not answer: {error!r}.", hint="The next tick asks again.") from None
        body: dict[str, Any] = answer.json()
        return body
