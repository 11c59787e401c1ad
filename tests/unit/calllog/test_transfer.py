"""Sessions move between stores by file, loss-free; a bad file changes nothing."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rolltap.calllog import archive, archive_block
from rolltap.calllog.archive import (
    MAGIC,
    ArchiveWriter,
    count_values,
    export_sessions,
    import_sessions,
    read_archive,
)
from rolltap.calllog.archive_block import Block, check_block
from rolltap.calllog.codec import completion_row, intent_row, pack_arrays, pack_bytes, part_hash, session_row
from rolltap.calllog.facts import CallCompletion, CallIntent, RequestParts, same_fact
from rolltap.calllog.notes import notes_of
from rolltap.calllog.outlines import (
    ReaderPosition,
    call_words,
    changes_since,
    fetch_summarized,
    openings,
    outlines,
)
from rolltap.calllog.schema import (
    annotations,
    call_completions,
    call_intents,
    deliveries,
    notes,
    parts,
    prunings,
    sessions,
)
from rolltap.calllog.sql import SqlCallLog, open_call_log
from rolltap.contract.rules import MaskRule, MessageRule, SessionRules
from rolltap.errors import ConfigError, NotFound, RecordCorrupt
from rolltap.reading.index import SessionIndex
from rolltap.tenants import acting_for
from rolltap.types import (
    Break,
    BreakReason,
    Flaw,
    InjectedMessage,
    LogCheck,
    LogVerdict,
    Origin,
    Session,
    VersionSpan,
)

from .facts import a_completion, a_session, an_intent, append, ids

TABLES = (sessions, call_intents, call_completions, deliveries, prunings)
LARGE = b'{"text": "%s"}' % (b"large " * 400)


async def opened(url: str) -> SqlCallLog:
    log = open_call_log(url)
    await log.start()
    return log


async def contents(log: SqlCallLog) -> dict[str, list[Any]]:
    """Every row of every table but when a part was last seen."""

    def read(connection: sa.Connection) -> dict[str, list[Any]]:
        queries = {table.name: sa.select(table) for table in TABLES}
        queries["parts"] = sa.select(parts.c.hash, parts.c.data)
        return {name: sorted(map(tuple, connection.execute(query)), key=repr) for name, query in queries.items()}

    return await log.database.query(read)


async def fill(log: SqlCallLog) -> None:
    """Sessions of every kind: closed, open, without calls; calls with all there is, open, presumed aborted."""
    rules = SessionRules((MessageRule(text="a hint " * 2000, call=1),), (MaskRule(pattern="x+"),))
    rich, plain, empty = a_session(tags=rules.tags()), a_session(rollout_id=None, tags={}), a_session()
    for session in (rich, plain, empty):
        await log.open_session(session)
    request = RequestParts(b'{"model":"m"}', (LARGE, b"{}"), 0, {"tools": LARGE + b"x", "system": b"short"})
    first = an_intent(
        rich, request=request, lineage=b"\0\1", agent="sub", hints={"a": "ü"}, sampling_sent={"stop": ["a", 1.5]},
        break_=Break(BreakReason.HISTORY_EDITED, "x", None, 3, None),
        injected=(InjectedMessage(1, 2, "user", "a hint", 0),),
    )  # fmt: skip
    await log.append_intent(first)
    nan = np.array([np.nan, -0.25], np.float32)
    await log.append_completion(
        a_completion(
            first.id, logprobs=nan, flaw=Flaw.LOGPROBS_NOT_FINITE, versions=(VersionSpan(3, 0, 2),), message=LARGE,
            usage={"prompt": 3}, extras={"top": np.arange(6, dtype=np.int64).reshape(2, 3)},
            masked=((0, 1),),
        )
    )  # fmt: skip
    await log.append_delivery(first.id, False)
    await append(log, rich, parent_id=first.id, shared=5, output_ids=ids(*range(300)))
    await append(log, plain, request=RequestParts(b"{}", (LARGE,)))
    await log.append_intent(an_intent(plain, process="another"))
    await log.abort_orphans(["process"], at=9.0)
    await log.append_intent(an_intent(plain))
    await log.close_session(rich.id, 88.5)
    await log.set_log_check(rich.id, LogCheck(LogVerdict.MISMATCH, "a reply too few"))


async def test_a_log_goes_to_postgres_and_back_unchanged(tmp_path: Path, postgres_url: str):
    one = await opened(f"sqlite:///{tmp_path}/one.db")
    await fill(one)
    before = await contents(one)
    assert all(before[name] for name in ("sessions", "parts", "call_intents", "call_completions", "deliveries"))
    moved = await export_sessions(one.database, tmp_path / "one.rtlog")
    assert (moved.sessions, moved.calls) == (3, 5)
    middle = await opened(postgres_url)
    assert (await import_sessions(middle.database, tmp_path / "one.rtlog")).new == 3
    assert await contents(middle) == before
    await export_sessions(middle.database, tmp_path / "middle.rtlog")
    last = await opened(f"sqlite:///{tmp_path}/last.db")
    await import_sessions(last.database, tmp_path / "middle.rtlog")
    assert await contents(last) == before
    async for session in one.all_sessions():
        assert await last.session_by_key(session.key_hash) == session
        for row, other in zip(await one.rows(session.id), await last.rows(session.id), strict=True):
            assert same_fact(row, other)
    for log in (one, middle, last):
        await log.close()


async def test_a_second_import_changes_nothing_and_a_later_one_brings_up_to_date(sql_log: SqlCallLog, tmp_path: Path):
    source = await opened(f"sqlite:///{tmp_path}/source.db")
    session = a_session()
    await source.open_session(session)
    first = await append(source, session)
    await export_sessions(source.database, tmp_path / "1.rtlog")
    assert (await import_sessions(sql_log.database, tmp_path / "1.rtlog")).new == 1
    assert (await import_sessions(sql_log.database, tmp_path / "1.rtlog")).new == 0
    await append(source, session, parent_id=first.id, shared=5)
    await source.close_session(session.id, 77.0)
    await export_sessions(source.database, tmp_path / "2.rtlog")
    assert (await import_sessions(sql_log.database, tmp_path / "2.rtlog", own=True)).new == 1
    assert await contents(sql_log) == await contents(source)
    assert (await import_sessions(sql_log.database, tmp_path / "1.rtlog")).new == 0
    await source.close()


async def test_rows_that_clash_or_fail_their_checks_are_refused_whole(sql_log: SqlCallLog, tmp_path: Path):
    session = a_session()
    await sql_log.open_session(session)
    intent = await append(sql_log, session)
    await export_sessions(sql_log.database, tmp_path / "good.rtlog")
    (block,) = read_archive(tmp_path / "good.rtlog")
    block.session[1] = "another policy"
    with ArchiveWriter(tmp_path / "clash.rtlog") as archive:
        archive.add(block)
    before = await contents(sql_log)
    with pytest.raises(RecordCorrupt, match=f"{session.id} is already in the store with other values"):
        await import_sessions(sql_log.database, tmp_path / "clash.rtlog")
    (block,) = read_archive(tmp_path / "good.rtlog")
    block.session[:3] = "other", "policy", "other key"
    block.intents[0][:2] = "other call", "other"
    block.completions.clear()
    block.deliveries.clear()
    with ArchiveWriter(tmp_path / "bad.rtlog") as archive:
        archive.add(block)
    with pytest.raises(RecordCorrupt, match="other call"):
        await import_sessions(sql_log.database, tmp_path / "bad.rtlog")
    assert await contents(sql_log) == before
    assert intent.id in str(before)


@pytest.mark.parametrize("planted", ["call", "completion", "delivery", "note", "pruning"])
async def test_an_archive_changes_no_other_session(sql_log: SqlCallLog, tmp_path: Path, planted: str):
    """A crafted archive: its hash is right, but a row belongs to a session of the store that is still to be trained."""
    victim, own = a_session(), a_session()
    await sql_log.open_session(victim)
    crashed = an_intent(victim, process="dead")
    await sql_log.append_intent(crashed)
    await sql_log.abort_orphans(["alive"], at=9.0)  # its completion is presumed: a later one may replace it
    before = await contents(sql_log)
    source = await opened(f"sqlite:///{tmp_path / 'source.db'}")
    await source.open_session(own)
    await append(source, own)
    await export_sessions(source.database, tmp_path / "own.rtlog")
    await source.close()
    (block,) = read_archive(tmp_path / "own.rtlog")
    if planted == "call":
        block.intents.append(list(intent_row(an_intent(victim))[0]))
    elif planted == "completion":
        block.completions.append(list(completion_row(a_completion(crashed.id, output_ids=ids(66, 66)))))
    elif planted == "note":
        block.notes.append(["n1", own.id, crashed.id, "label", "bad", '"yes"', "me", 5.0])
    elif planted == "pruning":  # of a session whose calls are here: it would count as pruned
        block = Block(block.session, [], [], [], [], [victim.id, 5.0, 1, "exported"])
    else:
        block.deliveries.append([crashed.id, True])
    with ArchiveWriter(tmp_path / "crafted.rtlog") as archive:
        archive.add(block)
    with pytest.raises(RecordCorrupt, match="belongs to another session"):
        await import_sessions(sql_log.database, tmp_path / "crafted.rtlog")
    assert await contents(sql_log) == before


NOTE = ["n1", "", None, "label", "good", "true", "me", 5.0]
CRAFTED = {
    "tags of another shape": ("session", 7, '{"a": {"b": "c"}}'),
    "deep tags": ("session", 7, "[" * 100_000),
    "a long tag": ("session", 7, '{"a": "%s"}' % ("x" * 10_000)),
    "a tenant's name": ("session", 7, '{"rolltap.tenant":"../x"}'),
    "a tenant that only the proxy reads": ("session", 7, '{"rolltap\\u002etenant":"acme"}'),
    "a tenant that only the proxy reads, with a blank": ("session", 7, '{"rolltap.tenant" :"acme"}'),
    "two tenants": ("session", 7, '{"rolltap.tenant":"acme","rolltap.tenant":"globex"}'),
    "a date": ("session", 3, 1e18),
    "no date": ("session", 4, float("nan")),
    "a call's date": ("intents", 3, -1e12),
    "a reply's date": ("completions", 2, float("inf")),
    "a note's value": ("notes", 5, "[" * 100_000),
    "a note's kind": ("notes", 3, "verdict"),
    "a note's score": ("notes", 3, "score"),
    "a note's date": ("notes", 7, 1e300),
}


@pytest.mark.parametrize("name", CRAFTED)
async def test_an_archive_brings_nothing_that_the_api_would_refuse(sql_log: SqlCallLog, tmp_path: Path, name: str):
    source, own = await opened(f"sqlite:///{tmp_path / 'source.db'}"), a_session()
    await source.open_session(own)
    await append(source, own)
    await export_sessions(source.database, tmp_path / "own.rtlog")
    await source.close()
    (block,) = read_archive(tmp_path / "own.rtlog")
    block.notes.append([NOTE[0], own.id, *NOTE[2:5], '"yes"', *NOTE[6:]])
    table, column, value = CRAFTED[name]
    row = block.session if table == "session" else getattr(block, table)[0]
    row[column] = value
    with ArchiveWriter(tmp_path / "crafted.rtlog") as archive:
        archive.add(block)
    before = await contents(sql_log)
    with pytest.raises(RecordCorrupt, match=f"cannot import session {own.id}"):
        await import_sessions(sql_log.database, tmp_path / "crafted.rtlog")
    assert await contents(sql_log) == before


def crafted_block(session: Session) -> Block:
    """A session with a row in every table."""
    intent = an_intent(session)
    done, streams = a_completion(intent.id), pack_arrays({"logprobs": np.array([-0.5, -0.25], np.float32)})
    annotation = [intent.id, 3, session.id, "g", "policy", "codex", "w", 1, 0, 5.0, 2, 0.5, 0.4, 2, 0.5, 0, 0, streams]
    return Block(
        list(session_row(session)),
        [],
        [list(intent_row(intent)[0])],
        [list(completion_row(done))],
        [[intent.id, True]],
        None,
        [["n1", session.id, None, "label", "good", '"yes"', "me", 5.0]],
        [annotation],
    )


def rows_by_table(block: Block) -> dict[sa.Table, list[Any]]:
    """The first row of each table."""
    parts_of = (block.intents, block.completions, block.deliveries, block.notes, block.annotations)
    tables = (call_intents, call_completions, deliveries, notes, annotations)
    return {sessions: block.session, **{table: rows[0] for table, rows in zip(tables, parts_of, strict=True)}}


def wrong_values(column: sa.Column[Any]) -> Iterator[Any]:
    """Values that the column's type does not have, though SQLite would take them."""
    if not column.nullable:
        yield None
    yield [[]]
    kind = column.type
    if isinstance(kind, sa.LargeBinary):
        yield from ("text", 7, 1.5)
    elif isinstance(kind, sa.Text):
        yield from (b"\xff", 7, 1.5, True, "a\0b")
        if column.name not in ("tags", "log_check", "detail", "value"):
            yield "x" * 100_000
    elif isinstance(kind, sa.Boolean):
        yield from ("x", b"x", 2, 1.5)
    else:
        yield from (
            "x",
            b"x",
            "7",
            True,
            float("nan"),
            float("inf"),
            2**64 if isinstance(kind, sa.BigInteger) else 2e308,
        )
        if isinstance(kind, sa.Integer):
            yield from (1.5, 2**63)


