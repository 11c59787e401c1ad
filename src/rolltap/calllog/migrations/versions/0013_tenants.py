"""Keys have a tenant; on Postgres row-level security keeps tenants apart. What is on record is the default tenant's."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from rolltap.calllog.schema import separate

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    connection = op.get_bind()
    if sa.inspect(connection).has_table("keys"):
        op.execute("ALTER TABLE keys ADD COLUMN tenant VARCHAR NOT NULL DEFAULT 'default'")
    if connection.dialect.name == "postgresql":
        on_record = sa.MetaData()
        on_record.reflect(connection)
        separate(connection, [table for table in on_record.sorted_tables if table.name != "alembic_version"])
