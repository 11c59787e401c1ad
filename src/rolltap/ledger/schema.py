"""The ledger's tables, on the same MetaData as the call log's.

Times are seconds since the epoch by the database's clock. Rows of groups and rollouts hold the current state. The
database keeps `rewards`, `pruned_groups` and `audit` append-only, but for rewards of pruned groups; the code does so
for `attempts` and `events`. `leases.token` is the fencing token: an autoincrement key, so a later lease always has a
greater one. On Postgres every table also has a column `tenant` (`rolltap.calllog.schema`).

Triggers keep `policy_counts`: every statement that changes a group, a rollout or the queue adds what it changes. So
proxies of an older schema, which know nothing of the table, keep the counts, too. A change is a row of its own: a count
that is updated in place would be locked by each writer until its transaction ends. `rolltap.ledger.counts` adds the
rows up. A group is counted by its policy. A rollout is counted by the policies of its group and of those that share it;
they are inserted before their rollouts. A queued task is counted by its submission's policy: on Postgres when the
transaction that submits it ends, so that a submission is one change. Rows that are deleted stay counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    event,
    func,
)

from rolltap.calllog.schema import append_only, guards, metadata
from rolltap.contract.admin import LATE, NOTHING_SAMPLED
from rolltap.tenants import DEFAULT_TENANT
from rolltap.types import GroupStatus

Serial = BigInteger().with_variant(Integer, "sqlite")

policies = Table(
    "policies",
    metadata,
    Column("name", String, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("tokenizer_hash", String, nullable=False),
    Column("given", Integer, nullable=False),  # the highest version that engines were asked to load
    Column("paused", String),  # mode of the running weight update
    Column("folder", String),  # of the weights of `version`, as engines load it; None: they were sent without one
    Column("adapter", String),  # its name there, if the folder is an adapter
    Column("owner", String),  # the trainer that owns it; None: no trainer yet
    Column("owned_since", Double),
    Column("created_at", Double, nullable=False),
)

version_digests = Table(
    "version_digests",
    metadata,
    Column("policy", ForeignKey("policies.name"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("digest", String, nullable=False),  # of the weights that were assigned this version
)

abandoned = Table(
    "abandoned",
    metadata,
    Column("policy", ForeignKey("policies.name"), primary_key=True),
    Column("first", Integer, nullable=False),  # first and last of the versions that a rewind abandoned
    Column("last", Integer, primary_key=True),
)

controls = Table(
    "controls",  # of rollouts to come; a column that is None is not set
    metadata,
    Column("policy", ForeignKey("policies.name"), primary_key=True),
    Column("max_turns", Integer),
    Column("temperature", Double),
    Column("n", Integer),
    Column("priority", Integer),
    Column("curriculum", JSON(none_as_null=True)),
    Column("run", String),  # of the trainer that set it; None: it was set on the admin plane
    Column("rules", JSON(none_as_null=True)),
)

tasks = Table(
    "tasks",
    metadata,
    Column("digest", String, primary_key=True),
    Column("id", String, nullable=False, index=True),
    Column("instruction", Text, nullable=False),
    Column("spec", JSON, nullable=False),
    Column("tags", JSON, nullable=False),
)

submissions = Table(
    "submissions",
    metadata,
    Column("id", String, primary_key=True),
    Column("digest", String, nullable=False),
    Column("policy", ForeignKey("policies.name"), nullable=False),
    Column("roles", JSON(none_as_null=True)),  # role to policy; None: only one policy
    Column("also", JSON(none_as_null=True)),  # the other policies that are trained; None: there are none
    Column("n", Integer, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("tags", JSON, nullable=False),
    Column("rule", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("cancelled_at", Double),
)

submitted = Table(
    "submitted",
    metadata,
    Column("submission_id", ForeignKey("submissions.id"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("task_digest", ForeignKey("tasks.digest"), nullable=False),
    Column("group_id", String),  # None while it is queued
    Index("submitted_queue", "group_id", "submission_id"),
)
_still_queued = submitted.c.group_id.is_(None)
Index(
    "submitted_head",
    submitted.c.submission_id,
    submitted.c.position,
    sqlite_where=_still_queued,
    postgresql_where=_still_queued,
)

partial_submissions = Table(
    "partial_submissions",  # submissions of which parts are still to come
    metadata,
    Column("id", String, primary_key=True),
    Column("digest", String, nullable=False),  # of all but the tasks
    Column("task_digests", JSON, nullable=False),  # in their order; None: still to come
    Column("at", Double, nullable=False),  # when the last part came
)

groups = Table(
    "groups",
    metadata,
    Column("id", String, primary_key=True),
    Column("task_id", String, nullable=False, index=True),
    Column("task_digest", ForeignKey("tasks.digest"), nullable=False),
    Column("policy", ForeignKey("policies.name"), nullable=False),
    Column("roles", JSON(none_as_null=True)),  # role to policy; None: only one policy
    Column("n", Integer, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("tags", JSON, nullable=False),
    Column("rule", JSON, nullable=False),
    Column("status", String, nullable=False),
    Column("reason", Text, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("deadline_at", Double),
    Column("completed_at", Double),
    Column("oldest_version", Integer),
    Column("newest_version", Integer),
    Column("zero_variance", Boolean),
    Column("reward_mean", Double),
    Column("replaces", String),
    Column("shares", String, index=True),  # the group whose rollouts it has; None: its own
    Column("submission_id", ForeignKey("submissions.id"), index=True),
    Column("generation", Integer, nullable=False),
    Column("lease_token", Serial),
    Column("acked_by", String),
    Column("acked_step", BigInteger),
    Column("acked_at", Double),
    Index("groups_ready", "policy", "status", "priority", "completed_at"),
    Index("groups_by_status", "status", "deadline_at"),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", String, primary_key=True),
    Column("group_id", ForeignKey("groups.id"), nullable=False),
    Column("position", Integer, nullable=False),
    Column("status", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("session_id", String),
    Column("scoring", String, nullable=False),
    Column("reason", Text, nullable=False),
    Column("cause", String),  # of a failure or a time-out
    Column("oldest_version", Integer),
    Column("newest_version", Integer),
    Column("trained_calls", JSON, nullable=False),
    Column("infra_failures", Integer, nullable=False),
    Column("finished_at", Double),
    Column("node", String),
    Column("node_token", String),
    Column("node_expires_at", Double),
    Column("node_key", String),  # id of the key that claimed the rollout
    Column("reward_head", String),  # hash of its last reward
    Column("tampering", JSON(none_as_null=True)),  # acts of its last session by kind, counted at its end
    Column("parent", JSON(none_as_null=True)),  # of a fork: rollout_id, call_id, at
    Index("rollouts_by_group", "group_id", "position", unique=True),
    Index("rollouts_by_status", "status", "node_expires_at"),
    Index("rollouts_by_claim", "node_expires_at"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("rollout_id", ForeignKey("rollouts.id"), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("session_id", String, nullable=False),
    Column("runner", String, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("key_id", String, index=True),  # the key that started it
)

rollout_policies = Table(
    "rollout_policies",  # of ended rollouts that train several policies: what each of them sampled
    metadata,
    Column("rollout_id", ForeignKey("rollouts.id"), primary_key=True),
    Column("policy", ForeignKey("policies.name"), primary_key=True),
    Column("oldest_version", Integer, nullable=False),
    Column("newest_version", Integer, nullable=False),
    Column("sampled", Boolean, nullable=False),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("rollout_id", ForeignKey("rollouts.id"), primary_key=True),
    Column("seen", LargeBinary, nullable=False),  # packed text that the evaluator of the last attempt saw
)

tampering = Table(
    "tampering",  # acts of tampering that runners and proxies noticed
    metadata,
    Column("seq", Serial, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("session_id", String, nullable=False, index=True),
    Column("kind", String, nullable=False),
    Column("detail", String, nullable=False),
    sqlite_autoincrement=True,
)

rewards = Table(
    "rewards",
    metadata,
    Column("id", String, primary_key=True),
    Column("rollout_id", ForeignKey("rollouts.id"), nullable=False, index=True),
    Column("attempt", Integer, nullable=False),
    Column("value", Double, nullable=False),
    Column("scope", String, nullable=False),
    Column("source", String, nullable=False),
    Column("detail", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("key_id", String, nullable=False),  # the key that appended it
    Column("number", Integer, nullable=False),  # its position among the rollout's rewards, from 0
    Column("hash", String, nullable=False),  # covers this row and the previous hash
)
_OF_PRUNED_GROUP = (
    "EXISTS (SELECT 1 FROM pruned_groups p JOIN rollouts r ON r.group_id = p.group_id WHERE r.id = OLD.rollout_id{})"
)
_UNTIL = {
    "sqlite": _OF_PRUNED_GROUP.format(""),
    "postgresql": _OF_PRUNED_GROUP.format(" AND r.tenant = OLD.tenant AND p.tenant = OLD.tenant"),
}
append_only(rewards, until=_UNTIL)


def reward_guards(dialect: str) -> list[str]:
    """The statements that create the triggers of the rewards."""
    return guards(rewards.name, dialect, until=_UNTIL[dialect])


pruned_groups = Table(
    "pruned_groups",  # that `rolltap log prune` removed, with their rollouts and rewards
    metadata,
    Column("group_id", String, primary_key=True),
    Column("at", Double, nullable=False),
    Column("policy", String, nullable=False),
    Column("status", String, nullable=False),
    Column("acked_by", String),
    Column("acked_step", BigInteger),
    Column("rollouts", Integer, nullable=False),  # of its own
    Column("rewards", Integer, nullable=False),
    Column("digest", String),  # of its rewards; None: it had none of its own
    Index("pruned_groups_by_trainer", "acked_by", "acked_step"),
)
append_only(pruned_groups)

trainers = Table(
    "trainers",
    metadata,
    Column("name", String, primary_key=True),
    Column("step", BigInteger),
    Column("run", String),  # id of its folder of checkpoints; None: it never rewound
    Column("incarnation", Integer, nullable=False),  # number of starts; older incarnations are refused
    Column("started_at", Double),  # of the incarnation
)

demands = Table(
    "demands",
    metadata,
    Column("trainer", ForeignKey("trainers.name"), primary_key=True),
    Column("policy", ForeignKey("policies.name"), primary_key=True),
    Column("batch", Integer, nullable=False),
    Column("max_staleness", Integer),
    Column("seen_at", Double, nullable=False),
)

nodes = Table(
    "nodes",
    metadata,
    Column("name", String, primary_key=True),
    Column("submission_id", String),  # the only one that it runs; None: any
    Column("asked_at", Double, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("token", Serial, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False, unique=True),
    Column("trainer", ForeignKey("trainers.name"), nullable=False),
    Column("policy", ForeignKey("policies.name"), nullable=False),
    Column("replay", Boolean, nullable=False),
    Column("status", String, nullable=False),
    Column("step", BigInteger),
    Column("served", Integer),  # the version that was served when it was acknowledged for a new step
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Index("leases_by_trainer", "trainer", "status"),
    Index("leases_by_expiry", "status", "expires_at"),
    sqlite_autoincrement=True,
)

lease_groups = Table(
    "lease_groups",
    metadata,
    Column("token", ForeignKey("leases.token"), primary_key=True),
    Column("group_id", ForeignKey("groups.id"), primary_key=True),
    Column("position", Integer, nullable=False),
    Index("lease_groups_by_group", "group_id"),
)

keys = Table(
    "keys",  # minted keys; the settings' keys are in no table
    metadata,
    Column("id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("role", String, nullable=False),
    Column("policies", JSON(none_as_null=True)),  # None: all
    Column("minted_by", String, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Column("tenant", String, nullable=False, server_default=DEFAULT_TENANT),
    Column("budget", JSON(none_as_null=True)),  # of a project key; None: no budget
    Column("used_calls", BigInteger, nullable=False, server_default="0"),  # total usage of a project key
    Column("used_tokens", BigInteger, nullable=False, server_default="0"),
    Column("used_bytes", BigInteger, nullable=False, server_default="0"),
)

key_secrets = Table(
    "key_secrets",
    metadata,
    Column("hash", String, primary_key=True),  # SHA-256 of the key as it is sent
    Column("key_id", ForeignKey("keys.id"), nullable=False, index=True),
    Column("expires_at", Double),
)

audit = Table(
    "audit",
    metadata,
    Column("seq", Serial, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("key_id", String, nullable=False, index=True),
    Column("role", String, nullable=False),
    Column("action", String, nullable=False),
    Column("detail", JSON, nullable=False),
    sqlite_autoincrement=True,
)
append_only(audit)

events = Table(
    "events",
    metadata,
    Column("seq", Serial, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False, index=True),
    Column("kind", String, nullable=False),
    Column("subject", String, nullable=False, index=True),
    Column("data", JSON, nullable=False),
    sqlite_autoincrement=True,
)

policy_counts = Table(
    "policy_counts",  # changes of counts; a count is the sum of its rows
    metadata,
    Column("seq", Serial, primary_key=True, autoincrement=True),
    Column("policy", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("state", String, nullable=False),
    Column("n", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)

OWNER = func.coalesce(groups.c.shares, groups.c.id)
"""The id of the group that a group's rollouts belong to: its own, or that of the group whose rollouts it shares."""

for _table in metadata.tables.values():
    for _constraint in _table.foreign_key_constraints:
        _constraint.ddl_if(dialect="sqlite")  # on Postgres `calllog.schema` creates them, with the tenant


@event.listens_for(metadata, "after_create")
def _count_from_now(target: MetaData, connection: Connection, tables: Sequence[Table] = (), **_: Any) -> None:
    if policy_counts in tables:
        keep_counts(connection)


NOTHING_TO_TRAIN = "nothing to train: no reply in it carries loss"
"""The reason of a group that was dropped for that. This and the texts below are stored in the database: a change needs
a migration."""

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
