"""The interruption notice that a cloud gives to its machine, and the interface of the cloud's metadata service."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import httpx

from raytide.core.errors import ClusterError

T = TypeVar("T")

_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class CloudNotice:
    """A notice that the machine ends at `deadline_s` (seconds since the epoch), or should be empty by that time."""

    deadline_s: float
    what: str
    """The cloud's own text, such as `spot/instance-action terminate`."""


class Metadata(Protocol):
    """One cloud's metadata service, as seen from one of its machines."""

    def pending_notice(self, now_s: float) -> CloudNotice | None:
        """Returns the most urgent pending notice, or None if there is none. Raises ClusterError if the service does not
        answer.
        """


class MetadataService:
    """Queries the metadata service of a cloud machine.

    The queries are plain HTTP to an address that only the machine itself can reach. `get` and `text` return None for
    the answer 404, with which AWS says that there is no notice.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self._url = url
        # a proxy of the environment must never see these requests
        self._http = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S, trust_env=False)

    def get(self, path: str, headers: Mapping[str, str] | None = None, *, method: str = "GET") -> httpx.Response | None:
        try:
            answer = self._http.request(method, path, headers=headers)
        except httpx.HTTPError as error:
            raise ClusterError(
                f"the metadata service at {self._url} does not answer: {error!r}.",
                hint="Is this machine of that cloud, and may its containers reach the service (AWS: hop limit)?",
            ) from None
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return answer

    def checked(self, answer: httpx.Response) -> str:
        if not answer.is_success:
            asked = f"{answer.request.method} {answer.request.url.path}"
            raise ClusterError(f"the metadata service at {self._url} answers {answer.status_code} to {asked}.")
        return answer.text

    def text(self, path: str, headers: Mapping[str, str] | None = None, *, method: str = "GET") -> str | None:
        answer = self.get(path, headers, method=method)
        return None if answer is None else self.checked(answer)


def read(body: str, parse: Callable[[Any], T]) -> T:
    """Returns the result of `parse` for the service's JSON answer. Raises ClusterError if the answer is not in the
    documented form.
    """
    try:
        return parse(json.loads(body))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ClusterError(f"the metadata service's answer is not in the documented form: {body[:200]!r}.") from error
