"""Tells `rolltap.calllog.prune` which sessions are still needed, and records a prune in the audit log."""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import sqlalchemy as sa

from rolltap.calllog.database import database_clock
from rolltap.calllog.prune import GroupUse
from rolltap.ledger import audit
from rolltap.ledger.schema import attempts, groups, lease_groups, leases, rollouts
from rolltap.types import GroupStatus

_USES: Mapping[str, GroupUse] = {
    GroupStatus.ACKNOWLEDGED: GroupUse.ACKNOWLEDGED,
    GroupStatus.STALE: GroupUse.ABANDONED,
    GroupStatus.DEAD: GroupUse.ABANDONED,
    GroupStatus.DROPPED: GroupUse.ABANDONED,
}


def group_uses(connection: sa.Connection, session_ids: Sequence[str]) -> dict[str, tuple[GroupUse, float | None]]:
    """The use of the groups of sessions, and when a group was acknowledged. Sessions without a group are left out.

    Sessions of a rollout's earlier attempts have the same use as that of its last attempt.
    """
    if not session_ids or not sa.inspect(connection).has_table(groups.name):
        return {}
    leased_groups = sa.select(lease_groups.c.group_id).join(leases, leases.c.token == lease_groups.c.token)
    replayed = groups.c.id.in_(leased_groups.where(leases.c.status == "open"))
    query = (
        sa.select(attempts.c.session_id, groups.c.status, groups.c.acked_at, replayed.label("leased"))
        .join(rollouts, rollouts.c.id == attempts.c.rollout_id)
        .join(groups, groups.c.id == rollouts.c.group_id)
        .where(attempts.c.session_id.in_(session_ids))
    )
    use_by_session: dict[str, tuple[GroupUse, float | None]] = {}
    for row in connection.execute(query):
        use = _USES.get(row.status, GroupUse.WAITING)
        if row.leased and use is not GroupUse.WAITING:
            use = GroupUse.REPLAYED
        use_by_session[row.session_id] = (use, row.acked_at)
    return use_by_session


def note_prune(connection: sa.Connection, older_than: str, exported: Sequence[Path]) -> None:
    """Records in the audit log that this machine's user is about to prune."""
    detail = {"older_than": older_than, "exported": [str(path) for path in exported]}
    audit.append(connection, database_clock(connection), f"user {_user()}", "local", "log prune", detail)


def _user() -> str:
    """The name of this process's user; its number if it has no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # KeyError before Python 3.13
        return str(os.getuid())
