"""Projects' keys may have budgets, and what they use is counted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    if sa.inspect(op.get_bind()).has_table("keys"):
        op.execute("ALTER TABLE keys ADD COLUMN budget JSON")
        for column in ("used_calls", "used_tokens", "used_bytes"):
            op.execute(f"ALTER TABLE keys ADD COLUMN {column} BIGINT NOT NULL DEFAULT 0")