@pytest.mark.parametrize("table", rows_by_table(crafted_block(a_session())), ids=lambda table: table.name)
def test_an_archive_has_in_each_column_what_the_column_is_for(table: sa.Table) -> None:
    """A row that is in a store can't be removed again, and breaks every page that reads its column."""
    check_block(crafted_block(a_session()))
    for index, column in enumerate(table.columns):
        for value in wrong_values(column):
            block = crafted_block(a_session())
            rows_by_table(block)[table][index] = value
            with pytest.raises(RecordCorrupt, match="cannot import session"):
                check_block(block)


def test_annotations_of_an_archive_count_what_their_call_has() -> None:
    columns = {name: place for place, name in enumerate(annotations.c.keys())}
    short = pack_arrays({"logprobs": np.array([-0.5], np.float32)})
    doubles = pack_arrays({"logprobs": np.array([-0.5, -0.25])})
    other = pack_arrays({"reward": np.array([-0.5, -0.25], np.float32)})
    for name, value in (
        *(("streams", streams) for streams in (short, doubles, other, b"\1\xff")),
        *(("compared", 3), ("fresh", 3), ("kept", 3), ("clipped", -1), ("mismatch_sum", -1.0)),
        *(("token", -1), ("token", 2**62)),
    ):
        block = crafted_block(a_session())
        block.annotations[0][columns[name]] = value
        with pytest.raises(RecordCorrupt, match="cannot import session"):
            check_block(block)


