"""The endpoints and replicas that gateways read from the GCS."""

from __future__ import annotations

import threading

import pytest

from raytide.actors.serving.ray_serve.keys import ReplicaAddress, replica_key, spec_key
from raytide.core.objects.endpoint import ServeSpec
from raytide.gateway.replicas import directory
from raytide.gateway.replicas.directory import Directory, Listing, listing

SPEC = f"1.0 {ServeSpec(name='e', model='/m').model_dump_json()}".encode()
ADDRESS = ReplicaAddress("127.0.0.1", 1, "secret")


def test_unreadable_keys_hide_no_others() -> None:
    found = listing(
        {
            b"\xff/spec": SPEC,
            b"bad/spec": b"\xff",
            replica_key("e", "broken"): b"{}",
            replica_key("e", "r1"): ADDRESS.dump(),
            spec_key("e"): SPEC,
        }
    )
    assert {name: entry.replicas for name, entry in found.items()} == {"e": {"r1": ADDRESS}}


def test_a_spec_as_large_as_the_api_accepts_is_listed() -> None:
    texts = {f"t{n}": "x" * 60_000 for n in range(4)} | {"rest": "x" * 21_940}
    spec = ServeSpec.parse({"name": "e", "model": "/m", "engine": texts}, where="serve")
    assert list(listing({spec_key("e"): f"1.0 {spec.model_dump_json()}".encode()})) == ["e"]


def test_what_could_not_be_taken_over_is_passed_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "PERIOD_S", 0.01)
    monkeypatch.setattr(directory, "_RETRY_S", 0.01)
    monkeypatch.setattr("raytide.core.ray_internals.gcs_client", lambda address: object())
    monkeypatch.setattr(directory, "_read", lambda gcs: {spec_key("e"): SPEC})
    failures, taken_over = [RuntimeError("not now")], threading.Event()

    def take_over(found: Listing) -> None:
        if failures:
            raise failures.pop()
        assert set(found) == {"e"}
        taken_over.set()

    followed = Directory("", take_over)
    followed.start()
    try:
        assert taken_over.wait(60)
    finally:
        followed.stop()


def test_what_could_not_be_written_is_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost deletion would leave an endpoint with requests that wait for ever, and so with replicas."""
    monkeypatch.setattr(directory, "PERIOD_S", 0.01)
    monkeypatch.setattr(directory, "_RETRY_S", 0.01)
    monkeypatch.setattr(directory, "_read", lambda gcs: {})
    failures, deleted, written = [RuntimeError("not now")], threading.Event(), list[tuple[bytes, bytes]]()

    class Gcs:
        def internal_kv_put(self, key: bytes, value: bytes, *_: object, timeout: float) -> None:
            if failures:
                raise failures.pop()
            written.append((key, value))

        def internal_kv_del(self, key: bytes, *_: object, timeout: float) -> None:
            if key == b"waiting":
                deleted.set()

    monkeypatch.setattr("raytide.core.ray_internals.gcs_client", lambda address: Gcs())
    followed = Directory("", lambda found: None)
    followed.report(b"first", b"1")
    followed.report(b"waiting", None)
    followed.start()
    try:
        assert deleted.wait(60)
    finally:
        followed.stop()
    assert written == [(b"first", b"1")]
