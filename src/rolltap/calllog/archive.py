"""Copies sessions between a store and an archive file without loss: `rolltap log export` and `rolltap log import`.

A session is read in one snapshot and written in one transaction, which also checks the stored result as `rolltap log
verify` does. So an import adds complete, valid sessions or raises. Existing rows are kept, and conflicting rows raise
`RecordCorrupt`. Sessions that are new to the store come in closed. A file may be anybody's: it brings sessions of the
current tenant only, and adds no row to a session that is in the store, as that may be one that is still to be trained.
A file that is said to be from this store, or a copy of it, may do both (`own`).

The file is a magic line, then one zstd frame of records: a length (8 bytes, little endian) and that many bytes of
msgpack. A `Block` is a session with its rows exactly as stored, including notes and annotations, so nothing is lost or
re-encoded. A large request part is in the first block that needs it. The last record, `End`, has the counts and the
SHA-256 of the blocks: a file without it was cut off. Importing also checks the rows' own hashes.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import sqlalchemy as sa
import zstandard

from rolltap.calllog.archive_block import Block, check_block, count_values, missing_parts, part_sizes
from rolltap.calllog.backend import Insert
from rolltap.calllog.codec import INTENT_HASHES, read_session, same_row, split_hashes
from rolltap.calllog.database import Database, in_thread
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
from rolltap.calllog.sessions import ancestry, fetch_calls, in_order
from rolltap.calllog.spool import sync_folder
from rolltap.calllog.verify import check_calls, origin_problems, part_problems
from rolltap.decoding import msgpack_decoder
from rolltap.errors import ConfigError, NotFound, RecordCorrupt, StoreUnavailable
from rolltap.tenants import EVERY_TENANT, acting_for, current_tenant, tenant_of
from rolltap.types import Session

PAGE = 500
SESSION_MB = 512
"""The largest session that an import reads, in MB, unless it is told another: a small file may hold any size."""
OWN_SESSION_MB = 4096
"""The same, where the file is said to be this store's own."""
MOST_VALUES = 8_000_000
"""The most values of a session in an archive. A call has some 60."""
Show = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """The number of sessions and calls in the file, and of sessions that changed the store."""

    sessions: int
    calls: int
    new: int


async def export_sessions(
    database: Database,
    path: Path,
    *,
    only: Sequence[str] = (),
    show: Show = lambda done, total: None,
) -> TransferCounts:
    """Writes the sessions of all tenants, or `only` these and those that they were forked from, to a new file."""
    written: set[bytes] = set()
    with ArchiveWriter(path) as archive, acting_for(EVERY_TENANT):
        session_ids = await database.query(lambda connection: _with_origins(connection, only))
        for done, session_id in enumerate(session_ids, 1):
            block = await database.query(lambda connection, key=session_id: read_block(connection, key, written))
            await in_thread(archive.add, block)
            written.update(digest for digest, _ in block.parts)
            show(done, len(session_ids))
    return TransferCounts(archive.sessions, archive.calls, 0)


def _with_origins(connection: sa.Connection, only: Sequence[str]) -> list[str]:
    """The sessions to export, each behind the one that it was forked from."""
    rows = connection.execute(sa.select(sessions.c.id, sessions.c.origin_session))
    origins: dict[str, str | None] = {row[0]: row[1] for row in rows}
    wanted = ancestry(only, origins).union(only) if only else origins
    return in_order({session_id: origins.get(session_id) for session_id in wanted})


def read_block(connection: sa.Connection, session_id: str, known: Collection[bytes]) -> Block:
    """The session's rows, with the large parts that are not in `known`."""
    session = connection.execute(sa.select(sessions).where(sessions.c.id == session_id)).first()
    if session is None:
        raise NotFound(f"there is no session {session_id}")
    own = call_intents.c.session_id == session_id
    intents = _rows(connection, sa.select(call_intents).where(own))
    ended = sa.select(call_completions).join(call_intents, call_intents.c.id == call_completions.c.call_id).where(own)
    delivered = sa.select(deliveries).join(call_intents, call_intents.c.id == deliveries.c.call_id).where(own)
    digests = sorted({digest for row in intents for digest in split_hashes(row[INTENT_HASHES])}.difference(known))
    data_by_hash: dict[bytes, bytes] = {}
    for start in range(0, len(digests), PAGE):
        some = sa.select(parts.c.hash, parts.c.data).where(parts.c.hash.in_(digests[start : start + PAGE]))
        data_by_hash.update({row[0]: row[1] for row in connection.execute(some)})
    for digest in digests:
        if digest not in data_by_hash:
            raise RecordCorrupt(f"session {session_id}: request part {digest.hex()} is not in the log")
    pruned = connection.execute(sa.select(prunings).where(prunings.c.session_id == session_id)).first()
    return Block(
        session=list(session),
        parts=[(digest, data_by_hash[digest]) for digest in digests],
        intents=intents,
        completions=_rows(connection, ended),
        deliveries=_rows(connection, delivered),
        pruning=list(pruned) if pruned is not None else None,
        notes=_rows(connection, sa.select(notes).where(notes.c.session_id == session_id)),
        annotations=_rows(connection, sa.select(annotations).where(annotations.c.session_id == session_id)),
    )


