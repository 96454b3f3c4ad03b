"""An object that combines the store's tables for API keys, spending, usage and the audit log. Its method `prune`
deletes old rows of the keys, the usage and the audit log.
"""

from __future__ import annotations

from raytide.core.state.database import Database
from raytide.core.state.tenancy.audit import BATCH, AuditLog
from raytide.core.state.tenancy.keys import KeyRecords
from raytide.core.state.tenancy.spending import SpendingRecords
from raytide.core.state.tenancy.usage import UsageQueries


class TenancyRecords:
    def __init__(self, database: Database) -> None:
        self.keys = KeyRecords(database)
        self.spending = SpendingRecords(database)
        self.usage = UsageQueries(database)
        self.audit = AuditLog(database)

    def prune(self, usage_before_s: float, audit_before_s: float, now_s: float) -> bool:
        """Deletes a batch of old usage rows, a batch of old audit entries, and old ended keys. Returns True if more old
        rows may be left.

        Audit entries are kept at least as long as the usage rows.
        """
        audit_before_s = min(audit_before_s, usage_before_s)
        self.keys.prune(audit_before_s)
        batches = (self.usage.prune(usage_before_s, now_s), self.audit.prune(audit_before_s, now_s))
        return max(batches) == BATCH
