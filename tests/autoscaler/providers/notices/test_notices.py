"""Clouds give machines notice, asked over HTTP as on a machine of theirs, and it reaches the controller."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.autoscaler.providers.notices.key_values import KeyValues
from tests.autoscaler.providers.notices.metadata_server import NAME, MetadataServer

from raytide.autoscaler.providers.base import Notice
from raytide.autoscaler.providers.notices.aws import REBALANCE_S, AwsMetadata
from raytide.autoscaler.providers.notices.azure import AzureMetadata
from raytide.autoscaler.providers.notices.base import CloudNotice
from raytide.autoscaler.providers.notices.gcp import MAINTENANCE_S, PREEMPTED_S, GcpMetadata
from raytide.autoscaler.providers.notices.watch import NoticeBoard, NoticeWatcher
from raytide.control.bootstrap import node_agent
from raytide.control.bootstrap.node_agent import watch_notices
from raytide.core.clock import VirtualClock
from raytide.core.errors import ClusterError, UsageError

NOW_S = datetime(2026, 11, 21, 17, 0, 0, tzinfo=UTC).timestamp()


@pytest.fixture
def service() -> Iterator[MetadataServer]:
    server = MetadataServer()
    yield server
    server.close()


def test_aws_tells_of_an_interruption_and_before_it_of_a_rebalance(service: MetadataServer) -> None:
    aws = AwsMetadata(service.url)
    assert aws.pending_notice(NOW_S) is None
    service.recommend_rebalance()
    assert aws.pending_notice(NOW_S) == CloudNotice(NOW_S + REBALANCE_S, "a rebalance recommendation")
    service.interrupt()
    assert aws.pending_notice(NOW_S + 5.0) == CloudNotice(NOW_S + 120.0, "spot/instance-action terminate")
    assert service.sessions == 1


def test_a_session_of_aws_that_ran_out_is_renewed(service: MetadataServer) -> None:
    aws = AwsMetadata(service.url)
    aws.pending_notice(NOW_S)
    service.tokens.clear()
    service.interrupt()
    told = aws.pending_notice(NOW_S)
    assert told is not None
    assert told.deadline_s == NOW_S + 120.0
    assert service.sessions == 2


def test_aws_is_found_where_its_own_tools_look(service: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url)
    service.interrupt()
    assert AwsMetadata().pending_notice(NOW_S) is not None


def test_gcp_counts_from_when_the_event_was_first_seen(service: MetadataServer) -> None:
    gcp = GcpMetadata(service.url)
    maintenance = "/computeMetadata/v1/instance/maintenance-event"
    service.pages[maintenance] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert gcp.pending_notice(NOW_S) is None  # it goes on running
    service.pages[maintenance] = "TERMINATE_ON_HOST_MAINTENANCE"
    for later_s in (0.0, 7.0):
        told = gcp.pending_notice(NOW_S + later_s)
        assert told is not None
        assert told.deadline_s == NOW_S + MAINTENANCE_S
    service.pages["/computeMetadata/v1/instance/preempted"] = "TRUE"
    assert gcp.pending_notice(NOW_S + 8.0) == CloudNotice(NOW_S + 8.0 + PREEMPTED_S, "preempted")


def test_azure_tells_of_the_whole_scale_set_and_only_this_machines_events_count(service: MetadataServer) -> None:
    azure, at = AzureMetadata(service.url), "Sat, 21 Nov 2026 17:00:30 GMT"
    service.schedule("Preempt", at, "vm-8")
    assert azure.pending_notice(NOW_S) is None
    service.schedule("Freeze", at, NAME)
    assert azure.pending_notice(NOW_S) is None
    service.schedule("Preempt", at, "vm-8", NAME)
    assert azure.pending_notice(NOW_S) == CloudNotice(NOW_S + 30.0, "scheduled event Preempt")
    service.schedule("Terminate", "", NAME)  # it has begun
    assert azure.pending_notice(NOW_S + 31.0) == CloudNotice(NOW_S + 31.0, "scheduled event Terminate")


def test_a_service_that_is_not_there_is_named() -> None:
    with pytest.raises(ClusterError, match=r"metadata service at http://127.0.0.1:9 does not answer"):
        AwsMetadata("http://127.0.0.1:9").pending_notice(NOW_S)


def test_a_notice_is_pinned_for_as_long_as_it_stands_whatever_was_away(service: MetadataServer) -> None:
    kv, clock = KeyValues(), VirtualClock(NOW_S)
    board = NoticeBoard(lambda: kv)
    watch = NoticeWatcher("node-3", AwsMetadata(service.url), board, clock)
    watch.look()
    assert board.notices() == ()
    service.interrupt()
    kv.is_away = True
    watch.look()
    kv.is_away = False
    assert board.notices() == ()
    watch.look()
    assert board.notices() == (Notice("node-3", NOW_S + 120.0),)
    kv.values.clear()  # a GCS that was restarted
    watch.look()
    assert board.notices() == (Notice("node-3", NOW_S + 120.0),)


def test_a_service_that_stops_answering_takes_nothing_back(service: MetadataServer) -> None:
    kv = KeyValues()
    board = NoticeBoard(lambda: kv)
    watch = NoticeWatcher("node-3", AwsMetadata(service.url), board, VirtualClock(NOW_S))
    service.interrupt()
    watch.look()
    service.close()
    assert watch.look() is None
    assert board.notices() == (Notice("node-3", NOW_S + 120.0),)


def test_what_nobody_can_read_is_an_error_that_a_watcher_outlives(service: MetadataServer) -> None:
    aws, azure = AwsMetadata(service.url), AzureMetadata(service.url)
    for said in ("<html>", "[]", "{}", '{"action": "terminate", "time": 7}'):
        service.pages["/latest/meta-data/spot/instance-action"] = said
        with pytest.raises(ClusterError, match="not in the documented form"):
            aws.pending_notice(NOW_S)
    for said in ("<html>", "[]", '{"Events": [{}]}'):
        service.pages["/metadata/scheduledevents"] = said
        with pytest.raises(ClusterError, match="not in the documented form"):
            azure.pending_notice(NOW_S)
    service.schedule("Preempt", "soon", NAME)
    with pytest.raises(ClusterError, match="not in the documented form"):
        azure.pending_notice(NOW_S)


def test_a_service_of_aws_that_is_busy_is_asked_again_by_the_next_look(service: MetadataServer) -> None:
    kv = KeyValues()
    board = NoticeBoard(lambda: kv)
    watch = NoticeWatcher("node-3", AwsMetadata(service.url), board, VirtualClock(NOW_S))
    watch.look()
    service.interrupt()
    for status in (429, 503):
        service.fail_next = [status]
        assert watch.look() is None
    watch.look()
    assert board.notices() == (Notice("node-3", NOW_S + 120.0),)


def test_a_watcher_that_hears_nothing_yet_is_started_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="cloud 'vsphere' is not supported"):
        watch_notices("vsphere")
    monkeypatch.delenv("RAY_CLOUD_INSTANCE_ID", raising=False)
    with pytest.raises(UsageError, match="not a node of a raytide cluster"):
        watch_notices("aws")
    monkeypatch.setenv("RAY_CLOUD_INSTANCE_ID", "node-1")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("RAYTIDE_HOME", str(tmp_path))
    started: list[list[str]] = []
    monkeypatch.setattr(node_agent, "spawn", lambda what, argv, **_: started.append(argv))
    watch_notices("aws")
    assert [argv[-3:-1] for argv in started] == [["aws", "node-1"]]
    assert "the metadata service at http://127.0.0.1:9 does not answer" in capsys.readouterr().err
