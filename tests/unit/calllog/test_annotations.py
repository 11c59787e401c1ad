"""What a trainer says of its lease's tokens: taken once, whole or not at all, and gone only with the calls."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError

from rolltap.calllog.annotations import NO_SUMS, PolicySums, annotations_of, streams_of, updated_sums
from rolltap.calllog.archive import ArchiveWriter, export_sessions, import_sessions, read_archive
from rolltap.calllog.codec import pack_arrays
from rolltap.calllog.database import Database
from rolltap.calllog.notes import append_note
from rolltap.calllog.prune import Reason, exported_in, plan_pruning, prune
from rolltap.calllog.schema import annotations, notes
from rolltap.calllog.sql import SqlCallLog, open_call_log
from rolltap.contract.admin import NewNote
from rolltap.contract.trainer import MAX_TOKENS, AnnotateLease, CallAnnotation, LeaseRequest, Rewind
from rolltap.errors import InvalidRequest, LeaseLost, LedgerError, RecordCorrupt, StoreError, TrainerFenced
from rolltap.ledger.leases import LeaseKey
from rolltap.ledger.views import group_uses
from rolltap.proxy.front.access import TRAINER_PLANE
from rolltap.types import VersionSpan

from ..ledger.world import World, key
from .facts import a_completion, a_session, an_intent

NAN = float("nan")


@dataclass
class Trained:
    """A group of one rollout whose session has two calls of four sampled tokens, two of version 0 and two of 1."""

    log: SqlCallLog
    world: World
    calls: list[str]
    session: str

    async def lease(self, trainer: str = "trainer", incarnation: int = 0) -> LeaseKey:
        request = LeaseRequest(trainer, "policy", 1, incarnation=incarnation)
        return key(await self.world.ledger.trainers.lease(request), incarnation)

    async def post(self, lease: LeaseKey, *calls: CallAnnotation, version: int = 1) -> list[str]:
        """The calls that were added."""
        body = AnnotateLease(lease.token, version, calls, lease.incarnation)
        return [line.call_id for line in (await self.world.ledger.trainers.annotate(lease, body))[1]]

    async def rows(self) -> int:
        counted = sa.select(sa.func.count()).select_from(annotations)
        return await self.log.database.query(lambda connection: connection.scalar(counted)) or 0


@pytest.fixture
async def trained(sql_log: SqlCallLog) -> Trained:
    world = World(sql_log.database)
    await world.ledger.policies.register("policy", tokenizer_hash="abc")
    group = await world.complete(1)
    session = a_session(id=group.rollouts[0].session_id, expires_at=5.0, tags={"harness": "codex"})
    await sql_log.open_session(session)
    calls = []
    for _ in range(2):
        intent = an_intent(session)
        await sql_log.append_intent(intent)
        sampled = {"output_ids": np.arange(4, dtype=np.int32), "logprobs": np.array([-0.5] * 4, np.float32)}
        spans = (VersionSpan(0, 0, 2), VersionSpan(1, 2, 4))
        await sql_log.append_completion(a_completion(intent.id, versions=spans, **sampled))
        calls.append(intent.id)
    return Trained(sql_log, world, calls, session.id)


async def test_masked_tokens_stay_blank_and_mismatch_tells_fresh_tokens_apart(trained: Trained):
    first, second = trained.calls
    lease = await trained.lease()
    said = CallAnnotation(first, logprobs=[None, -0.9, -0.6, -0.5], clipped=[None, True, False, False])
    assert await trained.post(lease, said, CallAnnotation(second, entropy=[1.0, None, 0.0, 2.5])) == [first, second]
    query = trained.log.database.query
    lines = await query(lambda connection: annotations_of(connection, trained.session))
    line = lines[first]
    assert (line.harness, line.trainer, line.compared, line.fresh) == ("codex", "trainer", 3, 2)
    assert (line.mismatch_sum, line.mismatch_max, line.fresh_sum) == pytest.approx((0.5, 0.4, 0.1), abs=1e-6)
    assert (line.kept, line.clipped) == (2, 1)
    assert (lines[second].compared, lines[second].mismatch) == (0, None)
    streams = await query(lambda connection: streams_of(connection, first))
    assert streams is not None
    assert np.isnan(streams.logprobs).tolist() == [True, False, False, False], "masked is blank, not zero"
    assert streams.clipped.tolist() == [-1, 1, 0, 0]
    by_harness = (await query(lambda connection: updated_sums(connection, "policy"))).by_harness
    assert {name: (sums.calls, sums.compared) for name, sums in by_harness.items()} == {"codex": (2, 3)}


async def test_the_same_again_changes_nothing_and_other_values_are_refused(trained: Trained):
    first, second = trained.calls
    lease = await trained.lease()
    said = CallAnnotation(first, logprobs=[-0.1] * 4)
    assert await trained.post(lease, said) == [first]
    await trained.world.ledger.trainers.acknowledge(lease, 1)
    assert await trained.post(lease, said) == [], "a retry, even after the acknowledgement"
    other = CallAnnotation(second, logprobs=[-0.2] * 4)
    with pytest.raises(LedgerError, match="other values"):
        await trained.post(lease, other, msgspec.structs.replace(said, logprobs=[-0.3] * 4))
    assert await trained.rows() == 1, "all or nothing"
    assert await trained.post(lease, said, other) == [second]


async def test_after_a_crash_the_new_lease_counts_and_the_old_process_is_fenced(trained: Trained):
    (first, _), trainers = trained.calls, trained.world.ledger.trainers
    restored = Rewind(0, {"policy": 0}, run="run")
    one = (await trainers.rewind("trainer", restored)).incarnation
    lease = await trained.lease(incarnation=one)
    await trainers.acknowledge(lease, 1)
    await trained.post(lease, CallAnnotation(first, logprobs=[-5.0] * 4), version=0)
    two = (await trainers.rewind("trainer", restored)).incarnation
    with pytest.raises(TrainerFenced):
        await trained.post(lease, CallAnnotation(trained.calls[1], logprobs=[-5.0] * 4))
    with pytest.raises(LeaseLost, match="rewound"):
        await trained.post(replace(lease, incarnation=two), CallAnnotation(first, logprobs=[-5.0] * 4))
    again = await trained.lease(incarnation=two)
    assert await trained.post(again, CallAnnotation(first, logprobs=[-0.5] * 4), version=0) == [first]
    assert await trained.rows() == 2, "what was said stays"
    known = await trained.log.database.query(lambda connection: updated_sums(connection, "policy"))
    (sums,) = known.by_group.values()
    assert (sums.calls, sums.compared, sums.mismatch_sum) == (1, 4, 0.0), "and counts once"


async def test_what_is_not_the_leases_is_refused_and_nothing_is_kept(trained: Trained):
    first, second = trained.calls
    lease = await trained.lease()
    good = CallAnnotation(second, logprobs=[-1.0] * 4)
    stranger = an_intent(a_session(id="other"))
    await trained.log.open_session(a_session(id="other"))
    await trained.log.append_intent(stranger)
    await trained.log.append_completion(a_completion(stranger.id))
    for bad, says in (
        (CallAnnotation(first, logprobs=[-1.0] * 3), "has 4 sampled tokens, its annotation 3"),
        (CallAnnotation("nobody", logprobs=[-1.0]), "call nobody is not of lease"),
        (CallAnnotation(stranger.id, logprobs=[-1.0] * 2), f"call {stranger.id} is not of lease"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            await trained.post(lease, good, bad)
    with pytest.raises(LeaseLost, match="fencing token"):
        await trained.post(replace(lease, token=lease.token + 1), good)
    trained.world.clock.ahead += 700
    with pytest.raises(LeaseLost, match="expired"):
        await trained.post(lease, good)
    assert await trained.rows() == 0


@pytest.mark.parametrize(
    ("streams", "says"),
    [
        ({"logprobs": [-1.0, NAN]}, "not a finite number"),
        ({"entropy": [float("inf")]}, "not a finite number"),
        ({"logprobs": [-1e300]}, "float32"),
        ({"logprobs": [0.5]}, "at most 0"),
        ({"entropy": [-0.5]}, "at least 0"),
        ({"logprobs": [-1.0, -1.0], "clipped": [False]}, "different lengths"),
        ({}, "no values"),
    ],
)
def test_values_that_can_not_be_are_refused(streams: dict[str, list[float]], says: str):
    with pytest.raises(InvalidRequest, match=says):
        CallAnnotation("c", **streams)  # type: ignore[arg-type]


def test_a_request_is_bounded():
    half = CallAnnotation("a", logprobs=[-1.0] * (MAX_TOKENS // 2 + 1))
    with pytest.raises(InvalidRequest, match="split it"):
        AnnotateLease(1, 0, (half, msgspec.structs.replace(half, call_id="b")))
    with pytest.raises(InvalidRequest, match="twice"):
        AnnotateLease(1, 0, (CallAnnotation("a", logprobs=[-1.0]), CallAnnotation("a", logprobs=[-1.0])))


async def test_rows_can_not_be_changed_and_go_with_their_calls(trained: Trained):
    lease = await trained.lease()
    await trained.post(lease, CallAnnotation(trained.calls[0], logprobs=[-1.0] * 4))
    for change in (sa.update(annotations).values(harness="x"), sa.delete(annotations)):
        with pytest.raises((DBAPIError, StoreError), match="append-only"):
            await trained.log.database.transact(lambda connection, change=change: connection.execute(change))
    await trained.world.ledger.trainers.acknowledge(lease, 1)
    done = await prune(trained.log.database, before=time.time() + 60, exported={}, uses=group_uses)
    assert (done.sessions, await trained.rows()) == (1, 0)


async def test_an_archive_holds_annotations_and_notes_both_ways(trained: Trained, tmp_path: Path):
    first, second = trained.calls
    lease = await trained.lease()
    await trained.post(
        lease, CallAnnotation(first, logprobs=[None, -0.9, -0.6, -0.5], clipped=[None, True, False, False])
    )
    database = trained.log.database
    await append_note(database, NewNote("label", "good", None, call_id=first))
    early = tmp_path / "early.rtlog"
    await export_sessions(database, early)
    await trained.post(lease, CallAnnotation(second, entropy=[1.0, None, 0.0, 2.5]))
    await append_note(database, NewNote("score", "style", 0.5, session_id=trained.session))
    late = tmp_path / "late.rtlog"
    await export_sessions(database, late)
    before = await contents(database)
    assert len(before["annotations"]) == len(before["notes"]) == 2
    copy = open_call_log(f"sqlite:///{tmp_path}/copy.db")
    await copy.start()
    try:
        assert (await import_sessions(copy.database, early)).new == 1
        assert (await import_sessions(copy.database, late, own=True)).new == 1, "what was said since comes along"
        assert (await import_sessions(copy.database, late)).new == 0
        assert await contents(copy.database) == before
        again = tmp_path / "again.rtlog"
        await export_sessions(copy.database, again)
        assert (await import_sessions(database, again)).new == 0, "and nothing is new on the way back"
        streams = await copy.database.query(lambda connection: streams_of(connection, first))
        assert streams is not None
        assert streams.clipped.tolist() == [-1, 1, 0, 0]
    finally:
        await copy.close()


async def contents(database: Database) -> dict[str, list[tuple[object, ...]]]:
    def read(connection: sa.Connection) -> dict[str, list[tuple[object, ...]]]:
        return {table.name: sorted(map(tuple, connection.execute(sa.select(table)))) for table in (annotations, notes)}

    return await database.query(read)


async def test_an_archive_that_lacks_an_annotation_lets_nothing_be_pruned(trained: Trained, tmp_path: Path):
    first, second = trained.calls
    lease = await trained.lease()
    await trained.post(lease, CallAnnotation(first, logprobs=[-0.1] * 4))
    await export_sessions(trained.log.database, tmp_path / "early.rtlog")
    await trained.post(lease, CallAnnotation(second, logprobs=[-0.1] * 4))
    await export_sessions(trained.log.database, tmp_path / "late.rtlog")

    async def reasons(name: str) -> list[Reason]:
        exported = exported_in([tmp_path / name])
        verdicts = await plan_pruning(trained.log.database, before=100.0, exported=exported, uses=lambda *_: {})
        return [verdict.reason for verdict in verdicts]

    assert await reasons("early.rtlog") == [Reason.CHANGED]
    assert await reasons("late.rtlog") == [Reason.EXPORTED]


async def test_annotations_of_other_calls_or_with_other_values_are_refused(trained: Trained, tmp_path: Path):
    first, _ = trained.calls
    await trained.post(await trained.lease(), CallAnnotation(first, logprobs=[-0.1] * 4))
    database = trained.log.database
    await export_sessions(database, tmp_path / "good.rtlog")
    before = await contents(database)
    streams = list(annotations.c.keys()).index("streams")
    other = pack_arrays({"logprobs": np.full(4, -0.2, np.float32)})
    for column, value, reason in ((0, "another call", "another call"), (streams, other, "with other values")):
        (block,) = read_archive(tmp_path / "good.rtlog")
        block.annotations[0][column] = value
        path = tmp_path / f"bad{column}.rtlog"
        with ArchiveWriter(path) as archive:
            archive.add(block)
        with pytest.raises(RecordCorrupt, match=reason):
            await import_sessions(database, path)
    assert await contents(database) == before


async def test_sums_that_are_kept_follow_the_record(trained: Trained):
    first, second = trained.calls
    database = trained.log.database

    async def looked(known: PolicySums) -> PolicySums:
        """As a reader that kept `known` has them: the same as one that never looked before."""
        sums = await database.query(lambda connection: updated_sums(connection, "policy", known))
        assert sums == await database.query(lambda connection: updated_sums(connection, "policy"))
        return sums

    known = await looked(NO_SUMS)
    assert known == NO_SUMS
    one = await trained.lease()
    await trained.post(one, CallAnnotation(first, logprobs=[-0.9] * 4))
    known = await looked(known)
    assert [sums.mismatch_sum for sums in known.by_group.values()] == [pytest.approx(1.6)]
    await trained.post(one, CallAnnotation(second, logprobs=[-0.6] * 4))
    known = await looked(known)
    assert [sums.calls for sums in known.by_group.values()] == [2]
    await trained.world.ledger.trainers.release(one)
    two = await trained.lease()
    await trained.post(two, CallAnnotation(first, logprobs=[-0.5] * 4))
    known = await looked(known)
    (harness,) = known.by_harness.values()
    assert (harness.calls, harness.mismatch_sum, harness.mismatch_max) == (2, pytest.approx(0.4), pytest.approx(0.1))
    assert await database.query(lambda connection: updated_sums(connection, "another", known)) == NO_SUMS
    await trained.world.ledger.trainers.acknowledge(two, 1)
    await prune(database, before=time.time() + 60, exported={}, uses=group_uses)
    assert await looked(known) == NO_SUMS


async def test_sums_of_many_groups_follow_rows_in_any_order(sql_log: SqlCallLog):
    known = NO_SUMS
    rng = np.random.default_rng(0)
    tokens = [1, 1, 2, 3, 3, 2, 4, 1, 5, 5]
    for number, token in enumerate(tokens):
        rows = [
            {
                **dict.fromkeys(("session_id", "trainer"), "x"),
                **dict.fromkeys(("step", "version", "fresh", "fresh_sum", "kept", "clipped"), 0),
                "call_id": f"{group}-{number % 3}-{number if repeated else ''}",
                "token": token,
                "group_id": f"g{group}",
                "policy": "policy",
                "harness": f"h{group % 2}",
                "created_at": 0.0,
                "compared": 4,
                "mismatch_sum": float(rng.integers(8)),
                "mismatch_max": float(rng.integers(8)),
                "streams": b"",
            }
            for group in rng.choice(6, 2, replace=False)
            for repeated in (False, True)
        ]
        insert = sa.insert(annotations).prefix_with("OR IGNORE", dialect="sqlite")
        if sql_log.database.dialect_name == "postgresql":
            insert = postgresql.insert(annotations).on_conflict_do_nothing()
        await sql_log.database.transact(lambda connection, insert=insert, rows=rows: connection.execute(insert, rows))
        query = sql_log.database.query
        known = await query(lambda connection, known=known: updated_sums(connection, "policy", known))
        assert known == await query(lambda connection: updated_sums(connection, "policy"))
    assert len(known.by_group) > 3
    assert list(known.by_harness) == ["h0", "h1"]


@pytest.mark.parametrize("column", [column.name for column in annotations.columns])
@pytest.mark.parametrize("value", [b"\xff", "nan", 1e999, None])
async def test_a_damaged_annotation_keeps_no_page_from_the_others(tmp_path: Path, column: str, value: object) -> None:
    """SQLite takes any value in any column."""
    log = open_call_log(f"sqlite:///{tmp_path}/a.db")
    await log.start()
    streams = pack_arrays({"logprobs": np.array([-0.5], np.float32)})
    rows = [
        [call, 3, session, group, "policy", "codex", "w", 1, 0, 5.0, 1, 0.5, 0.5, 1, 0.5, 0, 0, streams]
        for call, session, group in (("c1", "s1", "g1"), ("c2", "s1", "g2"))
    ]
    damaged = dict(zip(annotations.c.keys(), rows[1], strict=True)) | {column: value}

    def write(connection: sa.Connection) -> bool:
        connection.execute(sa.insert(annotations).values(rows[0]))
        names = ", ".join(damaged)
        places = ", ".join("?" for _ in damaged)
        sql = f"INSERT OR IGNORE INTO annotations ({names}) VALUES ({places})"
        return connection.exec_driver_sql(sql, tuple(damaged.values())).rowcount > 0

    await log.database.transact(write)
    sums = await log.database.query(lambda connection: updated_sums(connection, "policy"))
    lines = await log.database.query(lambda connection: annotations_of(connection, "s1"))
    again = await log.database.query(lambda connection: updated_sums(connection, "policy", sums))
    await log.close()
    assert sums.by_group["g1"].calls == 1
    assert again.by_group["g1"].calls == 1
    assert "c1" in lines


def test_a_call_of_the_most_tokens_has_room_in_a_body() -> None:
    value = -0.12345678901234567
    whole = CallAnnotation("c" * 64, [value] * MAX_TOKENS, [-value] * MAX_TOKENS, [False] * MAX_TOKENS)
    path = "POST /leases/{lease_id}/annotations"
    assert len(msgspec.json.encode(AnnotateLease(2**62, 2**31, [whole]))) < TRAINER_PLANE[path].most_bytes
