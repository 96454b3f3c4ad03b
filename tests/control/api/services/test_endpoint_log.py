"""The output of an endpoint's replicas is read in parts: every line once, in the order of times, without secrets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.conftest import NoMachines

from raytide.control.api.auth import Caller
from raytide.control.api.services.logs import endpoint_log
from raytide.control.api.services.logs.endpoint_log import part
from raytide.control.api.services.service import ApiService
from raytide.control.views import Live, to_json
from raytide.core.clock import VirtualClock
from raytide.core.errors import ClusterError, UsageError
from raytide.core.io.atomic_file import write_json
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.endpoint_load import EndpointLoad, ReplicaLog
from raytide.core.objects.node import CapacityType, Node, NodeState
from raytide.core.state import Changes, Store

LOCAL = Path(__file__).parents[4] / "platform" / "raytide" / "control" / "bootstrap" / "local.yaml"
CALLER = Caller(user="ana", team="default")


class Files:
    """Files of nodes that may grow, as agents serve them."""

    def __init__(self, **files: bytes) -> None:
        self.files, self.away, self.asked = files, set[str](), list[str]()

    def file(self, agent: str, name: str, start: int, most: int) -> tuple[bytes, int]:
        self.asked.append(agent)
        if agent in self.away:
            raise ClusterError("Ray does not answer")
        data = self.files.get(name.partition(".")[0], b"")
        return data[start : start + most], len(data)


def log(replica: str, began_at_s: float = 0.0, agent: str = "10.0.0.1:1") -> ReplicaLog:
    return ReplicaLog(replica, began_at_s, agent, (f"{replica}.err",))


def said(at: str, message: str) -> bytes:
    return json.dumps({"at": at, "message": message}).encode() + b"\n"


def read(files: Files, logs: list[ReplicaLog], after: str = "", running: tuple[str, ...] = ()) -> tuple[list[str], str]:
    lines, has_more = list[str](), True
    while has_more:
        found = part(files, logs, after, None, running, {})
        lines += [f"{line.replica} {line.text}" for line in found.lines]
        after, has_more = found.after, found.has_more
    return lines, after


def test_lines_of_several_replicas_are_in_the_order_of_their_times() -> None:
    files = Files(a=b"begin\n" + said("1", "x") + b"  more of x\n" + said("4", "y"), b=said("2", "z"))
    lines, _ = read(files, [log("a"), log("b")])
    assert [line.partition(" ")[2][:30] for line in lines] == [
        "begin",
        '{"at": "1", "message": "x"}',
        "  more of x",
        '{"at": "2", "message": "z"}',
        '{"at": "4", "message": "y"}',
    ]


@given(
    texts=st.lists(
        st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"]), max_size=30), max_size=12
    ),
    cuts=st.lists(st.integers(0, 400), max_size=5),
    part_bytes=st.integers(150, 400),
)
def test_each_line_comes_once_however_it_is_written_and_cut(texts: list[str], cuts: list[int], part_bytes: int) -> None:
    whole = "".join(text + "\n" for text in texts).encode()
    files, after, lines = Files(a=b""), "", list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoint_log, "PART_BYTES", part_bytes)
        for cut in [*sorted(cuts), len(whole)]:
            files.files["a"] = whole[:cut]
            found, after = read(files, [log("a")], after, running=("a",))
            lines += found
    assert lines == [f"a {text}" for text in texts]


def test_a_line_without_an_end_is_shown_once_its_replica_has_ended() -> None:
    files = Files(a=b"one\nhalf a li")
    lines, after = read(files, [log("a")], running=("a",))
    assert lines == ["a one"]
    assert read(files, [log("a")], after)[0] == ["a half a li"]


def test_the_last_lines_of_each_replica_and_what_follows_them() -> None:
    files = Files(a=b"1\n2\n3\n", b=b"x" * 2**20 + b"\n7\n8\n")
    found = part(files, [log("a"), log("b")], "", 2, (), {})
    assert [line.text for line in found.lines] == ["2", "3", "7", "8"]
    files.files["a"] += b"4\n"
    assert read(files, [log("a"), log("b")], found.after)[0] == ["a 4"]


def test_the_replicas_of_three_revisions_are_followed() -> None:
    names = [f"r{number}" for number in range(3 * 16)]
    logs = [ReplicaLog(name, 0.0, "10.0.0.1:1", (f"{name}.out", f"{name}.err")) for name in names]
    files = Files(**dict.fromkeys(names, b"1\n"))
    lines, after = read(files, logs)
    assert len(lines) == 96
    files.files["r7"] += b"2\n"
    assert read(files, logs, after)[0] == ["r7 2", "r7 2"]


def test_a_file_that_was_begun_anew_is_read_from_its_beginning() -> None:
    files = Files(a=b"a long first line\n")
    _, after = read(files, [log("a")])
    files.files["a"] = b"new\n"
    assert read(files, [log("a")], after)[0] == ["a new"]


def test_a_node_that_is_away_is_named_and_its_lines_come_later() -> None:
    files, logs = Files(a=b"1\n", b=b"2\n"), [log("a"), log("b", agent="10.0.0.2:1")]
    files.away = {"http://10.0.0.2:1"}
    found = part(files, logs, "", None, (), {})
    assert ([line.text for line in found.lines], found.missing) == (["1"], ("b",))
    files.away = set()
    assert read(files, logs, found.after)[0] == ["b 2"]


def test_a_node_that_is_gone_is_not_asked_and_is_named_with_the_reason(store: Store, tmp_path: Path) -> None:
    left = Node("node-2", "cpu", "z", CapacityType.SPOT, 0, NodeState.GONE, 0.0, ray_node_id="r2", reason="taken back")
    lost = replace(left, id="node-3", state=NodeState.READY, ray_node_id="r3", lost_at_s=3661.0)
    lives = replace(left, id="node-1", state=NodeState.READY, ray_node_id="r1")
    store.commit(Changes(at_s=0.0, nodes=(lives, left, lost)))
    files = Files(**dict.fromkeys("abcd", b"1\n"))
    service = ApiService(
        store=store,
        config=load_cluster(LOCAL),
        bill=NoMachines(),
        drivers=files,  # type: ignore[arg-type]
        clock=VirtualClock(0.0),
        live=tmp_path / "live.json",
        serve_url="http://127.0.9.1:8000",
        ray_url="http://127.0.9.1:8265",
        ray_environment={},
    )
    (tmp_path / "config.json").write_text("{}")
    service.endpoints.serve({"name": "m", "model": str(tmp_path)}, CALLER)
    nodes = {"a": "r1", "b": "r2", "c": "r3", "d": ""}
    logs = tuple(replace(log(name, agent=f"10.0.0.1:{name}"), node=node) for name, node in nodes.items())
    write_json(tmp_path / "live.json", to_json(Live(0.0, loads={"m": EndpointLoad(0.0, 0.0, 0, logs=logs)})))
    found = service.endpoints.logs("m", "", None, CALLER)
    assert files.asked == ["http://10.0.0.1:a", "http://10.0.0.1:d"], "one that published no node is asked"
    assert ([line.replica for line in found.lines], found.missing) == (["a", "d"], ())
    assert found.gone == {
        "b": "node node-2 is gone (taken back)",
        "c": "node node-3 has been dead in Ray since 01:01:01 UTC",
    }


def test_what_a_replica_has_published_is_no_way_to_other_files() -> None:
    files = Files(a=b"1\n")
    for bad in (
        ReplicaLog("a", 0.0, "evil/", ("a.err",)),
        ReplicaLog("a", 0.0, "h:1", ("../a",)),
        ReplicaLog("a", 0.0, "", ("a.err",)),
    ):
        assert part(files, [bad], "", None, (), {}).missing == ("a",)


def test_secrets_are_not_shown() -> None:
    secrets = ("rk-" + "x" * 43, "hunter2secret", "c2VjcmV0c2VjcmV0")
    text = f"key {secrets[0]} password={secrets[1]} Authorization: Bearer {secrets[2]} ok\n"
    lines, _ = read(Files(a=text.encode()), [log("a")])
    assert not any(secret in lines[0] for secret in secrets)
    assert lines[0].endswith(" ok")


@pytest.mark.parametrize("after", ["a", "a.0:x", ",".join(f"a{i}.0:1" for i in range(257)), "a.0:1;b.0:2"])
def test_a_position_that_is_none_is_refused(after: str) -> None:
    with pytest.raises(UsageError, match="not a position"):
        part(Files(), [], after, None, (), {})
