"""The part of the store that is about tenancy, as one attribute of it."""

from __future__ import annotations

from raytide.core.state.database import Database
from raytide.core.state.tenancy.audit import AuditLog
from raytide.core.state.tenancy.keys import KeyRecords
from raytide.core.state.tenancy.spending import SpendingRecords
from raytide.core.state.tenancy.usage import UsageQueries


class TenancyRecords:
    def __init__(self, database: Database) -> None:
        self.keys = KeyRecords(database)
        self.spending = SpendingRecords(database)
        self.usage = UsageQueries(database)
        self.audit = AuditLog(database)
