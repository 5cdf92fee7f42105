"""Alembic's entry: runs migrations on the connection that `ds4grpc.store.database` hands over."""

from __future__ import annotations

from alembic import context

from ds4grpc.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite alters a table by copying it
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
