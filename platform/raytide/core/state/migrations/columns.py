"""Functions that return columns, for the module `tables` and for the migrations. Migrations are frozen, so the results
of these functions never change."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Integer
from sqlalchemy.types import TypeEngine

Row = BigInteger().with_variant(Integer, "sqlite")
"""The type of row numbers. SQLite assigns them only if the key is an INTEGER."""


def columns(kind: type[TypeEngine[Any]], *names: str, nullable: bool = False) -> list[Column[Any]]:
    """Returns one column for each of these names. All have the same type."""
    return [Column(name, kind, nullable=nullable) for name in names]
