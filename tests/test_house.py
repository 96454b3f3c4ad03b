"""The folders show the architecture: small, without circles, and no two things of one name."""

import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tests import source_file
from tests.test_floors import MODULES, PACKAGE, ROOT, imports
from tests.test_layout import LINKED

MOST_ENTRIES = 13
NO_SENTENCE = re.compile(r"\s*(Of|By|What|Who|Whose|Which|Whether|When|Where|Why|How|So)\b")
PRODUCT_FOLDERS = ("actors", "autoscaler", "kernels", "pipelines")


def test_no_folder_of_the_package_holds_more_than_a_newcomer_can_read_at_once() -> None:
    """The links to the product folders, and what only marks or caches a package, are not counted."""
    roots = [PACKAGE, *(PACKAGE / name for name in PRODUCT_FOLDERS), ROOT / "benchmarks"]
    folders = {file.parent for root in roots for file in root.rglob("*.py")}
    too_full = {}
    for folder in folders:
        entries = [each for each in folder.iterdir() if not each.is_symlink() and _is_counted(each)]
        if len(entries) > MOST_ENTRIES:
            too_full[str(folder)] = len(entries)
    assert too_full == {}


def test_folders_do_not_import_each_other_in_a_circle() -> None:
    """Beside subfolders, each module of a folder that has them counts by itself."""
    edges: dict[str, dict[str, str]] = defaultdict(dict)
    for module, file in MODULES.items():
        for line, name in imports(file):
            imported = _module_of(name)
            if imported and (here := _unit(module)) != (there := _unit(imported)):
                edges[here].setdefault(there, f"{file.relative_to(PACKAGE)}:{line} imports {imported}")
    circles = [sorted(circle) for circle in _circles(edges)]
    why = [edges[a][b] for circle in circles for a in circle for b in circle if b in edges[a]]
    assert circles == [], "\n".join(why)


def test_no_two_classes_of_different_packages_share_a_name() -> None:
    """Unless one derives from the other. Names that begin with an underscore stay in their file."""
    found: dict[str, dict[str, frozenset[str]]] = defaultdict(dict)
    for module, file in MODULES.items():
        for name, bases in source_file.read(file).classes:
            if not name.startswith("_"):
                found[name][module] = bases
    twice = {
        name: sorted(classes)
        for name, classes in found.items()
        if len(classes) > 1 and not any(name in bases for bases in classes.values())
    }
    assert twice == {}


def test_docstrings_are_sentences() -> None:
    """One that begins with `Of`, `By` or `Whether` says neither what a function returns nor what a thing is."""
    begun = []
    for folder in ("platform/raytide", *LINKED, "benchmarks", "examples", "tests"):  # rglob passes by the links
        for file in (ROOT / folder).rglob("*.py"):
            for line, text in source_file.read(file).docstrings:
                if NO_SENTENCE.match(text):
                    begun.append(f"{file.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}")
    assert begun == []


def _is_counted(entry: Path) -> bool:
    return entry.name not in {"__pycache__", "py.typed"} and not entry.name.startswith(".")


def _module_of(name: str) -> str:
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def _folder(module: str) -> str:
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


_FOLDERS = {_folder(module) for module in MODULES}


def _unit(module: str) -> str:
    folder = _folder(module)
    return module if any(other.startswith(f"{folder}.") for other in _FOLDERS) else folder


def _circles(edges: Mapping[str, Mapping[str, str]]) -> list[list[str]]:
    """Tarjan's strongly connected components of more than one node."""
    sys.setrecursionlimit(10_000)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges.get(node, {}):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            circle = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(circle) > 1:
                found.append(circle)

    for node in list(edges):
        if node not in index:
            visit(node)
    return found
