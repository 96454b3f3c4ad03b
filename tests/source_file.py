"""The imports, classes and docstrings of a Python file. Each file is parsed once in a process."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SourceFile:
    imports: tuple[tuple[int, str, tuple[str, ...]], ...]
    """The line, the module and the names of each import anywhere in the file; `import a.b` has no names."""
    classes: tuple[tuple[str, frozenset[str]], ...]
    """The name of each class of the module, and those of its bases."""
    docstrings: tuple[tuple[int, str], ...]
    """The line and the text of each docstring of a module, class, function or attribute."""


def read(file: Path) -> SourceFile:
    return _read(file.resolve())


@functools.cache
def _read(file: Path) -> SourceFile:
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    imports: list[tuple[int, str, tuple[str, ...]]] = []
    docstrings: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += ((node.lineno, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            imports.append((node.lineno, node.module or "", tuple(alias.name for alias in node.names)))
        docstrings += _strings_alone(node)
    classes = tuple((node.name, _bases(node)) for node in tree.body if isinstance(node, ast.ClassDef))
    return SourceFile(tuple(imports), classes, tuple(docstrings))


def _strings_alone(node: ast.AST) -> list[tuple[int, str]]:
    body = getattr(node, "body", None)
    alone = [each.value for each in body if isinstance(each, ast.Expr)] if isinstance(body, list) else []
    return [
        (each.lineno, each.value) for each in alone if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]


def _bases(node: ast.ClassDef) -> frozenset[str]:
    return frozenset(base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases)