DEEP = b'{"role":"assistant","content":' + b"[" * 50_000 + b"]" * 50_000 + b"}"


@pytest.mark.parametrize("place", ["message", "item", "large item", "head", "tools", "array"])
def test_no_call_of_an_archive_holds_what_readers_can_not_read(place: str) -> None:
    """The index of all sessions reads it, so that one call would keep every page from being shown."""
    deep = DEEP if place != "item" else b"[" * 500 + b"]" * 500
    request = {
        "item": RequestParts(b"{}", (deep,)),
        "large item": RequestParts(b"{}", (deep,)),
        "head": RequestParts(deep),
        "tools": RequestParts(b"{}", (), 0, {"tools": deep}),
    }
    session = a_session()
    intent = an_intent(session, request=request.get(place, RequestParts(b"{}")))
    texts = {"top_ids": np.array([["a"], ["b"]])}
    done = a_completion(
        intent.id, message=deep if place == "message" else b"", extras=texts if place == "array" else {}
    )
    row, large = intent_row(intent)
    stored = [(digest, pack_bytes(part)) for digest, part in large.items()]
    block = Block(list(session_row(session)), stored, [list(row)], [list(completion_row(done))], [], None)
    with pytest.raises(RecordCorrupt, match=r"nested deeper than|holds no numbers"):
        check_block(block)


