"""The comparison with the harness's own log stands on the session."""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.execute("ALTER TABLE sessions ADD COLUMN log_check TEXT")
