"""Alembic's environment: runs within the transaction that `rolltap.calllog.versions` opened."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
