"""Reads all groups of the ledger with their tasks, the oldest first, for datasets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import sqlalchemy as sa

from rolltap.calllog.database import Database
from rolltap.ledger.rows import load_groups, load_tasks
from rolltap.ledger.schema import groups
from rolltap.ledger.unit_of_work import Tx
from rolltap.types import Group, Task

PAGE = 100


async def all_groups(database: Database) -> AsyncIterator[tuple[Group, Task]]:
    """Every group with its rollouts, rewards and task, streamed; none if the ledger has no tables yet."""
    after = ""
    while page := await database.query(lambda connection, after=after: _page(connection, after)):
        for group_and_task in page:
            yield group_and_task
        after = page[-1][0].id


def _page(connection: sa.Connection, after: str) -> list[tuple[Group, Task]]:
    if not sa.inspect(connection).has_table(groups.name):
        return []
    tx = Tx(connection, 0.0)
    query = sa.select(groups.c.id).where(groups.c.id > after).order_by(groups.c.id).limit(PAGE)
    ids = [row.id for row in tx.all(query)]
    tasks = load_tasks(tx, ids)
    groups_by_id = {group.id: group for group in load_groups(tx, ids)}
    return [(groups_by_id[group_id], tasks[group_id]) for group_id in ids]
