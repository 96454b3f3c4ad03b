"""Runs alembic on the connection that `Database.upgrade` has opened and locked. The migrations belong to the
transaction of `Database.upgrade`.

Schemas are only upgraded. To go back, restore a copy of the store from before the upgrade.
"""

from __future__ import annotations

from alembic import context

from raytide.core.state.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    render_as_batch=True,  # SQLite alters a table by copying it
)
with context.begin_transaction():
    context.run_migrations()