def _rows(connection: sa.Connection, query: sa.Select[Any]) -> list[list[Any]]:
    first, second = query.selected_columns[:2]  # the key columns: an id, or an annotation's call id and token
    return [list(row) for row in connection.execute(query.order_by(first, second))]


async def import_sessions(
    database: Database,
    path: Path,
    *,
    session_mb: float = SESSION_MB,
    own: bool = False,
    show: Callable[[int], None] = lambda done: None,
) -> TransferCounts:
    """Writes the file's sessions to the store. Raises `RecordCorrupt` for one of over `session_mb`.

    `own`: the file is from this store or a copy of it, and may complete sessions that are here, of all tenants.
    """
    loader = _Loader(database, session_mb, own=own)
    blocks = read_archive(path, session_mb)
    done = calls = new = 0
    while (block := await in_thread(next, blocks, None)) is not None:
        await in_thread(loader.check, block)
        with acting_for(EVERY_TENANT):  # the tenant is in the session's tags
            new += await database.transact(lambda connection, block=block: loader.write(connection, block))
        done += 1
        calls += len(block.intents)
        show(done)
    return TransferCounts(done, calls, new)


class _Loader:
    """Writes the blocks of a file, each in a transaction that the caller opens."""

    def __init__(self, database: Database, session_mb: float, *, own: bool) -> None:
        dialect = database.dialect
        self._own = own
        self._most_bytes = session_mb * 1e6
        self._part_sizes: dict[bytes, int] = {}
        tables = (sessions, call_intents, call_completions, deliveries, prunings, notes, annotations)
        self._inserts = {table: Insert(table, dialect) for table in tables}
        self._parts = Insert(parts, dialect, replace="true")

    def check(self, block: Block) -> None:
        """Raises `RecordCorrupt` for a block that must not come in, whatever is in the store."""
        check_block(block, self._most_bytes, self._part_sizes)
        session = read_session(tuple(block.session))
        if not self._own and (tenant := tenant_of(session.tags)) != current_tenant():
            raise RecordCorrupt(
                f"session {session.id} is of tenant {tenant!r}; if it may come in, set ROLLTAP_TENANT={tenant}, or use "
                "--own for a file from this store"
            )
        if missing := missing_parts(block, self._part_sizes):
            raise RecordCorrupt(f"session {session.id}: request part {missing[0]} is not in the file")
        for digest, data in block.parts:
            for problem in part_problems(digest, data):
                raise RecordCorrupt(problem)
        self._part_sizes.update(part_sizes(block))

    def write(self, connection: sa.Connection, block: Block) -> bool:
        """Writes a checked block; True if it changed the store."""
        session_id, now = block.session[0], time.time()
        if block.parts:
            self._parts.run(connection, [(digest, now, data) for digest, data in block.parts])
        is_new = self._add(connection, sessions, [_ended(block.session, now)])
        changed = is_new + self._complete(connection, block.session)
        changed += self._add(connection, call_intents, block.intents)
        changed += self._add(connection, call_completions, block.completions)
        changed += self._add(connection, deliveries, block.deliveries)
        changed += self._add(connection, notes, block.notes)
        changed += self._add(connection, annotations, block.annotations)
        if block.intents:
            connection.execute(sa.delete(prunings).where(prunings.c.session_id == session_id))
        stored = fetch_calls(connection, session_id, ())
        if block.pruning is not None and not stored.intents:
            changed += self._inserts[prunings].run(connection, [tuple(block.pruning)])
        problems, _ = check_calls(stored)
        problems += origin_problems(connection, session_id)
        problems += _foreign_origin(connection, read_session(tuple(block.session)))
        if problems:
            raise RecordCorrupt(f"cannot import session {session_id}: {problems[0]}")
        if changed and not is_new and not self._own:
            raise RecordCorrupt(
                f"session {session_id} is in the store, and the file would add to it; if the file is from this store "
                "or a copy of it, import it with --own"
            )
        return changed > 0

    def _add(self, connection: sa.Connection, table: sa.Table, rows: Sequence[Sequence[Any]]) -> int:
        """Inserts rows and compares them with existing rows of the same key; returns the number of new rows."""
        if not rows:
            return 0
        first, *others = table.primary_key  # the first columns of their table
        width = 1 + len(others)
        offered = {tuple(row[:width]): tuple(row) for row in rows}
        new = self._inserts[table].run(connection, list(offered.values()))
        if new < len(offered):
            ids = sorted({key[0] for key in offered})
            for start in range(0, len(ids), PAGE):
                for row in connection.execute(sa.select(table).where(first.in_(ids[start : start + PAGE]))):
                    if (own := offered.get(tuple(row[:width]))) is None:
                        continue
                    presumed = table is call_completions and own[1] and not row[1]
                    if not presumed and not same_row(table.name, tuple(row), own):
                        raise RecordCorrupt(f"{table.name} {own[0]} is already in the store with other values")
        return new

    def _complete(self, connection: sa.Connection, row: Sequence[Any]) -> int:
        """Sets the session's closing time and log check if they are unset; returns the number of changes."""
        values = dict(zip(sessions.columns.keys(), row, strict=True))
        changed = 0
        for column in (sessions.c.closed_at, sessions.c.log_check):
            if values[column.name] is not None:
                unset = sa.update(sessions).where(sessions.c.id == row[0], column.is_(None))
                changed += connection.execute(unset.values({column: values[column.name]})).rowcount
        return changed


