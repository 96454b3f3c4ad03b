"""Repositories in an object store and over sftp: backups, drills and restores, and where their secrets go."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.control.backup.conftest import NAME, Cluster
from tests.sshd_fixture import PORT, sshd_hosts

from raytide.control.backup.contents import problem_of
from raytide.control.backup.drill import drill
from raytide.control.backup.repository import Repository, read_environment
from raytide.control.backup.restore import below, find_snapshot, unpack
from raytide.control.backup.run import back_up
from raytide.control.backup.upkeep import copy_to_cold, create_repositories
from raytide.core.errors import ConfigError, NotFoundError
from raytide.core.objects.cluster_config import BackupSection, SftpSection

SECRET = "the-secret-key-of-the-bucket"

Remove = Callable[[], str]
"""Removes the largest pack of a repository and returns its name."""


def ask_for(cluster: Cluster, **backup: Any) -> None:
    """Changes `metadata.raytide.backup` of the cluster."""
    path = cluster.run_dir / "cluster.yaml"
    config = yaml.safe_load(path.read_text())
    config["metadata"]["raytide"]["backup"] |= backup
    path.write_text(yaml.safe_dump(config))


@pytest.fixture
def in_s3(cluster: Cluster, aws: None, moto_url: str, monkeypatch: pytest.MonkeyPatch) -> Remove:
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="backups")
    file = cluster.folder / "environment"
    file.touch(mode=0o600)
    file.write_text(f"# of the bucket\nAWS_ACCESS_KEY_ID=raytide\nAWS_SECRET_ACCESS_KEY={SECRET}\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    ask_for(cluster, repository=f"s3:{moto_url}/backups/tide", environment_file=str(file))

    def remove() -> str:
        packs = client.list_objects_v2(Bucket="backups", Prefix="tide/data/")["Contents"]
        largest = max(packs, key=lambda each: each["Size"])["Key"]
        client.delete_object(Bucket="backups", Key=largest)
        return str(largest).rpartition("/")[2]

    return remove


@pytest.fixture
def over_sftp(cluster: Cluster, tmp_path: Path) -> Iterator[Remove]:
    with sshd_hosts(tmp_path / "hosts") as hosts:
        hosts.start(1)
        stored = tmp_path / "stored"
        user = pwd.getpwuid(os.getuid()).pw_name
        login = {"key": str(hosts.folder / "user_key"), "known_hosts": str(hosts.folder / "known_hosts")}
        ask_for(cluster, repository=f"sftp://{user}@{hosts.address(1)}:{PORT}/{stored}", sftp=login)

        def remove() -> str:
            packs = [path for path in (stored / "data").rglob("*") if path.is_file()]
            largest = max(packs, key=lambda path: path.stat().st_size)
            largest.unlink()
            return largest.name

        yield remove


@pytest.mark.parametrize("where", ["in_s3", "over_sftp"])
def test_a_cluster_is_backed_up_to_a_remote_store_and_restored_from_it(
    cluster: Cluster, restic: str, where: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove: Remove = request.getfixturevalue(where)
    started: list[str] = []
    run = subprocess.run

    def noted(command: Any, *arguments: Any, **options: Any) -> Any:
        started.extend(map(str, command))
        return run(command, *arguments, **options)

    monkeypatch.setattr("raytide.control.backup.repository.subprocess.run", noted)
    with pytest.raises(NotFoundError, match="there is no backup repository at"):
        back_up(cluster.place)
    place = cluster.place
    assert [create_repositories(place), create_repositories(place)] == [[place.hot], []]
    cluster.checkpoint(20, 3_000_000)
    _, first = back_up(place)
    _, second = back_up(place)
    assert first.added_bytes > 3_000_000 > 10 * second.added_bytes
    result = drill(place)
    assert (result.problems, result.bytes > 3_000_000) == ((), True)

    unpacked = unpack(place.hot, find_snapshot(place.hot, NAME), cluster.folder / "scratch")
    folders = unpacked.manifest.contents.folders
    assert {each.kind for each in folders} == {"dataset", "run", "checkpoint"}
    assert [problem_of(each, below(unpacked.scratch, each.stored_as)) for each in folders] == ["", "", ""]

    lost = remove()
    assert any(lost[:8] in problem for problem in drill(place).problems)
    assert not any(SECRET in argument for argument in started)


def test_a_copy_goes_from_a_remote_store_to_a_cold_one_elsewhere(
    cluster: Cluster, restic: str, in_s3: Remove, tmp_path: Path
) -> None:
    ask_for(cluster, cold_repository=str(tmp_path / "cold"))
    place = cluster.place
    create_repositories(place)
    back_up(place)
    copied = copy_to_cold(place)
    assert place.cold is not None and copied
    assert len(place.cold.snapshots(NAME)) == 1
    assert unpack(place.cold, find_snapshot(place.cold, NAME), tmp_path / "scratch").manifest.cluster == NAME


def test_a_file_of_secrets_is_for_its_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "environment"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_environment(file)
    file.touch(mode=0o600)
    file.write_text("\n# a comment\nAWS_SECRET_ACCESS_KEY=a=b\n")
    assert read_environment(file) == {"AWS_SECRET_ACCESS_KEY": "a=b"}
    for text in ("nothing\n", "RESTIC_PASSWORD=x\n", "A B=c\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="line 1: not a variable"):
            read_environment(file)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="others may read"):
        read_environment(file)


def test_a_login_for_two_sftp_repositories_is_refused() -> None:
    both = {"repository": "sftp:a:/x", "cold_repository": "sftp:b:/x", "password_file": "/password"}
    assert BackupSection.parse(both, where="x").sftp is None
    with pytest.raises(ConfigError, match="the login of one repository"):
        BackupSection.parse({**both, "sftp": {}}, where="x")


def test_a_password_in_a_url_is_not_shown(tmp_path: Path) -> None:
    place = Repository("rest:http://ana:hush@127.0.0.1:9/tide", tmp_path / "password", tmp_path / "cache")
    assert place.shown_url == "rest:http://ana:***@127.0.0.1:9/tide"
    said = f"Fatal: unable to open repository at {place.url}: connection refused"
    text = str(place._failed("cannot be read", subprocess.CompletedProcess[str]([], 1, "", said)))
    assert "ana:***@127" in text and "hush" not in text


@pytest.mark.parametrize(
    ("url", "end"),
    [
        ("sftp:ana@host:/backups", "-l ana host -s sftp"),
        ("sftp://ana@host:2022//backups", "-p 2022 -l ana host -s sftp"),
        ("sftp://[::1]:2022/backups", "-p 2022 ::1 -s sftp"),
        ("sftp:host:backups", "host -s sftp"),
    ],
)
def test_the_login_of_an_sftp_repository_is_that_of_its_section(url: str, end: str, tmp_path: Path) -> None:
    place = Repository(url, tmp_path / "password", tmp_path / "cache")
    assert place._ssh_command() is None
    command = replace(place, sftp=SftpSection(key="~/key", known_hosts="/known hosts"))._ssh_command()
    assert command is not None and command.endswith(f"-i {Path.home()}/key {end}")
    assert "-F none -o BatchMode=yes -o StrictHostKeyChecking=yes -o 'UserKnownHostsFile=/known hosts'" in command
