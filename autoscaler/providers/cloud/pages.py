"""Completes the listings of Ray's NodeProviders, which read only the first page of a cloud's answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any


def with_all_pages(cloud: Any, kind: str) -> Any:
    """Makes Ray's NodeProvider `cloud` list all machines, and returns it.

    Ray reads only the first page of a listing: 10 machines of Alibaba Cloud, and 500 machines and TPUs of Google Cloud.
    The other machines would count as gone.
    """
    if kind == "aliyun":
        send = cloud.acs._send_request
        cloud.acs._send_request = lambda request: _all_of_aliyun(send, request)
    elif kind == "gcp":
        change_clients(cloud, _list_all_of_gcp)
    return cloud


def change_clients(cloud: Any, change: Callable[[Any], None]) -> None:
    """Calls `change` with Google's NodeProvider, now and whenever Ray makes new clients after a broken connection."""
    construct = cloud._construct_clients

    def construct_clients() -> None:
        construct()
        change(cloud)

    cloud._construct_clients = construct_clients
    change(cloud)


def _all_of_aliyun(send: Callable[[Any], Any], request: Any) -> Any:
    """Sends a request of Ray's client. Returns the answer, which has the machines of all pages."""
    if type(request).__name__ != "DescribeInstancesRequest":
        return send(request)
    request.add_query_param("MaxResults", 100)
    found: list[Any] = []
    while (answer := send(request)) is not None:
        found += answer["Instances"]["Instance"]
        if not answer.get("NextToken"):
            return {**answer, "Instances": {"Instance": found}}
        request.add_query_param("NextToken", answer["NextToken"])
    return None


def _list_all_of_gcp(cloud: Any) -> None:
    for resource in cloud.resources.values():
        client = resource.resource
        if hasattr(client, "instances"):
            client.instances = partial(_listing_all, client.instances, "items")
        else:  # TPUs
            client.projects = partial(_with_all_tpus, client.projects)


def _with_all_tpus(projects: Callable[[], Any]) -> Any:
    """Returns Google's `projects` resource, whose listings of TPUs cover all pages."""
    resource = projects()
    places = resource.locations

    def locations() -> Any:
        place = places()
        place.nodes = partial(_listing_all, place.nodes, "nodes")
        return place

    resource.locations = locations
    return resource


def _listing_all(machines: Callable[[], Any], key: str) -> Any:
    """Returns Google's resource of machines, whose listings cover all pages. The machines are in the
    field `key` of an answer.
    """
    resource = machines()
    first = resource.list
    resource.list = lambda **which: SimpleNamespace(execute=partial(_all_of_gcp, resource, key, first(**which)))
    return resource


def _all_of_gcp(machines: Any, key: str, request: Any, http: Any = None) -> dict[str, Any]:
    found: list[Any] = []
    while request is not None:
        answer = request.execute(http=http)
        found += answer.get(key, [])
        request = machines.list_next(request, answer)
    return {key: found}
