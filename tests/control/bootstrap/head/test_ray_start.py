"""Ray's head is started on the tables of its cluster's present life."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raytide.control.bootstrap.head import ray_start
from raytide.control.bootstrap.head.redis_users import RedisUser


@pytest.mark.parametrize(("life", "tables"), [(0, "tide"), (255, "tide-ff")])
def test_each_life_of_a_cluster_has_tables_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, life: int, tables: str
) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(ray_start, "spawn", lambda what, argv, run_dir, environment: started.append(environment))
    monkeypatch.setattr(ray_start.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    section = SimpleNamespace(
        address="127.0.0.1", gcs_port=6379, ray_options=(), redis_address=("127.0.0.1", 6380), has_tls=False
    )
    cluster = SimpleNamespace(
        name="tide", run_dir=tmp_path, ray_token_file=None, log=lambda name: tmp_path / name, with_cluster_mark=dict
    )
    settings = SimpleNamespace(standby=section, pass_environment=())
    ray_start.start_ray(cast(Any, cluster), cast(Any, settings), RedisUser("u", "p"), life)
    assert started[0]["RAY_external_storage_namespace"] == tables
