"""Registered models in the store: versions never change, and every change of an alias is kept."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stores import new_store

from raytide.core.errors import ConflictError, NotFoundError, QuotaError
from raytide.core.specs.model_version import AliasSpec, Lineage, ModelReference, ModelVersionSpec
from raytide.core.state import Store
from raytide.core.state.registry import versions
from raytide.core.state.tenancy.audit import acting


def spec(digit: str = "a", name: str = "chat", team: str = "blue", **fields: object) -> ModelVersionSpec:
    given = {"name": name, "team": team, "location": f"/models/{digit}", "sha256": digit * 64, **fields}
    return ModelVersionSpec.model_validate(given)


def test_versions_count_up_by_model_and_keep_all_that_was_given(store: Store) -> None:
    lineage = Lineage(job="job-1", dataset="/data", dataset_sha256="d" * 64, config={"steps": 3})
    first = store.models.register(spec("a", lineage=lineage, metrics={"ppl": 2.5}), "ana", 1.0)
    second = store.models.register(spec("b"), "bob", 2.0)
    other = store.models.register(spec("a", name="code"), "ana", 3.0)
    assert [each.id for each in (first, second, other)] == ["chat:1", "chat:2", "code:1"]
    assert store.models.find(ModelReference("chat", 1)) == first
    assert first.spec.lineage == lineage
    assert store.models.versions("chat") == (second, first)
    assert store.models.versions("chat", limit=1, offset=1) == (first,)


def test_the_same_version_again_is_the_one_that_exists(store: Store) -> None:
    first = store.models.register(spec("a"), "ana", 1.0)
    store.models.register(spec("b"), "ana", 2.0)
    assert store.models.register(spec("a"), "bob", 3.0) == first
    assert store.models.register(spec("a", metrics={"ppl": 1.0}), "ana", 4.0).version == 3


def test_a_name_belongs_to_the_team_that_used_it_first(store: Store) -> None:
    store.models.register(spec("a"), "ana", 1.0)
    with pytest.raises(ConflictError, match="belongs to team blue"):
        store.models.register(spec("b", team="red"), "bob", 2.0)
    assert store.models.owner("chat") == "blue"


def test_a_team_has_a_bounded_number_of_versions(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "MOST_VERSIONS", 2)
    for digit in "ab":
        store.models.register(spec(digit), "ana", 1.0)
    with pytest.raises(QuotaError, match="2 versions"):
        store.models.register(spec("c"), "ana", 1.0)
    assert store.models.register(spec("a"), "ana", 1.0).version == 1
    assert store.models.register(spec("c", name="other", team="red"), "bob", 1.0).version == 1


def test_an_alias_follows_its_changes_and_its_history_says_who_when_and_why(store: Store) -> None:
    for digit in "ab":
        store.models.register(spec(digit), "ana", 1.0)
    store.models.promote("chat", "champion", AliasSpec(version=1, why="first"), "ana", 2.0)
    store.models.promote("chat", "champion", AliasSpec(version=2, why="better"), "bob", 3.0)
    store.models.promote("chat", "challenger", AliasSpec(version=1), "bob", 4.0)
    assert store.models.find(ModelReference("chat", alias="champion")).version == 2
    history = store.models.history("chat", alias="champion")
    assert [(x.before, x.after, x.at_s, x.user, x.why) for x in history] == [
        (1, 2, 3.0, "bob", "better"),
        (None, 1, 2.0, "ana", "first"),
    ]
    assert [x.alias for x in store.models.history("chat")] == ["challenger", "champion", "champion"]
    assert [x.after for x in store.models.history("chat", until_s=2.5)] == [1]
    assert store.models.models()[0].aliases == {"challenger": 1, "champion": 2}


def test_an_alias_that_already_names_the_version_leaves_no_entry(store: Store) -> None:
    store.models.register(spec("a"), "ana", 1.0)
    made = store.models.promote("chat", "champion", AliasSpec(version=1, why="first"), "ana", 2.0)
    assert store.models.promote("chat", "champion", AliasSpec(version=1, why="again"), "bob", 3.0) == made
    assert store.models.history("chat") == (made,)


def test_an_alias_can_be_removed_once(store: Store) -> None:
    store.models.register(spec("a"), "ana", 1.0)
    with pytest.raises(NotFoundError, match="names no version"):
        store.models.promote("chat", "champion", AliasSpec(version=None), "ana", 2.0)
    store.models.promote("chat", "champion", AliasSpec(version=1), "ana", 2.0)
    store.models.promote("chat", "champion", AliasSpec(version=None, why="bad"), "ana", 3.0)
    assert store.models.models()[0].aliases == {}
    with pytest.raises(NotFoundError, match="chat@champion is not registered"):
        store.models.find(ModelReference("chat", alias="champion"))


def test_a_promotion_can_depend_on_the_present_version(store: Store) -> None:
    for digit in "ab":
        store.models.register(spec(digit), "ana", 1.0)
    store.models.promote("chat", "champion", AliasSpec(version=1, if_version=0), "ana", 2.0)
    with pytest.raises(ConflictError, match="names version 1, not 2"):
        store.models.promote("chat", "champion", AliasSpec(version=2, if_version=2), "ana", 3.0)
    assert store.models.promote("chat", "champion", AliasSpec(version=2, if_version=1), "ana", 3.0).after == 2


def test_a_promotion_whose_response_was_lost_can_be_sent_again(store: Store) -> None:
    for digit in "abc":
        store.models.register(spec(digit), "ana", 1.0)
    for version in (1, 2):
        change = AliasSpec(version=version, if_version=version - 1)
        made = store.models.promote("chat", "champion", change, "ana", 2.0)
        assert store.models.promote("chat", "champion", change, "ana", 3.0) == made
    for other, user in ((AliasSpec(version=2, if_version=1), "bob"), (AliasSpec(version=3, if_version=1), "ana")):
        with pytest.raises(ConflictError, match="names version 2, not 1"):
            store.models.promote("chat", "champion", other, user, 4.0)
    assert len(store.models.history("chat")) == 2


def test_what_does_not_exist_cannot_be_promoted_or_found(store: Store) -> None:
    store.models.register(spec("a"), "ana", 1.0)
    for name, version in (("chat", 2), ("code", 1)):
        with pytest.raises(NotFoundError, match=f"{name}:{version} is not registered"):
            store.models.promote(name, "champion", AliasSpec(version=version), "ana", 2.0)
    with pytest.raises(NotFoundError):
        store.models.owner("code")
    assert store.models.history("chat") == ()


def test_concurrent_promotions_form_one_chain(url: str) -> None:
    """Each change begins where the one before it ended, whoever made it."""
    store = Store.open(url)
    for digit in "abc":
        store.models.register(spec(digit), "ana", 1.0)

    def change(user: int) -> None:
        for at in range(6):
            version = (at + user) % 3 + 1
            store.models.promote("chat", "champion", AliasSpec(version=version), f"user-{user}", float(at))

    threads = [threading.Thread(target=change, args=(user,)) for user in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    history = store.models.history("chat")[::-1]
    store.close()
    assert [x.before for x in history] == [None, *(x.after for x in history[:-1])]


def test_each_change_is_in_the_audit_log(store: Store) -> None:
    with acting("ana", 5.0):
        store.models.register(spec("a"), "ana", 5.0)
        store.models.register(spec("a"), "ana", 5.0)
        store.models.promote("chat", "champion", AliasSpec(version=1, why="first"), "ana", 5.0)
    entries = store.tenancy.audit.entries(action="model.")
    assert [(x.actor, x.action, x.object) for x in entries] == [
        ("ana", "model.promote", "chat@champion"),
        ("ana", "model.register", "chat:1"),
    ]
    assert entries[0].detail == {"from": None, "to": 1, "why": "first"}
    assert store.tenancy.audit.verify().is_whole


def test_models_are_listed_by_team_and_page(store: Store) -> None:
    for name, team in (("b", "blue"), ("a", "blue"), ("c", "red")):
        store.models.register(spec("a", name=name, team=team), "ana", 1.0)
        store.models.register(spec("b", name=name, team=team), "ana", 2.0)
    found = store.models.models(team="blue")
    assert [(x.name, x.versions, x.newest.version) for x in found] == [("a", 2, 2), ("b", 2, 2)]
    assert [x.name for x in store.models.models(limit=1, offset=1)] == ["b"]
    assert [x.team for x in store.models.models(name="c")] == ["red"]


@settings(max_examples=30, deadline=None)
@given(changes=st.lists(st.tuples(st.sampled_from(["x", "y"]), st.one_of(st.none(), st.integers(1, 3))), max_size=12))
def test_the_history_tells_what_an_alias_named_at_any_time(
    changes: list[tuple[str, int | None]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("state")
    store = new_store(folder)
    for digit in "abc":
        store.models.register(spec(digit), "ana", 0.0)
    named: dict[str, int | None] = {"x": None, "y": None}
    seen = []
    for at, (alias, version) in enumerate(changes, start=1):
        if version is not None or named[alias] is not None:
            store.models.promote("chat", alias, AliasSpec(version=version), "ana", float(at))
            named[alias] = version
        seen.append(dict(named))
    for at, then in enumerate(seen, start=1):
        for alias, version in then.items():
            last = store.models.history("chat", alias=alias, until_s=float(at), limit=1)
            assert (last[0].after if last else None) == version
    assert store.models.models()[0].aliases == {alias: version for alias, version in named.items() if version}
    store.close()