def _foreign_origin(connection: sa.Connection, session: Session) -> Iterator[str]:
    """The problem of a fork whose origin is another tenant's."""
    if session.origin is not None:
        row = connection.execute(sa.select(sessions).where(sessions.c.id == session.origin.session_id)).first()
        if row is not None and tenant_of(read_session(tuple(row)).tags) != tenant_of(session.tags):
            yield f"it was forked from session {session.origin.session_id}, which is not in the log"


def _ended(row: Sequence[Any], now: float) -> list[Any]:
    """The row of a session that is new here, closed: who wrote the file knows its key, and would make calls with it."""
    columns = list(sessions.columns.keys())
    expires_at, closed_at = columns.index("expires_at"), columns.index("closed_at")
    is_open = row[closed_at] is None and row[expires_at] > now
    return [*row[:closed_at], now if is_open else row[closed_at], *row[closed_at + 1 :]]


MAGIC = b"rolltap call log 1\n"
LEVEL = 6


class End(msgspec.Struct, array_like=True, frozen=True, tag="end"):
    """The last record."""

    sessions: int
    calls: int
    sha256: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgpack_decoder(Block | End)


class ArchiveWriter:
    """Writes `path`, which appears only when it is complete: `with ArchiveWriter(path) as archive`."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise ConfigError(f"{path} exists; name a new file")
        self.sessions = 0
        self.calls = 0
        self._sha256 = hashlib.sha256()
        self._path = path
        self._partial = path.with_name(path.name + ".partial")

    def __enter__(self) -> ArchiveWriter:
        with _file_errors(self._partial):
            self._partial.unlink(missing_ok=True)  # a link there may lead to another file
            self._file = os.fdopen(os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
            self._file.write(MAGIC)
        compressor = zstandard.ZstdCompressor(level=LEVEL)
        self._stream = compressor.stream_writer(self._file, closefd=False)
        return self

    def add(self, block: Block) -> None:
        self._write(block)
        self.sessions += 1
        self.calls += len(block.intents)

    def _write(self, record: Block | End) -> None:
        data = _encoder.encode(record)
        self._sha256.update(data)
        with _file_errors(self._partial):
            self._stream.write(len(data).to_bytes(8, "little"))
            self._stream.write(data)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._write(End(self.sessions, self.calls, self._sha256.digest()))
                with _file_errors(self._partial):
                    self._stream.close()
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    self._partial.rename(self._path)
                    sync_folder(self._path.parent)
        finally:
            self._file.close()
            self._partial.unlink(missing_ok=True)


def read_archive(path: Path, session_mb: float = OWN_SESSION_MB) -> Iterator[Block]:
    """Yields the sessions of a file. Raises `RecordCorrupt` for one of over `session_mb`, and at the end if the file is
    cut off or damaged."""
    with _file_errors(path), path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise RecordCorrupt(f"{path} is not a file of `rolltap log export`")
        sessions = calls = 0
        sha256 = hashlib.sha256()
        for data, record in _records(path, file, session_mb):
            if isinstance(record, End):
                if record != End(sessions, calls, sha256.digest()):
                    raise RecordCorrupt(f"{path} is damaged: its {sessions} sessions don't match its final checksum")
                return
            sha256.update(data)
            sessions += 1
            calls += len(record.intents)
            yield record
    raise RecordCorrupt(f"{path} is cut off after {sessions} sessions")


def _records(path: Path, file: BinaryIO, session_mb: float) -> Iterator[tuple[bytes, Block | End]]:
    stream = zstandard.ZstdDecompressor().stream_reader(file, closefd=False)
    try:
        while length := stream.read(8):
            size = int.from_bytes(length, "little")
            if size > session_mb * 1e6:
                raise RecordCorrupt(
                    f"{path}: a session of {size / 1e6:,.0f} MB, over {session_mb:g} MB; if the file is from a store "
                    "of yours, import it with a larger --session-mb"
                )
            data = stream.read(size)
            if len(data) < size:
                return
            if len(data) > MOST_VALUES and count_values(data, MOST_VALUES) > MOST_VALUES:
                raise RecordCorrupt(f"{path}: a session of more than {MOST_VALUES:,} values")
            yield data, _decoder.decode(data)
    except (zstandard.ZstdError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordCorrupt(f"{path} is damaged: {error}") from error


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"{path}: {error.strerror or error}") from error
