"""The Redis user of each head, with a real Redis: that of a former head is disconnected and refused."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.server_fixtures import redis_port

from raytide.control.bootstrap.head.redis_users import RedisUser, _Connection, replace_user
from raytide.core.errors import ClusterError, ConfigError, ConflictError
from raytide.core.objects.hardware.standby import StandbySection

__all__ = ["redis_port"]


def section(port: int, folder: Path, password: str = "redis") -> StandbySection:
    (folder / "password").write_text(f"{password}\n")
    return StandbySection(
        address="127.0.0.1",
        redis_url=f"redis://127.0.0.1:{port}",
        redis_password_file=str(folder / "password"),
        shared_dir=str(folder),
    )


def connect(port: int, user: RedisUser) -> _Connection:
    stream = socket.create_connection(("127.0.0.1", port), timeout=5).makefile("rwb")
    connection = _Connection(stream, "here")
    connection.call("AUTH", user.name, user.password)
    return connection


def test_a_former_heads_gcs_loses_its_connection_and_gets_no_other(redis_port: int, tmp_path: Path) -> None:
    there = section(redis_port, tmp_path)
    former = replace_user(there, "tide", 1)
    other = replace_user(there, "tide-2", 1)
    gcs = connect(redis_port, former)
    assert gcs.call("HSET", "RAYtide@NODE", "n1", "alive") == ["1"]
    user = replace_user(there, "tide", 2)
    with pytest.raises(ConnectionError):
        gcs.call("HSET", "RAYtide@NODE", "n1", "dead")
    with pytest.raises(ConfigError, match="refuses AUTH: WRONGPASS"):
        connect(redis_port, former)
    assert connect(redis_port, user).call("HGET", "RAYtide@NODE", "n1") == ["alive"]
    assert connect(redis_port, other).call("PING") == ["PONG"], "another cluster's stays"


def test_a_former_head_that_wakes_late_leaves_the_later_ones_user_and_gets_none(
    redis_port: int, tmp_path: Path
) -> None:
    there = section(redis_port, tmp_path)
    replace_user(there, "tide", 9)
    later = replace_user(there, "tide", 11)
    with pytest.raises(ConflictError, match="a later head has the user raytide-tide-11 "):
        replace_user(there, "tide", 10)
    assert connect(redis_port, later).call("PING") == ["PONG"]
    admin = connect(redis_port, RedisUser("default", "redis"))
    assert sorted(admin.call("ACL", "USERS")) == ["default", later.name]


def test_the_user_of_a_gcs_makes_no_users(redis_port: int, tmp_path: Path) -> None:
    gcs = connect(redis_port, replace_user(section(redis_port, tmp_path), "tide", 1))
    with pytest.raises(ConfigError, match="refuses ACL SETUSER: NOPERM"):
        gcs.call("ACL", "SETUSER", "raytide-tide-1", "on")


def test_a_redis_that_refuses_or_does_not_answer_is_named(redis_port: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"Redis at 127.0.0.1:{redis_port} refuses AUTH: WRONGPASS"):
        replace_user(section(redis_port, tmp_path, "wrong"), "tide", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(ClusterError, match="does not answer: ") as caught:
            replace_user(section(free.getsockname()[1], tmp_path), "tide", 1)
    assert "redis_url" in caught.value.hint
