"""Functions that return columns, for `tables` and for the migrations. Migrations are frozen, so these functions never
change their results.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Integer
from sqlalchemy.types import TypeEngine

Row = BigInteger().with_variant(Integer, "sqlite")
"""The type of row numbers. SQLite assigns them only if the key is an INTEGER."""


def columns(kind: type[TypeEngine[Any]], *names: str, nullable: bool = False) -> list[Column[Any]]:
    """Returns columns of one type with these names."""
    return [Column(name, kind, nullable=nullable) for name in names]
