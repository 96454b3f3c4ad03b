"""The records of tenancy in an empty store of each kind."""

from __future__ import annotations

import pytest

from raytide.core.state import Store
from raytide.core.state.tenancy.records import TenancyRecords


@pytest.fixture
def tenancy(store: Store) -> TenancyRecords:
    return store.tenancy
