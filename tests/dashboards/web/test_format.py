"""Numbers and durations as the page writes them, run by node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from raytide.dashboards.web import bundle

WEB = Path(bundle.__file__).parent
ESBUILD = WEB / "node_modules" / ".bin" / "esbuild"
NUMBERS = {
    0: "0",
    0.001: "0",
    1.25: "1.25",
    9.996: "10",
    99.96: "100",
    980: "980",
    9999: "9999",
    12_345: "12.3k",
    -12_345: "-12.3k",
    99_950: "100k",
    999_499: "999k",
    999_500: "1M",
    999_999: "1M",
    1.04e11: "104G",
}
SPANS = {
    0.24: "240 ms",
    0.9996: "1 s",
    3.25: "3.3 s",
    89.4: "89 s",
    91: "2 min",
    5399: "90 min",
    7170: "2 h",
    7199: "2 h",
    7260: "2 h 1 min",
    35_999: "10 h",
    40_000: "11 h",
    130_000: "2 d",
}


def in_node(folder: Path, source: str, expression: str, given: object, **environment: str) -> Any:
    """Returns the value of an expression over the module `m`, a file of the page, and over `given`."""
    if shutil.which("node") is None or not ESBUILD.exists():
        pytest.skip("node or the page's packages are missing: `./dev page` installs them")
    options = ["--bundle", "--format=esm", f"--outfile={folder}/module.mjs", "--log-level=warning"]
    subprocess.run([ESBUILD, f"src/{source}.ts", *options], cwd=WEB, check=True, timeout=120)
    script = "import * as m from './module.mjs'; const given = JSON.parse(process.argv[1]); "
    command = ["node", "--input-type=module", "--eval", f"{script}console.log(JSON.stringify({expression}))"]
    done = subprocess.run(
        [*command, json.dumps(given)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout)


def test_every_size_of_number_and_duration_is_short_and_has_its_unit(tmp_path: Path) -> None:
    given = {"n": list(NUMBERS), "s": list(SPANS)}
    found = in_node(tmp_path, "format", "[given.n.map(m.num), given.s.map(m.span)]", given)
    assert found == [list(NUMBERS.values()), list(SPANS.values())]


@pytest.mark.parametrize("zone", ["UTC", "America/Los_Angeles", "Pacific/Auckland"])
def test_a_day_of_costs_has_its_own_date_everywhere_and_a_free_day_costs_nothing(tmp_path: Path, zone: str) -> None:
    """The clocks change on 1 November in Los Angeles."""
    rows = [
        {"key": f"2026-{day}", "amount_micro_usd": amount} for day, amount in (("10-31", 5), ("11-01", 7), ("11-04", 9))
    ]
    dates = (
        "[...days.x, days.until].map((at) => { const on = new Date(at * 1000); return [on.getDate(), on.getHours()]; })"
    )
    expression = f"(() => {{ const days = m.byDay(given); return [{dates}, days.values]; }})()"
    found = in_node(tmp_path, "days", expression, rows, TZ=zone)
    assert found == [[[day, 0] for day in (31, 1, 2, 3, 4, 5)], [5, 7, 0, 0, 9]]


def test_what_was_spent_of_budgets_leaves_out_teams_without_one_and_counts_a_parent_s_once(tmp_path: Path) -> None:
    def team(name: str, spent_usd: int, parent: str = "", **budget: float) -> tuple[str, dict[str, Any]]:
        limits = {"soft_usd": None, "hard_usd": None, **budget}
        return name, {"team": name, "parent": parent, "spent_micro_usd": spent_usd * 10**6, **limits}

    teams = [
        team("infra", 5000),
        team("research", 10, hard_usd=1000),
        team("vision", 200, "research", soft_usd=400, hard_usd=700),
        team("interns", 40, "research"),
        team("chat", 0, soft_usd=500),
    ]
    found = in_node(tmp_path, "fleet", "m.budgetsOf(new Map(given))", teams)
    assert found == {"usd": 1500, "spent_micro_usd": 250 * 10**6}
    below = dict(in_node(tmp_path, "fleet", "[...m.spentOf(given.map(([, team]) => team))]", teams))
    assert {name: spent // 10**6 for name, spent in below.items()} == {
        "infra": 5000,
        "research": 250,
        "vision": 200,
        "interns": 40,
        "chat": 0,
    }
