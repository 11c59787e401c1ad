"""Counts of groups and rollouts by policy: their table is created with its triggers, and counts what is on record."""

from __future__ import annotations

revision = "0105"
down_revision = "0104"


def upgrade() -> None:
    """Declares the table, also where nobody uses the ledger; `rolltap.calllog.versions` then creates it."""
    import rolltap.ledger.schema  # noqa: F401