async def test_no_key_opens_a_session_of_an_archive(sql_log: SqlCallLog, tmp_path: Path) -> None:
    """Who wrote the file may know the key. One that was open here before stays open, if the file may add to it."""
    source, here, strange = await opened(f"sqlite:///{tmp_path / 'source.db'}"), a_session(), a_session()
    here, strange = (replace(each, expires_at=time.time() + 600) for each in (here, strange))
    await sql_log.open_session(here)
    for session in (here, strange):
        await source.open_session(session)
        await append(source, session)
    await export_sessions(source.database, tmp_path / "a.rtlog")
    await source.close()
    for _ in range(2):
        await import_sessions(sql_log.database, tmp_path / "a.rtlog", own=True)
    known, imported = await sql_log.session_by_key(here.key_hash), await sql_log.session_by_key(strange.key_hash)
    assert known is not None
    assert known.closed_at is None
    assert imported is not None
    assert imported.closed_at is not None


ADDED = ("call", "completion", "delivery", "note", "annotation", "end", "log check", "what was pruned")


def added(block: Block, what: str) -> Block:
    """The block with a row that the store's session does not have."""
    session_id = block.session[0]
    intent = an_intent(session_id)
    match what:
        case "call" | "what was pruned":
            block.intents.append(list(intent_row(intent)[0]))
        case "completion":
            block.completions.append(list(completion_row(a_completion(block.intents[0][0], output_ids=ids(66, 66)))))
        case "delivery":
            block.deliveries.append([block.intents[0][0], True])
        case "note":
            block.notes.append([NOTE[0], session_id, *NOTE[2:5], '"yes"', *NOTE[6:]])
        case "annotation":
            block.completions.append(list(completion_row(a_completion(block.intents[0][0]))))
            whole = crafted_block(a_session(id=session_id)).annotations[0]
            block.annotations.append([block.intents[0][0], *whole[1:]])
        case "end":
            block.session[6] = 77.0
        case _:
            block.session[8] = '{"verdict":"mismatch","text":"x"}'
    return block


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("what", ADDED)
async def test_a_strangers_archive_adds_nothing_to_a_session_that_is_here(
    sql_log: SqlCallLog, tmp_path: Path, what: str, is_open: bool
) -> None:
    """Who was given an archive once knows the rows of its sessions, of which some are still to be trained."""
    here = a_session(expires_at=time.time() + 600 if is_open else 5.0)
    await sql_log.open_session(here)
    await sql_log.append_intent(an_intent(here, process="dead"))
    if what == "completion":
        await sql_log.abort_orphans(["alive"], at=9.0)  # presumed: a later one may replace it
    await export_sessions(sql_log.database, tmp_path / "given.rtlog")
    if what == "what was pruned":
        await prune_all(sql_log, here.id)
    (block,) = read_archive(tmp_path / "given.rtlog")
    if what == "completion":
        block.completions.clear()
    with ArchiveWriter(tmp_path / "crafted.rtlog") as archive:
        archive.add(added(block, what))
    before = await contents(sql_log)
    with pytest.raises(RecordCorrupt, match=f"session {here.id} is in the store, and the file would add to it"):
        await import_sessions(sql_log.database, tmp_path / "crafted.rtlog")
    assert await contents(sql_log) == before
    assert (await import_sessions(sql_log.database, tmp_path / "crafted.rtlog", own=True)).new == 1


