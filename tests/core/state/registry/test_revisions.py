from __future__ import annotations

from contextlib import closing

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from raytide.core.errors import NotFoundError
from raytide.core.objects.endpoint import EndpointState, ServeSpec
from raytide.core.state import Changes, Store
from raytide.core.state.database import _MIGRATIONS, Database
from raytide.core.state.registry import revisions
from raytide.core.state.tenancy.audit import acting


def spec(model: str = "/m/1", team: str = "blue") -> ServeSpec:
    return ServeSpec(name="chat", model=model, team=team)


def test_each_new_spec_is_a_revision_and_the_same_spec_is_none(store: Store) -> None:
    store.save_endpoint(spec("/m/1"), "ana", 1.0)
    store.save_endpoint(spec("/m/1"), "bob", 2.0)
    store.save_endpoint(spec("/m/2"), "bob", 3.0, "faster")
    found = store.revisions.page("chat", team="blue")
    assert [(x.number, x.user, x.at_s, x.why) for x in found] == [(2, "bob", 3.0, "faster"), (1, "ana", 1.0, "")]
    assert [x.spec for x in found] == [spec("/m/2"), spec("/m/1")]
    assert store.revisions.find("chat", team="blue", number=1) == found[1]
    with pytest.raises(NotFoundError, match="no revision 3"):
        store.revisions.find("chat", team="blue", number=3)


def test_only_the_newest_revisions_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revisions, "KEPT_REVISIONS", 3)
    for number in range(1, 6):
        store.save_endpoint(spec(f"/m/{number}"), "ana", float(number))
    assert [x.number for x in store.revisions.page("chat", team="blue")] == [5, 4, 3]


def test_another_team_does_not_see_the_revisions_of_a_name_that_it_takes_over(store: Store) -> None:
    made = store.save_endpoint(spec(), "ana", 1.0)
    store.request_delete("chat")
    from dataclasses import replace

    store.commit(Changes(2.0, endpoints=(replace(made, state=EndpointState.DELETED, ended_at_s=2.0),)))
    store.save_endpoint(spec(team="red"), "bob", 3.0)
    assert [x.number for x in store.revisions.page("chat", team="red")] == [2]
    with pytest.raises(NotFoundError):
        store.revisions.find("chat", team="red", number=1)


def test_the_audit_log_has_the_number_and_the_reason(store: Store) -> None:
    with acting("ana", 1.0):
        store.save_endpoint(spec(), "ana", 1.0, "rollback to revision 7")
    (entry,) = store.tenancy.audit.entries(action="endpoint.save")
    assert (entry.detail["revision"], entry.detail["why"]) == (1, "rollback to revision 7")


def test_a_spec_that_this_release_rejects_is_shown_with_its_error(store: Store) -> None:
    store.save_endpoint(spec(), "ana", 1.0)
    with store._db.write() as c:
        c.execute(sa.text('UPDATE endpoint_revisions SET spec = \'{"name": "chat"}\''))
    (found,) = store.revisions.page("chat", team="blue")
    assert found.spec is None
    assert "model" in found.unreadable


def test_an_endpoint_of_an_older_release_begins_with_a_revision(url: str) -> None:
    database = Database(url)
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    with database.write() as c:
        config.attributes["connection"] = c
        command.upgrade(config, "0008")
        row = "'chat', 'blue', 'ana', :spec, false, 5.0, 'running', 1, ''"
        columns = 'name, team, "user", spec, delete_requested, created_at_s, state, target_replicas, reason'
        c.execute(sa.text(f"INSERT INTO endpoints ({columns}) VALUES ({row})"), {"spec": spec().model_dump_json()})
    database.engine.dispose()
    with closing(Store.open(url)) as store:
        (found,) = store.revisions.page("chat", team="blue")
        assert (found.number, found.user, found.at_s, found.spec) == (1, "ana", 5.0, spec())
        store.save_endpoint(spec("/m/2"), "bob", 6.0)
        assert [x.number for x in store.revisions.page("chat", team="blue")] == [2, 1]
