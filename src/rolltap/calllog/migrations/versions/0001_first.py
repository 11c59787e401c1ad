"""The tables before versions were kept. Nothing to do: new databases are made as declared, at the last version.

`tests/unit/calllog/schema_1.*.sql` are such databases.
"""

from __future__ import annotations

revision = "0001"
down_revision = None


def upgrade() -> None: ...
