"""The triggers that keep `policy_counts`: every statement that changes a group, a rollout or the queue adds what it
changes.

So proxies of an older schema, which know nothing of the table, keep the counts, too. A change is a row of its own:
a count that is updated in place would be locked by each writer until its transaction ends.
`rolltap.ledger.counts` adds the rows up.

A group is counted by its policy. A rollout is counted by the policies of its group and of those that share it; they are
inserted before their rollouts. A queued task is counted by its submission's policy: on Postgres when the transaction
that submits it ends, so that a submission is one change. Rows that are deleted stay counted. The texts below are stored
in the database: a change needs a migration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from rolltap.contract.admin import LATE, NOTHING_SAMPLED
from rolltap.types import GroupStatus

NOTHING_TO_TRAIN = "nothing to train: no reply in it carries loss"
"""The reason of a group that was dropped for that."""

COUNTED_BY = {
    "groups": ("status", "reason", "zero_variance", "oldest_version", "newest_version"),
    "rollouts": ("status", "reason", "finished_at"),
}
"""The columns on which the counts depend."""


_OF_GROUPS = {
    "groups": ("{row}.status", "true"),
    "ready": (
        "{row}.oldest_version || ' ' || {row}.newest_version",
        f"{{row}}.status = '{GroupStatus.COMPLETE}' AND {{row}}.oldest_version >= 0",
    ),
    "zero_variance": ("''", "{row}.zero_variance"),
    "untrained": ("''", f"{{row}}.status = '{GroupStatus.DROPPED}' AND {{row}}.reason = '{NOTHING_TO_TRAIN}'"),
}
"""The kinds of counts of groups: the state that a `row` counts in, and whether it does."""

_UNANSWERED = (NOTHING_SAMPLED, f"{LATE}; {NOTHING_SAMPLED}")
_SAYS_UNANSWERED = " OR ".join(f"substr({{row}}.reason, 1, {len(text)}) = '{text}'" for text in _UNANSWERED)
_PLAYED_WITHOUT = "SELECT 1 FROM rollout_policies p WHERE p.rollout_id = {row}.id AND p.policy = g.policy"
_OF_ROLLOUTS = {
    "rollouts": ("{row}.status", "true"),
    "unanswered": (
        "''",
        f"{{row}}.finished_at IS NOT NULL AND ({_SAYS_UNANSWERED} OR EXISTS ({_PLAYED_WITHOUT} AND NOT p.sampled))",
    ),
}
"""The same of rollouts, for each group `g` that has them."""

QUEUED = "queued"
"""The kind of the count of tasks that have no group yet, but those of cancelled submissions."""

_OPENED = "(OLD.group_id IS NULL) <> (NEW.group_id IS NULL)"
_CANCELLED = "OLD.cancelled_at IS NULL AND NEW.cancelled_at IS NOT NULL"


def keep_counts(connection: sa.Connection) -> None:
    """Creates the triggers, which lock the tables, and counts what is there already."""
    is_sqlite = connection.dialect.name == "sqlite"
    for statement in (_sqlite_triggers if is_sqlite else _postgres_triggers)():
        connection.exec_driver_sql(statement)
    joined = "FROM groups g JOIN rollouts r ON r.group_id = coalesce(g.shares, g.id)"
    joined += "" if is_sqlite else " AND r.tenant = g.tenant"
    so_far = [*_changes(_OF_GROUPS, "g", "FROM groups g WHERE", is_sqlite=is_sqlite)]
    so_far += _changes(_OF_ROLLOUTS, "r", f"{joined} WHERE", is_sqlite=is_sqlite)
    same = "" if is_sqlite else "s.tenant = q.tenant AND "
    waiting = f"FROM submissions s JOIN submitted q ON {same}s.id = q.submission_id"
    so_far.append(_queued("1", f"{waiting} WHERE q.group_id IS NULL AND s.cancelled_at IS NULL", is_sqlite=is_sqlite))
    connection.exec_driver_sql(_insert(so_far, is_sqlite=is_sqlite))


def _sqlite_triggers() -> list[str]:
    statements = []
    for table in COUNTED_BY:
        changed = " OR ".join(f"OLD.{column} IS NOT NEW.{column}" for column in COUNTED_BY[table])
        inserted, updated = (_insert(changes, is_sqlite=True) for changes in _row_changes(table, is_sqlite=True))
        statements += [
            f"CREATE TRIGGER {table}_counted_first AFTER INSERT ON {table} BEGIN {inserted}; END",
            f"CREATE TRIGGER {table}_counted AFTER UPDATE ON {table} WHEN {changed} BEGIN {updated}; END",
        ]
    played = _insert([_ended_without(is_sqlite=True)], is_sqlite=True)
    submitted, opened, cancelled = _queue_changes(is_sqlite=True)
    return [
        *statements,
        "CREATE TRIGGER submitted_counted_first AFTER INSERT ON submitted WHEN NEW.group_id IS NULL "
        f"BEGIN {submitted}; END",
        f"CREATE TRIGGER submitted_counted AFTER UPDATE ON submitted WHEN {_OPENED} BEGIN {opened}; END",
        f"CREATE TRIGGER submissions_counted AFTER UPDATE ON submissions WHEN {_CANCELLED} BEGIN {cancelled}; END",
        "CREATE TRIGGER rollout_policies_counted AFTER INSERT ON rollout_policies WHEN NOT NEW.sampled "
        f"BEGIN {played}; END",
    ]


def _postgres_triggers() -> list[str]:
    statements = []
    for table in COUNTED_BY:
        changed = " OR ".join(f"OLD.{column} IS DISTINCT FROM NEW.{column}" for column in COUNTED_BY[table])
        inserted, updated = (_insert(changes, is_sqlite=False) for changes in _row_changes(table, is_sqlite=False))
        statements += [
            *_trigger(f"{table}_counted_first", f"INSERT ON {table} FOR EACH ROW", inserted),
            *_trigger(f"{table}_counted", f"UPDATE ON {table} FOR EACH ROW WHEN ({changed})", updated),
        ]
    played = _insert([_ended_without(is_sqlite=False)], is_sqlite=False)
    when = "INSERT ON rollout_policies FOR EACH ROW WHEN (NOT NEW.sampled)"
    submitted, opened, cancelled = _queue_changes(is_sqlite=False)
    at_the_end = "INSERT ON submissions DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
    return [
        *statements,
        *_trigger("rollout_policies_counted", when, played),
        *_trigger("submissions_counted_first", at_the_end, submitted, kind="CONSTRAINT TRIGGER"),
        *_trigger("submitted_counted", f"UPDATE ON submitted FOR EACH ROW WHEN ({_OPENED})", opened),
        *_trigger("submissions_counted", f"UPDATE ON submissions FOR EACH ROW WHEN ({_CANCELLED})", cancelled),
    ]


def _trigger(name: str, when: str, statement: str, kind: str = "TRIGGER") -> list[str]:
    body = f"$$ BEGIN {statement}; RETURN NULL; END $$"
    return [
        f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS {body}",
        f"CREATE {kind} {name} AFTER {when} EXECUTE FUNCTION {name}()",
    ]


def _row_changes(table: str, *, is_sqlite: bool) -> tuple[list[str], list[str]]:
    """What an inserted row of `table` adds, and an updated one."""

    def of(row: str, n: int) -> list[str]:
        if table == "groups":
            return _changes(_OF_GROUPS, row, "WHERE", n, is_sqlite=is_sqlite)
        having = f"FROM groups g WHERE (g.id = {row}.group_id OR g.shares = {row}.group_id)"
        having += "" if is_sqlite else f" AND g.tenant = {row}.tenant"
        return _changes(_OF_ROLLOUTS, row, f"{having} AND", n, is_sqlite=is_sqlite)

    return of("NEW", 1), [*of("OLD", -1), *of("NEW", 1)]


def _queue_changes(*, is_sqlite: bool) -> tuple[str, str, str]:
    """What submitted tasks add (on SQLite one task, else all of a submission), a task that gets its group, and a
    submission that is cancelled."""
    tenant = "" if is_sqlite else " AND s.tenant = NEW.tenant"
    same = "" if is_sqlite else " AND q.tenant = NEW.tenant"
    own = f"FROM submissions s WHERE s.id = NEW.submission_id{tenant} AND s.cancelled_at IS NULL"
    whole = f"FROM submissions s WHERE s.id = NEW.id{tenant}"
    left = f"(SELECT count(*) FROM submitted q WHERE q.submission_id = NEW.id{same} AND q.group_id IS NULL)"
    submitted = _queued("1", own, is_sqlite=True) if is_sqlite else _queued(left, whole, is_sqlite=False)
    opened = _queued("CASE WHEN NEW.group_id IS NULL THEN 1 ELSE -1 END", own, is_sqlite=is_sqlite)
    cancelled = _queued(f"-{left}", whole, is_sqlite=is_sqlite)
    first, second, third = (_insert([change], is_sqlite=is_sqlite) for change in (submitted, opened, cancelled))
    return first, second, third


def _queued(n: str, source: str, *, is_sqlite: bool) -> str:
    """A query for a change of the queue by `n`, of the submission `s` of `source`."""
    tenant = "" if is_sqlite else "s.tenant, "
    return f"SELECT {tenant}s.policy AS policy, '{QUEUED}' AS kind, '' AS state, {n} AS n {source}"


def _ended_without(*, is_sqlite: bool) -> str:
    """What a row of `rollout_policies` adds in which the policy sampled nothing, unless its rollout says so itself."""
    says = _SAYS_UNANSWERED.format(row="r")
    tenant = "" if is_sqlite else "NEW.tenant, "
    ended = f"r.id = NEW.rollout_id AND r.finished_at IS NOT NULL AND NOT ({says})"
    return (
        f"SELECT {tenant}NEW.policy AS policy, 'unanswered' AS kind, '' AS state, 1 AS n FROM rollouts r WHERE {ended}"
    )


def _changes(kinds: Mapping[str, tuple[str, str]], row: str, source: str, n: int = 1, *, is_sqlite: bool) -> list[str]:
    """A query for each of `kinds`: `n` for the `row` if it counts. `source` ends where a condition is added."""
    group = "g" if kinds is _OF_ROLLOUTS else row
    tenant = "" if is_sqlite else f"{group}.tenant, "
    return [
        f"SELECT {tenant}{group}.policy AS policy, '{kind}' AS kind, {state.format(row=row)} AS state, {n} AS n "
        f"{source} ({condition.format(row=row)})"
        for kind, (state, condition) in kinds.items()
    ]


def _insert(changes: Sequence[str], *, is_sqlite: bool) -> str:
    """Adds the sums of `changes`, but those of 0."""
    columns = "policy, kind, state" if is_sqlite else "tenant, policy, kind, state"
    return (
        f"INSERT INTO policy_counts ({columns}, n) SELECT {columns}, sum(n) FROM ({' UNION ALL '.join(changes)}) c "
        f"GROUP BY {columns} HAVING sum(n) <> 0"
    )
