"""Pages of rows that are bounded in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import sqlalchemy as sa

from raytide.core.bounds import MOST_PAGE_BYTES


def paged(
    c: sa.Connection,
    query: sa.Select[Any],
    column: sa.ColumnElement[Any],
    limit: int,
    most_bytes: int = MOST_PAGE_BYTES,
) -> Sequence[sa.Row[Any]]:
    """Returns the first `limit` rows; fewer if the texts in `column` exceed `most_bytes` in total, but never none."""
    sizes = c.execute(query.with_only_columns(sa.func.length(sa.cast(column, sa.Text))).limit(limit)).scalars()
    within = sum(total <= most_bytes for total in accumulate(sizes))
    return c.execute(query.limit(min(limit, max(1, within)))).all()
