"""Columns of the tables, for `tables` and for the migrations, which are frozen: what these return never changes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Integer
from sqlalchemy.types import TypeEngine

Row = BigInteger().with_variant(Integer, "sqlite")
"""SQLite assigns row numbers only if the key is an INTEGER."""


def columns(kind: type[TypeEngine[Any]], *names: str, nullable: bool = False) -> list[Column[Any]]:
    """Returns columns of one type."""
    return [Column(name, kind, nullable=nullable) for name in names]
