"""Batches with OpenAI's client, over gateway processes that are killed."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, ConflictError, NotFoundError, OpenAI
from openai.types import Batch
from tests.gateway.batches.conftest import BilledGateways, GatewayProcess, ServedEngine, until

from raytide.gateway.batches.runner import PRIORITY

Gateways = Callable[[], GatewayProcess]
ENDED = ("completed", "failed", "expired", "cancelled")


def row(place: int, prompt: str | None = None, **body: object) -> dict[str, Any]:
    fields = {"model": "fake", "prompt": prompt or f"row {place}", "max_tokens": 4, **body}
    return {"custom_id": f"id-{place}", "method": "POST", "url": "/v1/completions", "body": fields}


def submit(client: OpenAI, rows: list[dict[str, Any]] | bytes, **options: Any) -> Batch:
    data = rows if isinstance(rows, bytes) else b"".join(json.dumps(each).encode() + b"\n" for each in rows)
    uploaded = client.files.create(file=("rows.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h", **options
    )


def ended(client: OpenAI, batch: Batch) -> Batch:
    until(batch.id, lambda: client.batches.retrieve(batch.id).status in ENDED)
    return client.batches.retrieve(batch.id)


def lines(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_answers_its_rows_in_order_and_names_those_that_fail(gateways: Gateways, served: ServedEngine) -> None:
    client = gateways().client
    rows = [row(0), row(1, temperature=7), row(2), row(3, model="absent"), row(4)]
    batch = submit(client, rows, metadata={"project": "search"})
    assert (batch.status, batch.endpoint, batch.metadata) == ("validating", "/v1/completions", {"project": "search"})
    done = ended(client, batch)
    assert done.status == "completed" and done.model is None and done.errors is None
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (5, 3, 2)
    good, bad = lines(client, done.output_file_id), lines(client, done.error_file_id)
    assert [each["custom_id"] for each in good] == ["id-0", "id-2", "id-4"]
    assert [each["response"]["body"]["choices"][0]["text"] for each in good] == ["tide"] * 3
    assert all(each["error"] is None and each["response"]["request_id"] for each in good)
    found = [(each["custom_id"], each["response"]["status_code"]) for each in bad]
    assert found == [("id-1", 400), ("id-3", 404)]
    assert bad[0]["response"]["body"]["error"]["param"] == "temperature"
    assert done.usage is not None and done.usage.output_tokens == 12
    assert done.usage.total_tokens == done.usage.input_tokens + 12
    assert done.finalizing_at and done.completed_at and done.in_progress_at and done.expires_at
    assert served.engine.priorities == {PRIORITY}


def test_every_wrong_line_of_an_input_is_named(gateways: Gateways, served: ServedEngine) -> None:
    client = gateways().client
    wrong = [
        json.dumps(row(0)),
        "{",
        json.dumps(row(0)),
        json.dumps({**row(2), "url": "/v1/embeddings"}),
        json.dumps({**row(3), "method": "GET"}),
        json.dumps({key: value for key, value in row(4).items() if key != "custom_id"}),
        json.dumps(row(5, stream=True)),
    ]
    done = ended(client, submit(client, "\n".join(wrong).encode()))
    assert done.status == "failed" and done.failed_at and done.output_file_id is None
    assert done.errors is not None and done.errors.data is not None
    assert [(each.line, each.code, each.param) for each in done.errors.data] == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_url", "url"),
        (5, "invalid_method", "method"),
        (6, "missing_required_parameter", "custom_id"),
        (7, "invalid_value", "body.stream"),
    ]
    empty = ended(client, submit(client, b"\n"))
    assert empty.errors is not None and empty.errors.data is not None
    assert [each.code for each in empty.errors.data] == ["empty_file"]
    assert served.engine.began == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_batch_whose_process_ends_at_half_runs_no_row_twice(billed: BilledGateways, how: signal.Signals) -> None:
    """Both processes want it; the one that has it ends while rows are in flight on both replicas. The other one gets
    the answers of these: no engine is asked for any row again, and the ledger has each row once.
    """
    started = [billed.start(), billed.start()]
    lengths = [4 + place % 13 for place in range(1000)]  # so that rows do not all end together
    batch = submit(started[0].client, [row(place, max_tokens=length) for place, length in enumerate(lengths)])
    progress = billed.folder / "files" / f"{batch.id}.progress"
    owners: list[GatewayProcess] = []

    def has_an_owner() -> bool:
        owners[:] = [each for each in started if each.has_open(progress)]
        return len(owners) == 1

    def recorded() -> set[str]:
        whole = progress.read_bytes().rpartition(b"\n")[0].splitlines()[1:]
        return {json.loads(line)["line"]["custom_id"] for line in whole}

    def begun() -> list[str]:
        return [prompt for each in billed.engines for prompt in each.engine.began]

    until("one of them to work on it", has_an_owner)
    (owner,) = owners
    (other,) = (each for each in started if each is not owner)
    until("half of the rows", lambda: len(recorded()) >= 500 and len(begun()) >= len(recorded()) + 16)
    owner.kill(how)
    before = recorded()
    assert 500 <= len(before) < 1000
    if how is signal.SIGKILL:
        assert len(begun()) > len(before), "no row was in flight"
        billed.start()  # it reports what the killed one had written down
    done = ended(other.client, batch)
    assert done.status == "completed" and done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed) == (1000, 1000)
    good = lines(other.client, done.output_file_id)
    assert [each["custom_id"] for each in good] == [f"id-{place}" for place in range(1000)]
    assert [len(each["response"]["body"]["choices"][0]["text"]) for each in good] == lengths
    assert done.error_file_id is None
    for each in billed.engines:
        assert len(each.engine.began) > 100, "both replicas answer rows"
    assert Counter(begun()) == {f"row {place}": 1 for place in range(1000)}
    until("the bills", lambda: len(billed.ledger()) >= 1000)
    bills = billed.ledger()
    assert len(bills) == len({each.id for each in bills}) == 1000
    assert sum(each.completion_tokens for each in bills) == done.usage.output_tokens == sum(lengths)
    left = (billed.folder / "files").glob
    until("what only an unfinished batch needs to be removed", lambda: not list(left("batch_*")))


def test_a_cancelled_batch_keeps_what_it_has(gateways: Gateways, served: ServedEngine, tmp_path: Path) -> None:
    client = gateways().client
    batch = submit(client, [row(place, max_tokens=40) for place in range(2000)])
    progress = tmp_path / "files" / f"{batch.id}.progress"
    until("the first rows", lambda: progress.exists() and progress.read_bytes().count(b"\n") > 20)
    with pytest.raises(BadRequestError) as refused:
        client.files.delete(batch.input_file_id)
    assert refused.value.code == "file_in_use"
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch)
    assert done.status == "cancelled" and done.cancelling_at and done.cancelled_at
    assert done.request_counts is not None and 20 <= done.request_counts.completed < 2000
    assert len(lines(client, done.output_file_id)) == done.request_counts.completed
    until("the engine to be idle", lambda: not served.engine._live)
    assert client.files.delete(batch.input_file_id).deleted


def test_batches_are_listed_newest_first(gateways: Gateways) -> None:
    client = gateways().client
    made = [submit(client, [row(0)]).id for _ in range(5)]
    assert [each.id for each in client.batches.list(limit=2)] == made[::-1]
    page = client.batches.list(limit=2)
    assert page.has_more and [each.id for each in page.data] == made[:2:-1]
    with pytest.raises(NotFoundError):
        client.batches.retrieve("batch_absent")
    with pytest.raises(NotFoundError) as refused:
        client.batches.list(after="batch_absent")
    assert refused.value.param == "after"
    for batch_id in made:
        assert ended(client, client.batches.retrieve(batch_id)).status == "completed"
    with pytest.raises(ConflictError):
        client.batches.cancel(made[0])


def test_a_batch_that_cannot_be_is_refused(gateways: Gateways) -> None:
    client = gateways().client
    uploaded = client.files.create(file=("rows.jsonl", b"{}"), purpose="batch")
    data = client.files.create(file=("x.txt", b"x"), purpose="user_data")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"completion_window": "1h"}, "completion_window"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"input_file_id": data.id}, "input_file_id"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ]
    for change, param in cases:
        fields: dict[str, Any] = {
            "input_file_id": uploaded.id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        with pytest.raises(BadRequestError) as refused:
            client.batches.create(**{**fields, **change})
        assert str(refused.value.param).startswith(param)
    with pytest.raises(NotFoundError):
        client.batches.create(input_file_id="file-absent", endpoint="/v1/completions", completion_window="24h")
