"""The repository's shape: what breaks `import platform` or makes one file two modules must never come back."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOP_FOLDERS = ("platform", "actors", "pipelines", "kernels", "autoscaler", "dashboards")
LINKED = TOP_FOLDERS[1:]


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """Every committed or staged file that is still there; links are left out."""
    files = (ROOT / name for name in git("ls-files", "-z").split("\0") if name)
    return [file for file in files if file.is_file() and not file.is_symlink()]


@pytest.mark.parametrize("folder", TOP_FOLDERS)
def test_a_top_folder_is_no_package(folder: str) -> None:
    """`platform/__init__.py` would shadow the standard library, `kernels/__init__.py` Hugging Face's package."""
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("folder", LINKED)
def test_each_product_folder_is_reached_through_a_committed_relative_link(folder: str) -> None:
    link = ROOT / "platform" / "raytide" / folder
    assert link.is_symlink()
    assert str(link.readlink()) == f"../../{folder}"
    assert link.resolve() == ROOT / folder
    assert git("ls-files", "--stage", str(link)).startswith("120000 ")


def test_the_import_root_has_no_other_links() -> None:
    links = {path.name for path in (ROOT / "platform" / "raytide").rglob("*") if path.is_symlink()}
    assert links == set(LINKED)


def test_the_standard_library_s_platform_is_found_from_the_root() -> None:
    code = "import platform, ray; print(platform.system(), ray.__version__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Linux 2.")


def test_no_file_is_over_a_megabyte(tracked: list[Path]) -> None:
    assert [file for file in tracked if file.stat().st_size > 1_000_000] == []


def test_no_file_names_a_package_registry_or_a_path_of_one_machine(tracked: list[Path]) -> None:
    """Both work on the machine they were written on, and nowhere else."""
    registry = r'--(extra-)?index-url|"resolved": *"https?://|https?://[a-z0-9.-]+/(simple|packages)/'
    machine = r"(^|[^A-Za-z0-9_.])/(work|farm|root|home)/[a-z]"
    foreign = re.compile(f"{registry}|{machine}", re.IGNORECASE | re.MULTILINE)
    named = []
    for file in tracked:
        if file == Path(__file__):
            continue
        found = foreign.search(file.read_text(encoding="utf-8", errors="ignore"))
        if found:
            named.append(f"{file.relative_to(ROOT)}: {found.group()!r}")
    assert named == []
