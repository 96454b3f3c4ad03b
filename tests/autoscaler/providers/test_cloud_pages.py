"""Ray's NodeProviders of Alibaba Cloud and Google Cloud list all machines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from raytide.autoscaler.providers.cloud.pages import with_all_pages


class DescribeInstancesRequest:
    """The request of Alibaba Cloud's library, as far as it is used: the cloud's default is a page of ten machines."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {"MaxResults": 10, "NextToken": "0"}

    def add_query_param(self, name: str, value: Any) -> None:
        self.asked[name] = value


def test_alibabas_machines_are_listed_to_the_last_page() -> None:
    def send(request: DescribeInstancesRequest | str) -> dict[str, Any] | None:
        if isinstance(request, str):
            return {"VpcId": request}
        first, most = int(request.asked["NextToken"]), request.asked["MaxResults"]
        page = [{"InstanceId": f"i-{number}"} for number in range(250)[first : first + most]]
        return {"Instances": {"Instance": page}, "NextToken": str(first + most) if first + most < 250 else ""}

    cloud = with_all_pages(SimpleNamespace(acs=SimpleNamespace(_send_request=send)), "aliyun")
    answer = cloud.acs._send_request(DescribeInstancesRequest())
    assert [each["InstanceId"] for each in answer["Instances"]["Instance"]] == [f"i-{number}" for number in range(250)]
    assert cloud.acs._send_request("vpc-1") == {"VpcId": "vpc-1"}
    failing = with_all_pages(SimpleNamespace(acs=SimpleNamespace(_send_request=lambda request: None)), "aliyun")
    assert failing.acs._send_request(DescribeInstancesRequest()) is None


def page_of(zone: str, first: int) -> Any:
    """A request of Google's client, whose answer has at most 500 machines."""

    def execute(http: object = None) -> dict[str, Any]:
        page = [{"name": f"{zone}-{number}"} for number in range(1200)[first : first + 500]]
        return {"items": page, **({"nextPageToken": str(first + 500)} if first + 500 < 1200 else {})}

    return SimpleNamespace(execute=execute, zone=zone)


class GoogleInstances:
    """The `instances` resource of Google's client."""

    def list(self, zone: str) -> Any:
        return page_of(zone, 0)

    def list_next(self, request: Any, answer: dict[str, Any]) -> Any:
        return page_of(request.zone, int(answer["nextPageToken"])) if "nextPageToken" in answer else None


def test_googles_machines_are_listed_to_the_last_page_also_by_new_clients() -> None:
    cloud = SimpleNamespace()

    def construct_clients() -> None:
        cloud.resources = {"compute": SimpleNamespace(resource=SimpleNamespace(instances=GoogleInstances))}

    construct_clients()
    cloud._construct_clients = construct_clients
    with_all_pages(cloud, "gcp")
    for _ in range(2):
        listed = cloud.resources["compute"].resource.instances().list(zone="z").execute(http=None)["items"]
        assert [each["name"] for each in listed] == [f"z-{number}" for number in range(1200)]
        cloud._construct_clients()


def test_googles_tpus_are_listed_to_the_last_page() -> None:
    def tpus_of(place: str, first: int) -> Any:
        def execute(http: object = None) -> dict[str, Any]:
            page = [{"name": f"{place}-{number}"} for number in range(1200)[first : first + 500]]
            return {"nodes": page, **({"nextPageToken": str(first + 500)} if first + 500 < 1200 else {})}

        return SimpleNamespace(execute=execute, place=place)

    def list_next(request: Any, answer: dict[str, Any]) -> Any:
        return tpus_of(request.place, int(answer["nextPageToken"])) if "nextPageToken" in answer else None

    def nodes() -> Any:
        return SimpleNamespace(list=lambda parent: tpus_of(parent, 0), list_next=list_next)

    client = SimpleNamespace(projects=lambda: SimpleNamespace(locations=lambda: SimpleNamespace(nodes=nodes)))
    cloud = SimpleNamespace(resources={"tpu": SimpleNamespace(resource=client)}, _construct_clients=lambda: None)
    with_all_pages(cloud, "gcp")
    for _ in range(2):
        listed = client.projects().locations().nodes().list(parent="z").execute(http=None)["nodes"]
        assert [each["name"] for each in listed] == [f"z-{number}" for number in range(1200)]