async def prune_all(log: SqlCallLog, session_id: str) -> None:
    def work(connection: sa.Connection) -> None:
        connection.execute(sa.insert(prunings).values(session_id=session_id, at=5.0, calls=1, reason="exported"))
        connection.execute(sa.delete(call_intents).where(call_intents.c.session_id == session_id))

    await log.database.transact(work)


async def write_blocks(path: Path, *blocks: Block) -> Path:
    with ArchiveWriter(path) as archive:
        for block in blocks:
            archive.add(block)
    return path


def block_of(session: Session, *calls: tuple[CallIntent, CallCompletion]) -> Block:
    rows = [(*intent_row(intent), completion_row(done)) for intent, done in calls]
    large = {digest: pack_bytes(part) for _, some, _ in rows for digest, part in some.items()}
    return Block(
        list(session_row(session)),
        list(large.items()),
        [list(row) for row, _, _ in rows],
        [list(done) for _, _, done in rows],
        [],
        None,
    )


async def test_an_archive_brings_no_session_to_another_tenant(sql_log: SqlCallLog, tmp_path: Path) -> None:
    planted = block_of(a_session(tags={"rolltap.tenant": "acme"}))
    path = await write_blocks(tmp_path / "a.rtlog", planted)
    with pytest.raises(RecordCorrupt, match=r"is of tenant 'acme'.*ROLLTAP_TENANT=acme"):
        await import_sessions(sql_log.database, path)
    with acting_for("acme"):
        assert (await import_sessions(sql_log.database, path)).new == 1
    with acting_for("globex"), pytest.raises(RecordCorrupt, match="is of tenant 'acme'"):
        await import_sessions(sql_log.database, path)
    assert (await import_sessions(sql_log.database, path, own=True)).new == 0


@pytest.mark.parametrize("origin", ["another tenant's", "itself", "no place"])
async def test_a_fork_of_an_archive_continues_only_what_it_may(
    sql_log: SqlCallLog, tmp_path: Path, origin: str
) -> None:
    """A session keeps its origin from being pruned, and is exported with it."""
    victim, fork = a_session(tags={"rolltap.tenant": "acme"} if origin == "another tenant's" else {}), a_session()
    await sql_log.open_session(victim)
    call = await append(sql_log, victim)
    own, at = an_intent(fork), -1 if origin == "no place" else None
    fork = replace(fork, origin=Origin(fork.id, own.id) if origin == "itself" else Origin(victim.id, call.id, at))
    intent = own if origin == "itself" else replace(own, parent_id=call.id, shared=3)
    path = await write_blocks(tmp_path / "a.rtlog", block_of(fork, (intent, a_completion(own.id))))
    with pytest.raises(RecordCorrupt, match=r"not in the log|can't be a fork of that"):
        await import_sessions(sql_log.database, path)
    assert await sql_log.session(fork.id) is None


async def test_an_archive_refers_to_no_request_part_that_it_does_not_have(sql_log: SqlCallLog, tmp_path: Path) -> None:
    """Tenants share parts: who knows a hash would read what is behind it."""
    victim, own = a_session(), a_session()
    await sql_log.open_session(victim)
    await append(sql_log, victim, request=RequestParts(b"{}", (LARGE,)))
    intent = an_intent(own, request=RequestParts(b"{}", (LARGE,)))
    block = block_of(own, (intent, a_completion(intent.id)))
    path = await write_blocks(tmp_path / "a.rtlog", msgspec.structs.replace(block, parts=[]))
    with pytest.raises(RecordCorrupt, match="is not in the file"):
        await import_sessions(sql_log.database, path)
    assert (await import_sessions(sql_log.database, await write_blocks(tmp_path / "b.rtlog", block))).new == 1


