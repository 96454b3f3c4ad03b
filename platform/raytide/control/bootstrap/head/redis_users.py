"""Gives the GCS of each new head a Redis user of its own, and removes the users of former heads.

Ray has no lease for its tables, so a paused GCS would write to them when it wakes. Redis closes the connections of a
removed user and refuses new ones. A former head's GCS can thus neither read nor write.
"""

from __future__ import annotations

import secrets
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedRWPair

from raytide.core.errors import ClusterError, ConfigError, ConflictError
from raytide.core.objects.hardware.standby import StandbySection

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class RedisUser:
    """The Redis user of one head's GCS."""

    name: str
    password: str


def replace_user(section: StandbySection, cluster: str, epoch: int) -> RedisUser:
    """Creates and returns the Redis user of the head with the number `epoch`, and removes the users of former heads. If
    a later head already has a user, removes the new user and raises ConflictError. Raises ClusterError if Redis does
    not answer, and ConfigError if Redis refuses a command.
    """
    prefix = f"raytide-{cluster}-"
    user = RedisUser(f"{prefix}{epoch}", secrets.token_hex(24))
    with _connected(section) as redis:
        if password := section.redis_password():
            redis.call("AUTH", *([section.redis_user] if section.redis_user else []), password)
        redis.call("ACL", "SETUSER", user.name, "reset", "on", f">{user.password}", "~*", "&*", "+@all", "-acl")
        names = redis.call("ACL", "USERS")
        texts = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        epochs = [int(text) for text in texts if text.isdigit()]
        if any(each > epoch for each in epochs):  # this head was paused, and woke after the next one had taken over
            redis.call("ACL", "DELUSER", user.name)
            latest = f"{prefix}{max(epochs)}"
            raise ConflictError(
                f"a later head has the user {latest} in Redis at {section.redis_address[0]}.",
                hint=f"This machine waits. If the database is new or restored: `ACL DELUSER {latest}` in Redis.",
            )
        if former := [f"{prefix}{each}" for each in epochs if each < epoch]:
            redis.call("ACL", "DELUSER", *former)
    return user


class _Connection:
    """A connection to Redis that sends one command at a time, in the protocol RESP2."""

    def __init__(self, stream: BufferedRWPair, where: str) -> None:
        self._stream, self._where = stream, where

    def call(self, *words: str) -> list[str]:
        """Sends a command and returns the texts of the reply. Raises ConfigError with Redis' message on a refusal."""
        encoded = [word.encode() for word in words]
        self._stream.write(b"*%d\r\n" % len(encoded))
        for word in encoded:
            self._stream.write(b"$%d\r\n%s\r\n" % (len(word), word))
        self._stream.flush()
        return self._reply(" ".join(words[:2]) if words[0] == "ACL" else words[0])

    def _reply(self, command: str) -> list[str]:
        line = self._stream.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("it closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise ConfigError(
                f"Redis at {self._where} refuses {command}: {rest.decode(errors='replace').rstrip('.')}.",
                hint="Name a user that may use ACL in metadata.raytide.standby.redis_user, and the file with its "
                "password in redis_password_file: without it a former head could write to Ray's tables.",
            )
        if kind == b"*":
            return [text for _ in range(int(rest)) for text in self._reply(command)]
        if kind == b"$":
            size = int(rest)
            return [] if size < 0 else [self._stream.read(size + 2)[:-2].decode(errors="replace")]
        return [rest.decode(errors="replace")]


@contextmanager
def _connected(section: StandbySection) -> Iterator[_Connection]:
    host, port = section.redis_address
    where = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT_S) as plain:
            sock = plain
            if section.has_tls:
                sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
            with sock.makefile("rwb") as stream:
                yield _Connection(stream, where)
    except OSError as error:
        raise ClusterError(
            f"Redis at {where} does not answer: {error}.",
            hint="Ray's tables are there: start it, or correct metadata.raytide.standby.redis_url.",
        ) from None
