"""Five thousand hostile requests, with a tick after each, on the control plane in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.control.reconcile.test_hostile_specs import Attack, assault

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("seed", [11, 12, 13, 14, 15])
def test_hostile_specs_and_reports_stop_nobody(tmp_path: Path, seed: int) -> None:
    attack = Attack(tmp_path)
    with attack.http:
        assault(attack, seed, 1000, tmp_path)
    attack.loop.store.close()