@pytest.mark.parametrize("mark", range(4))
def test_a_hash_of_a_part_may_begin_with_any_byte(mark: int) -> None:
    """Those of packed values say how they are packed."""
    texts = (b'{"content":"%d%s"}' % (number, b"x" * 2000) for number in itertools.count())
    part = next(text for text in texts if part_hash(text)[0] == mark)
    session = a_session()
    intent = an_intent(session, request=RequestParts(b"{}", (part,)))
    check_block(block_of(session, (intent, a_completion(intent.id))), 100_000)


ZEROS = np.zeros(4_000_000, np.int32)


def grown(what: str) -> Block:
    """A session of some kB, which takes 16 MB or more when it is read."""
    session = a_session()
    first = an_intent(session)
    zeros = np.zeros(len(ZEROS), np.float32)
    match what:
        case "prompt":
            first = replace(first, new_ids=ZEROS)
        case "request":
            first = replace(first, request=RequestParts(b"{}", (b'{"content":"%s"}' % (b"a" * 16_000_000),)))
        case "shared prompts":
            first = replace(first, new_ids=ZEROS[:100_000])
    done = a_completion(first.id)
    match what:
        case "reply":
            done = replace(done, output_ids=ZEROS, logprobs=zeros)
        case "array":
            done = replace(done, extras={"routed_experts": np.zeros((2, 8_000_000), np.int8)})
        case "message":
            done = replace(done, message=b'{"role":"assistant","parts":[{"text":"%s"}]}' % (b"a" * 16_000_000))
    calls = [(first, done)]
    if what == "shared prompts":
        beside = [an_intent(session, parent_id=first.id, shared=99_999, new_ids=ids(1)) for _ in range(40)]
        calls += [(each, a_completion(each.id)) for each in beside]
    return block_of(session, *calls)


@pytest.mark.parametrize("what", ["prompt", "request", "shared prompts", "reply", "array", "message"])
async def test_a_session_of_an_archive_has_a_largest_size_when_it_is_unpacked(
    sql_log: SqlCallLog, tmp_path: Path, what: str
) -> None:
    path = await write_blocks(tmp_path / "grown.rtlog", grown(what))
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    with pytest.raises(RecordCorrupt, match=r"MB when it is unpacked, over 15 MB"):
        await import_sessions(sql_log.database, path, session_mb=15)
    assert tracemalloc.get_traced_memory()[1] < 5 << 20
    tracemalloc.stop()
    assert (await import_sessions(sql_log.database, path, session_mb=80)).new == 1


async def test_a_call_of_an_archive_has_a_largest_number_of_tokens(
    sql_log: SqlCallLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_block, "MOST_CALL_TOKENS", 1_000_000)
    for what in ("prompt", "reply"):
        path = await write_blocks(tmp_path / f"{what}.rtlog", grown(what))
        with pytest.raises(RecordCorrupt, match="over 1,000,000 tokens"):
            await import_sessions(sql_log.database, path)


ODD_NUMBERS = {
    "an id of the prompt": {"new_ids": ids(1, -1)},
    "a place of the break": {"break_": Break(BreakReason.HISTORY_EDITED, "x", None, -(10**15), None)},
    "shared items": {"request": RequestParts(b"{}", (), -1)},
    "a temperature": {"sampling_sent": {"temperature": 10**400}},
    "an asked number": {"sampling_asked": {"n": {"m": [2**64]}}},
    "an id of the reply": {"output_ids": ids(4, -(2**31))},
    "a candidate": {"extras": {"top_ids": np.array([[1], [-5]])}},
    "no candidate": {"extras": {"top_ids": np.array([[1.0], [np.inf]])}},
    "other candidates": {"extras": {"top_ids": np.ones((2, 3), np.int32), "top_logprobs": np.ones((2, 1), np.float32)}},
}


@pytest.mark.parametrize("name", ODD_NUMBERS)
def test_no_call_of_an_archive_has_numbers_that_no_engine_has(name: str) -> None:
    """A page or a dataset would index, decode or add them up."""
    session, changes = a_session(), ODD_NUMBERS[name]
    of_reply = {"output_ids", "extras"}
    intent = an_intent(session, **{each: value for each, value in changes.items() if each not in of_reply})
    done = a_completion(intent.id, **{each: value for each, value in changes.items() if each in of_reply})
    with pytest.raises(RecordCorrupt, match=f"cannot import session {session.id}"):
        check_block(block_of(session, (intent, done)))


@pytest.mark.parametrize("id", ["", "..", "-rf", "../x", "a/b", "a b", "\x1b[2J", "<b>", "\u202e", "x" * 129])
@pytest.mark.parametrize("of", ["session", "call"])
def test_an_id_of_an_archive_has_a_place_in_a_path(id: str, of: str) -> None:
    session = a_session(id=id) if of == "session" else a_session()
    intent = an_intent(session, id=id) if of == "call" else an_intent(session)
    with pytest.raises(RecordCorrupt, match="not an id"):
        check_block(block_of(session, (intent, a_completion(intent.id))))


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


