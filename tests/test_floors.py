"""A module imports only from floors below its own. Imports in functions and for type checking count too."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import source_file

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "platform" / "raytide"

# The longest name that a module starts with decides. Siblings of one floor are strangers; where a row names several
# packages that belong together, they are one room.
FLOORS: dict[str, tuple[int, str]] = {
    "raytide.core": (0, "core"),
    "raytide.kernels": (1, "kernels"),
    "raytide.scheduling": (1, "scheduling"),
    "raytide.sizing": (1, "sizing"),
    "raytide.actors": (2, "actors"),
    "raytide.queue": (3, "queue"),
    "raytide.ledger": (3, "ledger"),
    "raytide.autoscaler": (3, "autoscaler"),
    "raytide.pipelines": (3, "pipelines"),
    "raytide.registry": (3, "registry"),
    "raytide.control": (4, "control"),
    "raytide.dashboards": (4, "control"),
    "raytide.gateway": (4, "control"),
    "raytide.simulate": (4, "control"),
    "raytide": (5, "top"),
}

# Inside floor 2: what a package may import besides itself.
ACTORS_MAY_IMPORT: dict[str, set[str]] = {
    "models": set(),
    "engine": {"models"},
    "gang": set(),
    "trainer": {"gang", "models"},
    "serving": {"engine", "gang", "models"},
    "quality": {"engine", "models"},
}
PRODUCT_FOLDERS = {"actors", "autoscaler", "dashboards", "kernels", "pipelines"}


def modules() -> dict[str, Path]:
    """Every raytide module by its import name, through the links."""
    found = {}
    tops = [PACKAGE, *(path for path in PACKAGE.iterdir() if path.is_dir())]
    for top in tops:
        for file in top.glob("*.py") if top == PACKAGE else top.rglob("*.py"):
            parts = ["raytide", *file.relative_to(PACKAGE).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of each import anywhere in the file; `from a.b import c` gives `a.b.c`, which may be a submodule."""
    for line, module, names in source_file.read(file).imports:
        yield from ((line, f"{module}.{name}") for name in names) if names else [(line, module)]


def place(name: str) -> tuple[int, str]:
    while name not in FLOORS:
        name = name.rpartition(".")[0]
    return FLOORS[name]


def is_allowed(importer: str, imported: str) -> bool:
    (own_floor, own_room), (floor, room) = place(importer), place(imported)
    if own_room != room:
        return floor < own_floor
    if room != "actors":
        return True
    own_package, package = importer.split(".")[2], imported.split(".")[2]
    return own_package == package or package in ACTORS_MAY_IMPORT[own_package]


def test_there_are_modules_to_check() -> None:
    assert {"raytide", "raytide.core.errors", "raytide.actors.engine.types"} <= MODULES.keys()


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("raytide.control.controller", "raytide.queue.admission.scheduler", True),
        ("raytide.queue.admission.scheduler", "raytide.ledger.book", False),
        ("raytide.scheduling.state", "raytide.queue.admission.scheduler", False),
        ("raytide.actors.serving.http.app", "raytide.actors.engine.types", True),
        ("raytide.actors.engine.types", "raytide.actors.trainer.types", False),
        ("raytide.actors.trainer.elastic.driver", "raytide.actors.engine.types", False),
        ("raytide.control.client", "raytide.cli.app", False),
        ("raytide.cli.app", "raytide.control.client", True),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    assert is_allowed(importer, imported) is allowed


def test_every_module_imports_only_downwards() -> None:
    wrong = [
        f"{file.relative_to(PACKAGE)}:{line} imports {name}"
        for importer, file in sorted(MODULES.items())
        for line, name in imports(file)
        if name.partition(".")[0] == "raytide" and not is_allowed(importer, name)
    ]
    assert wrong == []


def test_what_is_private_in_ray_is_used_in_one_place() -> None:
    allowed = {"raytide.core.ray_internals", "raytide.actors.serving.ray_serve.policy"}
    private = re.compile(r"ray\.(\w+\.)*_|ray\.core\.generated|ray\.experimental|\b_raylet\b|\b_private\b")
    wrong = [
        f"{file.relative_to(PACKAGE)}:{number} {line.strip()}"
        for module, file in sorted(MODULES.items())
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if module not in allowed and private.search(line)
    ]
    assert wrong == []


def test_nothing_skips_the_raytide_root() -> None:
    """`from actors.x import y` makes a second module object of the same file, and pickling breaks."""
    folders = ("platform", "tests", "examples", "benchmarks")
    files = [*MODULES.values(), *(file for folder in folders for file in (ROOT / folder).rglob("*.py"))]
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        for line, name in imports(file)
        if name.partition(".")[0] in PRODUCT_FOLDERS
    ]
    assert wrong == []
