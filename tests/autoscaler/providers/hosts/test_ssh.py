"""Requests to a real sshd: strict about the machine's key, and clear about what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sshd_fixture import SshdHosts, sshd_hosts

from raytide.autoscaler.providers.hosts.agent import versions
from raytide.autoscaler.providers.hosts.ssh import SshConnection
from raytide.core.errors import ClusterError, ProviderError
from raytide.core.objects.hardware.host import Host, HostsSection

TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshdHosts]:
    with sshd_hosts(tmp_path_factory.mktemp("sshd")) as started:
        started.start(1)
        yield started


def connect(hosts: SshdHosts, *numbers: int, **ssh: object) -> tuple[SshConnection, Host]:
    section = hosts.section(*numbers or (1,))
    section["ssh"] |= ssh
    parsed = HostsSection.model_validate(section)
    return SshConnection(parsed, str(ssh)), parsed.machines[0]


def refusal(hosts: SshdHosts, kind: type[Exception], *numbers: int, **ssh: object) -> str:
    connection, host = connect(hosts, *numbers, **ssh)
    with pytest.raises(kind) as refused:
        connection.request(host, "list", {"cluster_id": "c"}, timeout_s=TIMEOUT_S)
    connection.close()
    return str(refused.value)


def test_a_machine_answers_and_its_requests_share_a_connection(hosts: SshdHosts) -> None:
    connection, host = connect(hosts)
    logins = (hosts.home(1) / "sshd.log").read_text().count("Accepted publickey")
    for _ in range(3):
        assert connection.request(host, "list", {"cluster_id": "c"}, timeout_s=TIMEOUT_S) == {"nodes": {}}
    assert (hosts.home(1) / "sshd.log").read_text().count("Accepted publickey") == logins + 1
    connection.close()
    assert not connection._control_dir.exists()


def test_a_machine_with_another_key_than_the_known_one_is_refused(hosts: SshdHosts, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text("")
    said = refusal(hosts, ClusterError, known_hosts=str(known))
    assert "Host key verification failed" in said and "hosts.ssh.known_hosts" in said
    address, kind, _ = (hosts.folder / "known_hosts").read_text().split()
    other = (hosts.folder / "user_key.pub").read_text().split()[1]
    known.write_text(f"{address} {kind} {other}\n")
    assert "Host key verification failed" in refusal(hosts, ClusterError, known_hosts=str(known))


def test_a_wrong_key_a_closed_port_and_a_missing_interpreter_are_told_apart(hosts: SshdHosts) -> None:
    assert "authorized_keys" in refusal(hosts, ClusterError, key=str(hosts.home(1) / "host_key"))
    nowhere = Host(name="h3", address="no-such-machine.invalid", node_type="own")
    with pytest.raises(ClusterError, match=r"h3: no-such-machine\.invalid has no IPv4 address"):
        connect(hosts)[0].request(nowhere, "list", {"cluster_id": "c"}, timeout_s=TIMEOUT_S)
    assert "Start sshd there" in refusal(hosts, ClusterError, 2)
    parsed = HostsSection.model_validate({**hosts.section(1), "python": "/nowhere/bin/python"})
    with pytest.raises(ProviderError, match="/nowhere/bin/python has no raytide"):
        SshConnection(parsed, "x").request(parsed.machines[0], "list", {"cluster_id": "c"}, timeout_s=TIMEOUT_S)


def test_a_machine_with_other_versions_starts_no_node(hosts: SshdHosts) -> None:
    connection, host = connect(hosts)
    other = {**versions(), "ray": "2.49.1"}
    with pytest.raises(ProviderError, match=r"host h1: it has ray .* instead of 2\.49\.1") as refused:
        connection.request(host, "start", {"cluster_id": "c", "versions": other}, timeout_s=TIMEOUT_S)
    assert "Install the head's versions" in refused.value.hint
    connection.close()


def test_a_request_that_the_agent_cannot_read_is_an_answer_not_a_traceback(hosts: SshdHosts) -> None:
    connection, host = connect(hosts)
    with pytest.raises(ProviderError, match="KeyError"):
        connection.request(host, "sing", {"cluster_id": "c"}, timeout_s=TIMEOUT_S)
    with pytest.raises(ClusterError, match="did not answer within"):
        connection.run(host, "sleep 2", timeout_s=0.2)
    connection.close()