@pytest.mark.parametrize(
    "record",
    {
        "deep": b"\x97\xa7session\x91" + nested(1_000_000) + b"\x90\x90\x90\x90\xc0",
        "no columns": b"\x97\xa7session\x90\x90\x90\x90\x90\xc0",
        "an id that is a list": b"\x97\xa7session\x9c" + b"\x91\xc0" * 12 + b"\x90\x90\x90\x90\xc0",
        "no UTF-8": b"\x97\xa7session\x91\xa1\xff\x90\x90\x90\x90\xc0",
    }.items(),
    ids=lambda record: record[0],
)
async def test_a_record_that_no_writer_makes_is_refused(
    sql_log: SqlCallLog, tmp_path: Path, record: tuple[str, bytes]
) -> None:
    framed = len(record[1]).to_bytes(8, "little") + record[1]
    (tmp_path / "crafted.rtlog").write_bytes(MAGIC + zstandard.ZstdCompressor().compress(framed))
    with pytest.raises(RecordCorrupt):
        await import_sessions(sql_log.database, tmp_path / "crafted.rtlog")


@pytest.mark.parametrize(
    ("what", "count", "declared", "message"),
    [
        (b"\0", 600 << 20, 600 << 20, "larger --session-mb"),
        (b"\0", 1, 1 << 62, "larger --session-mb"),
        (b"\x90", 200_000, 200_000, "more than 100,000 values"),
    ],
    ids=["sparse", "declared", "empty lists"],
)
async def test_an_import_takes_no_more_memory_than_a_session_may(
    sql_log: SqlCallLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: bytes,
    count: int,
    declared: int,
    message: str,
) -> None:
    """A file of a few kB may hold, or declare, any size."""
    monkeypatch.setattr(archive, "MOST_VALUES", 100_000)
    path = tmp_path / "grown.rtlog"
    with path.open("wb") as file:
        file.write(MAGIC)
        with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as stream:
            stream.write(declared.to_bytes(8, "little"))
            for start in range(0, count, 1 << 20):
                stream.write(what * min(count - start, 1 << 20))
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    with pytest.raises(RecordCorrupt, match=message):
        await import_sessions(sql_log.database, path)
    assert tracemalloc.get_traced_memory()[1] < 40 << 20
    tracemalloc.stop()


async def test_a_larger_session_is_imported_when_that_is_said(sql_log: SqlCallLog, tmp_path: Path) -> None:
    session = a_session()
    await sql_log.open_session(session)
    await append(sql_log, session, output_ids=np.random.default_rng(1).integers(0, 1 << 30, 50_000, np.int32))
    await export_sessions(sql_log.database, tmp_path / "a.rtlog")
    with pytest.raises(RecordCorrupt, match=r"over 0\.1 MB"):
        await import_sessions(sql_log.database, tmp_path / "a.rtlog", session_mb=0.1)
    assert (await import_sessions(sql_log.database, tmp_path / "a.rtlog", session_mb=1)).sessions == 1


@given(st.recursive(st.none() | st.integers(-(2**63), 2**63) | st.floats() | st.binary() | st.text(), st.lists))
def test_values_are_counted_as_they_are(value: Any) -> None:
    def count(value: Any) -> int:
        return 1 + sum(map(count, value)) if isinstance(value, list) else 1

    assert count_values(msgspec.msgpack.encode(value), 1000) == count(value)


