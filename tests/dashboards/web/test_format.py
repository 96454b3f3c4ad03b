"""Numbers and durations as the page writes them, run by node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

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
SCRIPT = "import * as f from './format.mjs'; const {n, s} = JSON.parse(process.argv[1]); "
PRINT = "console.log(JSON.stringify([n.map(f.num), s.map(f.span)]))"


def test_every_size_of_number_and_duration_is_short_and_has_its_unit(tmp_path: Path) -> None:
    if shutil.which("node") is None or not ESBUILD.exists():
        pytest.skip("node or the page's packages are missing: `./dev page` installs them")
    options = ["--bundle", "--format=esm", f"--outfile={tmp_path}/format.mjs", "--log-level=warning"]
    subprocess.run([ESBUILD, "src/format.ts", *options], cwd=WEB, check=True, timeout=120)
    given = json.dumps({"n": list(NUMBERS), "s": list(SPANS)})
    command = ["node", "--input-type=module", "--eval", SCRIPT + PRINT, given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == [list(NUMBERS.values()), list(SPANS.values())]
