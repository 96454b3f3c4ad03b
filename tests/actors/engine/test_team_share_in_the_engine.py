"""The native engine keeps requests of a heavy team out of most steps in which a light one is answered."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.actors.engine.tiny import save_llama

from raytide.actors.engine import EngineConfig, SamplingParams
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.native.output_processor import Output
from raytide.actors.engine.types import GenChunk, GenRequest

STEPS = 40


def request(name: str, team: str) -> GenRequest:
    sampling = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    return GenRequest(request_id=name, prompt=[len(name), 5, 7], sampling=sampling, team=team)


def tokens(outputs: list[Output]) -> dict[str, list[int]]:
    return {each.request_id: each.token_ids for each in outputs if isinstance(each, GenChunk)}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_llama(path := tmp_path_factory.mktemp("model"))
    return path


def test_the_teams_of_requests_share_its_steps(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def beside(slowdown: float | None) -> dict[str, list[int]]:
        """Returns the tokens of all requests after some steps of both teams."""
        core = EngineCore(EngineConfig(model_dir=str(model_dir), device="cpu", team_slowdown=slowdown))
        if core.scheduler._shares is not None:
            monkeypatch.setattr(core.scheduler._shares, "_seconds", lambda rows: 10.0 + rows)
        found: dict[str, list[int]] = {}
        for at in range(8):
            core.add(asked := request("h" * (at + 1), "heavy"), list(asked.prompt))  # type: ignore[arg-type]
        core.add(asked := request("light", "light"), list(asked.prompt))  # type: ignore[arg-type]
        for _ in range(STEPS):
            for name, each in tokens(core.step()).items():
                found.setdefault(name, []).extend(each)
        return found

    shared, unbounded = beside(1.15), beside(None)
    assert len(shared["light"]) == len(unbounded["light"]) == STEPS
    heavy = sum(len(each) for name, each in shared.items() if name != "light")
    assert heavy <= 8 + STEPS * 0.15 * 11 + 2
    assert sum(len(each) for name, each in unbounded.items() if name != "light") == 8 * STEPS
    assert all(each == unbounded[name][: len(each)] for name, each in shared.items())