async def test_a_damaged_file_is_told_from_a_whole_one(sql_log: SqlCallLog, tmp_path: Path):
    for _ in range(3):
        session = a_session()
        await sql_log.open_session(session)
        await append(sql_log, session, output_ids=np.arange(5000, dtype=np.int32))
    path = tmp_path / "a.rtlog"
    await export_sessions(sql_log.database, path)
    data = path.read_bytes()
    for length in (10, 40, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(RecordCorrupt, match=r"not a file|cut off|damaged"):
            list(read_archive(path))
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    with pytest.raises(RecordCorrupt, match="damaged"):
        list(read_archive(path))


async def test_a_failed_export_leaves_nothing_behind(sql_log: SqlCallLog, tmp_path: Path):
    path = tmp_path / "a.rtlog"
    with pytest.raises(NotFound, match="nobody"):
        await export_sessions(sql_log.database, path, only=["nobody"])
    assert not list(tmp_path.glob("*rtlog*"))  # noqa: ASYNC240
    (tmp_path / "other").write_text("precious")
    (tmp_path / "a.rtlog.partial").symlink_to(tmp_path / "other")
    await export_sessions(sql_log.database, path)
    assert ((tmp_path / "other").read_text(), path.stat().st_mode & 0o777) == ("precious", 0o600)
    with pytest.raises(ConfigError, match="exists"):
        await export_sessions(sql_log.database, path)


async def test_a_list_shows_the_other_rows_when_one_can_not_be_read(sql_log: SqlCallLog) -> None:
    good, bad = a_session(), a_session()
    for session in (good, bad):
        await sql_log.open_session(session)
    deep = "[" * 100_000
    spoil = sa.update(sessions).where(sessions.c.id == bad.id).values(tags=deep)
    note = {"id": "n", "session_id": good.id, "kind": "label", "name": "x", "author": "", "created_at": 1.0}
    await sql_log.database.transact(lambda connection: connection.execute(spoil))
    await sql_log.database.transact(lambda connection: connection.execute(sa.insert(notes).values(**note, value=deep)))
    assert [session.id for session in await sql_log.sessions()] == [good.id]
    ids_ = [good.id, bad.id]
    read = await sql_log.database.query(lambda connection: fetch_summarized(connection, ids_))
    assert [session.id for session, _ in read] == [good.id]
    assert await sql_log.database.query(lambda connection: notes_of(connection, ids_)) == {good.id: []}


async def test_a_list_shows_the_other_calls_when_one_can_not_be_read(sql_log: SqlCallLog) -> None:
    """What was taken with much of the stack left is read with less."""
    session = a_session()
    await sql_log.open_session(session)
    good = await append(sql_log, session, request=RequestParts(b"{}", (b'{"role":"user","content":"zebra"}',)))
    deep = an_intent(session, request=RequestParts(DEEP, (DEEP,)))
    await sql_log.append_intent(deep)
    await sql_log.append_completion(a_completion(deep.id, message=DEEP))
    spoiled = await append(sql_log, session)
    spoil = (
        sa.update(call_intents).where(call_intents.c.id == spoiled.id).values(request=b"\1no frame", detail="[" * 5000)
    )
    await sql_log.database.transact(lambda connection: connection.execute(spoil))
    query = sql_log.database.query
    calls = await query(lambda connection: outlines(connection, [session.id]))
    assert [call.id for call in calls[session.id]] == [good.id, deep.id]
    assert await query(lambda connection: openings(connection, calls)) == {session.id: "zebra"}
    words = await query(lambda connection: call_words(connection, [good.id, deep.id, spoiled.id]))
    assert {each.call_id: each.text for each in words} == {good.id: "user\nzebra", deep.id: ""}


async def test_a_list_shows_the_other_words_when_a_part_can_not_be_read(sql_log: SqlCallLog) -> None:
    """A part is no call's own: one that is damaged is in many calls, and kept all of the list from being shown."""
    session = a_session()
    await sql_log.open_session(session)
    first, last = (b'{"role":"user","content":"%s"}' % (word * 500) for word in (b"lost ", b"zebra "))
    call = await append(sql_log, session, request=RequestParts(b"{}", (first, last)))
    spoil = sa.update(parts).where(parts.c.hash == part_hash(first)).values(data=b"\1no frame")
    await sql_log.database.transact(lambda connection: connection.execute(spoil))
    query = sql_log.database.query
    calls = await query(lambda connection: outlines(connection, [session.id]))
    assert (await query(lambda connection: openings(connection, calls)))[session.id].startswith("zebra zebra")
    (words,) = await query(lambda connection: call_words(connection, [call.id]))
    assert words.text.count("zebra") == 500
    with pytest.raises(RecordCorrupt, match="cannot decompress"):
        await sql_log.rows(session.id)


async def test_imported_names_are_not_new_for_ever(sql_log: SqlCallLog, tmp_path: Path) -> None:
    """Ours are greater than all before. A name that is greater than those made later would hide what is new."""
    imported, live = a_session(id="imported-x", closed_at=5.0), a_session()
    await sql_log.open_session(imported)
    await append(sql_log, imported, id="imported-x-00000")
    note = {"id": "zz", "session_id": imported.id, "kind": "label", "name": "x", "author": "", "created_at": 1.0}
    await sql_log.database.transact(
        lambda connection: connection.execute(sa.insert(notes).values(**note, value="null"))
    )
    index = SessionIndex(tmp_path / "index.db")
    index.open()
    index.mark({imported.id})
    count, last = index.newest()
    await sql_log.open_session(live)
    call = await append(sql_log, live)
    position = ReaderPosition(time.time(), count, last)
    changes = await sql_log.database.query(lambda connection: changes_since(connection, position))
    assert (changes.new_sessions, changes.missing, changes.changed_sessions) == ([live.id], False, [])
    assert changes.calls == {call.id: live.id}
    index.mark({live.id})
    assert index.newest() == (2, live.id)
