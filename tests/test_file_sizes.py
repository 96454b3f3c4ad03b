"""One noun, one file: a module past 400 lines is two."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = 400


def test_no_module_is_over_400_lines() -> None:
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    files = [ROOT / name for name in names if not name.startswith("tests/") and (ROOT / name).is_file()]
    lines = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert lines
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}
