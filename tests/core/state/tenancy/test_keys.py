from __future__ import annotations

from dataclasses import replace

import pytest

from raytide.core.errors import ConflictError, NotFoundError, QuotaError
from raytide.core.objects.api_key import KeyBudget, KeySpec, RequestUsage, digest_of_secret, new_secret
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.state import Store
from raytide.core.state.tenancy import keys
from raytide.core.state.tenancy.records import TenancyRecords
from raytide.core.state.tenancy.usage import UsageFilter

SPEC = KeySpec(
    name="web",
    team="blue",
    models=("chat",),
    expires_in_s=3600.0,
    requests_per_min=600,
    tokens_per_min=200_000,
    budget=KeyBudget(usd=1.5, per="life"),
    priority=-3,
    answer_cache=True,
)


def test_a_key_is_kept_with_every_field_and_without_its_secret(tenancy: TenancyRecords) -> None:
    secret = new_secret()
    assert len(secret) == len("rk-") + 43  # 256 bits in base64
    made = tenancy.keys.create(SPEC, "ana", digest_of_secret(secret), 100.0)
    assert (made.id, made.account, made.expires_at_s) == ("key-1", "key-1", 3700.0)
    assert (made.budget_micro_usd, made.budget_per, made.priority) == (1_500_000, "life", -3)
    assert made.answer_cache
    assert tenancy.keys.key("key-1") == made
    assert tenancy.keys.changes(-1, 100.0) == (1, {digest_of_secret(secret): made})
    assert secret not in repr(tenancy.audit.entries())


def test_a_rotated_key_is_valid_for_the_grace_period_and_shares_the_account(tenancy: TenancyRecords) -> None:
    old = tenancy.keys.create(SPEC, "ana", "d1", 100.0)
    new = tenancy.keys.rotate(old.id, "d2", 200.0, grace_s=60.0)
    assert new == replace(old, id="key-2", created_at_s=200.0)
    left = tenancy.keys.key(old.id)
    assert (left.replaced_by, left.expires_at_s) == ("key-2", 260.0)
    assert left.is_valid(259.0)
    assert not left.is_valid(260.0)
    with pytest.raises(ConflictError, match="replaced by key-2"):
        tenancy.keys.rotate(old.id, "d3", 201.0, grace_s=60.0)
    assert tenancy.keys.rotate("key-2", "d4", 3690.0, grace_s=60.0).id == "key-3"
    assert tenancy.keys.key("key-2").expires_at_s == 3700.0  # never later than it was


def test_gateways_are_told_what_changed_since_a_revision(store: Store, tenancy: TenancyRecords) -> None:
    assert tenancy.keys.changes(-1, 0.0) == (0, {})
    tenancy.keys.create(SPEC, "ana", "d1", 100.0)
    tenancy.keys.create(SPEC, "ana", "d2", 100.0)
    assert tenancy.keys.revision() == 2
    tenancy.keys.revoke("key-1", 150.0)
    tenancy.keys.revoke("key-1", 160.0)  # no effect
    revision, changed = tenancy.keys.changes(2, 150.0)
    assert (revision, {digest: key.revoked_at_s for digest, key in changed.items()}) == (3, {"d1": 150.0})
    assert list(tenancy.keys.changes(-1, 150.0)[1]) == ["d2"]
    store.save_endpoint(ServeSpec(name="chat", model="/m"), "ana", 1.0)  # its price may be new
    store.save_team("blue", {"weight": 2.0})
    assert tenancy.keys.revision() == 5


def test_pages_of_keys_are_by_team_and_validity(tenancy: TenancyRecords) -> None:
    for number, team in enumerate(("blue", "red", "blue")):
        tenancy.keys.create(SPEC.model_copy(update={"team": team}), "ana", f"d{number}", 100.0)
    tenancy.keys.revoke("key-3", 101.0)
    assert [key.id for key in tenancy.keys.page()] == ["key-3", "key-2", "key-1"]
    assert [key.id for key in tenancy.keys.page(team="blue", valid_at_s=102.0)] == ["key-1"]
    assert tenancy.keys.page(valid_at_s=5000.0) == ()
    assert [key.id for key in tenancy.keys.page(limit=1, offset=1)] == ["key-2"]


def test_unknown_keys_and_too_many_are_refused(tenancy: TenancyRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (lambda: tenancy.keys.key("key-9"), lambda: tenancy.keys.revoke("key-9", 1.0)):
        with pytest.raises(NotFoundError, match="key-9"):
            call()
    monkeypatch.setattr(keys, "MOST_KEYS", 1)
    tenancy.keys.create(SPEC, "ana", "d1", 100.0)
    with pytest.raises(QuotaError, match="1 API keys"):
        tenancy.keys.create(SPEC, "ana", "d2", 100.0)
    assert tenancy.keys.create(SPEC, "ana", "d2", 3700.0).id == "key-2"  # the first has expired
    assert tenancy.keys.prune(3699.0) == 0
    assert tenancy.keys.prune(3701.0) == 1


def test_what_is_past_its_retention_goes_and_spending_stays(tenancy: TenancyRecords) -> None:
    key = tenancy.keys.create(SPEC, "ana", "d1", 100.0)
    row = RequestUsage(id="r", at_s=200.0, key=key.id, team="blue", cost_pico_usd=9 * 10**6, status=200)
    tenancy.spending.settle("g", [row], 200.0)
    assert tenancy.prune(150.0, 99_999.0, 1000.0) is False
    assert (len(tenancy.usage.rows(UsageFilter())[0]), len(tenancy.audit.entries())) == (1, 1)
    tenancy.prune(5000.0, 5000.0, 6000.0)
    assert tenancy.usage.rows(UsageFilter())[0] == ()
    assert tenancy.keys.page() == ()  # it expired at 3700
    assert [entry.action for entry in tenancy.audit.entries()] == ["audit.prune", "usage.prune"]
    assert tenancy.spending.spent([key.id], 200.0)[key.id].life == 9
    assert tenancy.audit.verify().is_whole
