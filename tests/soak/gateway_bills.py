"""Compares what API keys were billed with what their clients saw."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
from tests.soak.gateway_streams import Load

from raytide.control.client import ApiClient
from raytide.core.objects.api_key import KeyBudget, KeySpec, KeySpending, TokenPrice, UsageRow

PRICE = TokenPrice(prompt=1.5, cached=0.1, completion=2.7)
WAIT_S = 180.0
"""The time for reports to arrive, and for the reservations of a killed gateway to end, which takes a minute."""


@dataclass
class Bills:
    """Two keys, one with a budget, and all streams that used them."""

    api: ApiClient
    url: str
    loads: list[Load] = field(default_factory=list)

    def __post_init__(self) -> None:
        specs = (KeySpec(name="plain"), KeySpec(name="limited", budget=KeyBudget(usd=1000.0)))
        made = [self.api.create_key(spec) for spec in specs]
        self.keys = [each.key.id for each in made]
        self.secrets = [each.secret for each in made]
        self._extra = 0

    def check(self) -> None:
        """Waits until all is reported. Each whole answer then has one row with its tokens, each broken stream at most
        one; the rows' sums are what the keys have spent, and nothing stays reserved.
        """
        deadline_s = time.monotonic() + WAIT_S
        while not self._is_settled():
            assert time.monotonic() < deadline_s, (len(self._rows()), self._spending())
            self._ask()  # releases what killed gateways have reserved
            time.sleep(5.0)
        rows = self._rows()
        seen = Counter(
            (self.keys[key], answer.prompt_tokens, answer.completion_tokens)
            for load in self.loads
            for key, answer in load.answers
        )
        billed = Counter((row.key, row.prompt_tokens, row.completion_tokens) for row in rows if row.status == 200)
        extra = sum((billed - seen).values()) - self._extra
        assert seen - billed == Counter()
        assert extra + sum(row.status != 200 for row in rows) <= sum(len(load.broken) for load in self.loads)
        assert len({row.id for row in rows}) == len(rows)
        for key, spending in zip(self.keys, self._spending(), strict=True):
            own = [row for row in rows if row.key == key]
            pico = sum(PRICE.cost_pico_usd(row.prompt_tokens, row.cached_tokens, row.completion_tokens) for row in own)
            amount = sum(row.cost_micro_usd for row in own)
            (group,) = [each for each in self.api.usage_sums("key") if each.group == key]
            assert (amount, sum(row.waived_micro_usd for row in own)) == ((pico + 500_000) // 1_000_000, 0)
            assert (group.requests, group.cost_micro_usd, spending) == (len(own), amount, KeySpending(amount, amount))
        assert self.api.verify_audit().is_whole

    def _ask(self) -> None:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        headers = {"authorization": f"Bearer {self.secrets[1]}"}
        httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()
        self._extra += 1

    def _is_settled(self) -> bool:
        answered = sum(len(load.answers) for load in self.loads) + self._extra
        is_reported = sum(row.status == 200 for row in self._rows()) >= answered
        return is_reported and not any(spending.reserved for spending in self._spending())

    def _spending(self) -> list[KeySpending]:
        return [self.api.key(key).spending for key in self.keys]

    def _rows(self) -> list[UsageRow]:
        rows: list[UsageRow] = []
        before: int | None = None
        while True:
            page = self.api.usage(before=before, limit=1000)
            rows += page.rows
            if (before := page.before) is None:
                return [row for row in rows if row.key]
