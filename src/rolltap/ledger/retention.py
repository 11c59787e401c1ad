"""Which sessions the ledger still needs: consulted before calls are removed (`rolltap.calllog.prune`), which is noted
in the audit log."""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import sqlalchemy as sa

from rolltap.calllog.database import database_clock
from rolltap.calllog.prune import Claim
from rolltap.ledger import audit
from rolltap.ledger.schema import attempts, groups, lease_groups, leases, rollouts
from rolltap.types import GroupStatus

_CLAIMS: Mapping[str, Claim] = {
    GroupStatus.ACKNOWLEDGED: Claim.ACKNOWLEDGED,
    GroupStatus.STALE: Claim.ABANDONED,
    GroupStatus.DEAD: Claim.ABANDONED,
    GroupStatus.DROPPED: Claim.ABANDONED,
}


def claims(connection: sa.Connection, session_ids: Sequence[str]) -> dict[str, tuple[Claim, float | None]]:
    """Of those sessions that belong to a group, its claim and when it was acknowledged.

    The sessions of a rollout's former attempts stand under the same claim as the last one's.
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
    claims_by_session: dict[str, tuple[Claim, float | None]] = {}
    for row in connection.execute(query):
        claim = _CLAIMS.get(row.status, Claim.WAITING)
        if row.leased and claim is not Claim.WAITING:
            claim = Claim.REPLAYED
        claims_by_session[row.session_id] = (claim, row.acked_at)
    return claims_by_session


def note_prune(connection: sa.Connection, older_than: str, exported: Sequence[Path]) -> None:
    """Has the audit log say that this machine's user is about to prune."""
    detail = {"older_than": older_than, "exported": [str(path) for path in exported]}
    audit.append(connection, database_clock(connection), f"user {_user()}", "local", "log prune", detail)


def _user() -> str:
    """The name of this process's user; its number where it has no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # before Python 3.13, and since
        return str(os.getuid())
