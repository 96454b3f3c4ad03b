"""The connection between the leader and a member. The leader sends orders, and the member sends answers.

Each side proves that it knows the secret. Nothing is pickled: a step is an array of integers, and all other messages
are JSON. If the other side ends, a watch thread notices it at once, even while this side computes. TCP keepalive
detects a lost machine.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raytide.actors.engine.model.input_batch import StepInputs
from raytide.core.errors import EngineDeadError
from raytide.kernels.core import PagedBatch

Ints = npt.NDArray[np.int64]

_HEADER = struct.Struct("<BQ")  # kind, bytes
_JSON, _STEP = 0, 1
_MOST_BYTES = 1 << 30
_NONCE, _PROOF = 32, 32
_HANDSHAKE_S = 10.0
_KEEPALIVE_S, _KEEPALIVE_COUNT = 5, 4


class MemberLink:
    """One end of an authenticated connection. Any thread may send; only one thread at a time may receive."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._socket, self.rank = connection, rank
        self._sending = threading.Lock()

    @classmethod
    def accept(cls, connection: socket.socket, secret: str) -> MemberLink:
        """Authenticates a member that connects, and returns its link. Raises OSError or ValueError if the other side is
        not a member.
        """
        _prepare(connection)
        nonce = secrets.token_bytes(_NONCE)
        connection.sendall(nonce)
        said = _receive_exactly(connection, 4 + _NONCE + _PROOF)
        rank_bytes, theirs, proof = said[:4], said[4 : 4 + _NONCE], said[4 + _NONCE :]
        if not hmac.compare_digest(proof, _proof(secret, b"member", nonce + rank_bytes + theirs)):
            raise ValueError("a connection without the secret")
        connection.sendall(_proof(secret, b"leader", theirs))
        connection.settimeout(None)
        return cls(connection, int.from_bytes(rank_bytes, "little"))

    @classmethod
    def connect(cls, host: str, port: int, secret: str, rank: int) -> MemberLink:
        """Connects to the leader and returns the link. Raises OSError if the connection fails, and ValueError if the
        leader does not know the secret.
        """
        connection = socket.create_connection((host, port), _HANDSHAKE_S)
        _prepare(connection)
        nonce, own = _receive_exactly(connection, _NONCE), secrets.token_bytes(_NONCE)
        rank_bytes = rank.to_bytes(4, "little")
        connection.sendall(rank_bytes + own + _proof(secret, b"member", nonce + rank_bytes + own))
        if not hmac.compare_digest(_receive_exactly(connection, _PROOF), _proof(secret, b"leader", own)):
            raise ValueError("the leader does not know the secret")
        connection.settimeout(None)
        return cls(connection, rank)

    def send(self, message: dict[str, Any]) -> None:
        self._send(_JSON, json.dumps(message).encode())

    def send_step(self, step: Ints) -> None:
        self._send(_STEP, step.tobytes())

    def receive(self) -> dict[str, Any] | Ints:
        """Returns the next message. Raises OSError if the connection is closed."""
        kind, size = _HEADER.unpack(_receive_exactly(self._socket, _HEADER.size))
        if size > _MOST_BYTES:
            raise OSError(f"a message of {size} bytes")
        body = _receive_exactly(self._socket, size)
        if kind == _STEP:
            return np.frombuffer(body, np.int64)
        message: dict[str, Any] = json.loads(body)
        return message

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has gone already
        finally:
            self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def _send(self, kind: int, body: bytes) -> None:
        with self._sending:
            self._socket.sendall(_HEADER.pack(kind, len(body)) + body)


def watch(descriptors: Sequence[int], ended: Callable[[int], None]) -> None:
    """Starts a thread that waits until the other side of any of these sockets or pipes closes. The thread then calls
    `ended` once. The argument is the index in `descriptors` of the socket or pipe that closed.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLRDHUP)  # errors and hang-ups are always reported

    def wait() -> None:
        (descriptor, _), *_ = poll.poll()
        ended(descriptors.index(descriptor))

    threading.Thread(target=wait, name="raytide-members", daemon=True).start()


def pack_step(step: StepInputs, *, own_blocks: int, wants_logits: bool) -> Ints:
    """Returns the inputs of a forward pass as an array of integers. Each adapter span becomes three integers: the
    adapter's number, the span's first row, and the row after the span's last row.

    `own_blocks` is 0 if the pass uses the engine's KV cache. Otherwise the pass uses a temporary cache of that many
    blocks.
    """
    batch = step.batch
    spans = [] if step.loras is None else [(each.number, first, end) for each, first, end in step.loras.spans]
    tables_BM = batch.block_tables_BM.cpu().numpy()
    tokens, rows = len(step.ids_T), len(step.rows_R)
    counts = (tokens, rows, *tables_BM.shape, batch.block_size, own_blocks, wants_logits, len(spans))
    parts = (batch.query_lens, batch.context_lens)
    tensors = (each.cpu().numpy() for each in (step.ids_T, step.positions_T, batch.slots_T, step.rows_R))
    packed: Ints = np.concatenate(
        [np.array(counts), *map(np.array, parts), *tensors, np.array(spans, np.int64).ravel(), tables_BM.ravel()],
        dtype=np.int64,
    )
    return packed


class StepArrays:
    """The inputs of a forward pass, unpacked from the result of `pack_step` into tensors on a device. The adapter spans
    remain integers.
    """

    def __init__(self, packed: Ints, device: torch.device) -> None:
        tokens, rows, sequences, width, block_size, self.own_blocks, wants_logits, spans = packed[:8].tolist()
        self.wants_logits = bool(wants_logits)
        sizes = (sequences, sequences, tokens, tokens, tokens, rows, 3 * spans)
        *parts, adapters, tables = np.split(packed[8:], np.cumsum(sizes))
        self.adapters = [(number, first, end) for number, first, end in adapters.reshape(-1, 3).tolist()]
        query_lens, context_lens, ids, positions, slots, sampled = parts
        ids_T, positions_T, slots_T, rows_R, tables_BM = (
            torch.from_numpy(each.copy()).to(device) for each in (ids, positions, slots, sampled, tables)
        )
        batch = PagedBatch(
            query_lens=query_lens.tolist(),
            context_lens=context_lens.tolist(),
            block_tables_BM=tables_BM.view(sequences, width),
            slots_T=slots_T,
            block_size=block_size,
        )
        self.inputs = StepInputs(ids_T, positions_T, batch, rows_R)


def member_died(rank: int, why: str) -> EngineDeadError:
    return EngineDeadError(
        f"member {rank} of this replica has ended: {why}.",
        hint="Retry elsewhere; the replica is formed anew. The member's log says why it ended.",
    )


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(_HANDSHAKE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _KEEPALIVE_S),
        (socket.TCP_KEEPINTVL, _KEEPALIVE_S),
        (socket.TCP_KEEPCNT, _KEEPALIVE_COUNT),
        (socket.TCP_USER_TIMEOUT, 1000 * _KEEPALIVE_S * _KEEPALIVE_COUNT),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    body = bytearray(size)
    view, at = memoryview(body), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if not count:
            raise OSError("the other side has closed the connection")
        at += count
    return bytes(body)


def _proof(secret: str, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret.encode(), side + nonces, "sha256")
