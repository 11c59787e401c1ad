"""Writes to the store, and to a bounded file, the spool, while the store is unavailable.

`Spool`: a fact is durable when `append` returns. The file's disk space is allocated when it is created, so that it
works on a full disk. Records follow each other from `START` on: length, CRC-32, bytes. The CRC includes the file's
generation, which grows when the spool is emptied. So remains of an older generation or of an incomplete write are not
read as records.

Only one process uses a spool at a time. Before each append it looks whether the open file is still the one at its path,
where the next start finds it: it may have been removed. An empty spool is then made anew; one with records takes no
more.

`SpoolWriter`: when a write to the store fails, its group and all later ones go to the spool, where they are durable. A
task tries to write the oldest spooled facts to the store every `PROBE_S`. When the store answers, the spool is drained
into it. New groups still go to the spool then, so that peers never find a call in the store before its parent. When one
batch is left, new groups wait for it and then go to the store again. Writing a fact twice is harmless. Readers wait
until this spool and those of the other workers in the same folder are empty.

If the store takes longer than `STALL_S` for a batch, it gets smaller batches, so a slow store gets all facts.

An intent that does not fit into the spool fails with `StoreUnavailable`, so its engine is never called. Some room is
reserved for completions of calls in flight. If the store refuses a spooled fact, its appender has already returned. So
the fact is logged as an error and kept in `<spool>.refused`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import struct
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rolltap.calllog.codec import EncodedFact, pack_fact, unpack_fact
from rolltap.calllog.schema import call_intents
from rolltap.calllog.sqlite import Worker
from rolltap.calllog.writing import GroupWriter, SpoolState
from rolltap.crash import crash_point
from rolltap.errors import ConfigError, RecordCorrupt, StoreUnavailable

log = logging.getLogger("rolltap.store")

_MAGIC = b"rolltap1"
_HEADER = struct.Struct("<8sQI")  # magic, generation, CRC-32 of both
_RECORD = struct.Struct("<II")  # length, CRC-32 of generation and bytes
START = 64

OPEN_SHARE = 0.75
"""Share of the file that intents may fill. The rest is reserved for completions of calls in flight."""

RETRY_AFTER_S = 5.0


class Spool:
    """The spool file. Not thread-safe."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._file = -1
        self._generation = 0
        self._end = START
        self.count = 0
        """The number of records."""

    def open(self) -> None:
        """Opens or creates the file. Keeps the records of an earlier process."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"another process uses the spool {self._path}; give each process its own `data` folder"
            ) from None
        try:
            self._recover()
            os.posix_fallocate(self._file, 0, max(self._limit, self._end))
            sync_folder(self._path.parent)
        except OSError as error:
            self.close()
            raise StoreUnavailable(f"cannot allocate the spool {self._path}: {error.strerror}") from error

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _recover(self) -> None:
        header = os.pread(self._file, _HEADER.size, 0)
        if not header.strip(b"\0"):
            self._write_header(1)
            return
        if len(header) < _HEADER.size:
            raise RecordCorrupt(f"{self._path} is not a spool")
        magic, generation, crc = _HEADER.unpack(header)
        if magic != _MAGIC or crc != zlib.crc32(header[:-4]):
            raise RecordCorrupt(f"{self._path} is not a spool, or its first bytes are damaged")
        self._generation = generation
        records, self._end = self.read()
        self.count = len(records)

    def _write_header(self, generation: int) -> None:
        fields = struct.pack("<8sQ", _MAGIC, generation)
        os.pwrite(self._file, fields + struct.pack("<I", zlib.crc32(fields)), 0)
        os.fdatasync(self._file)
        self._generation, self._end, self.count = generation, START, 0

    def room(self, *, for_new_calls: bool) -> int:
        """The number of bytes that may still be appended: for intents, or for completions."""
        limit = self._limit * OPEN_SHARE if for_new_calls else self._limit
        return int(limit) - self._end

    def left(self, position: int) -> int:
        """The number of bytes of records from `position` on."""
        return self._end - position

    @staticmethod
    def size(record: bytes) -> int:
        """The bytes that a record takes in the file."""
        return _RECORD.size + len(record)

    def append(self, records: Sequence[bytes]) -> None:
        """Appends records and returns when they are on disk. The caller has checked `room`."""
        self._stay_in_place()
        data = b"".join(_RECORD.pack(len(record), self._crc(record)) + record for record in records)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._end + written)
            os.fdatasync(self._file)
        except OSError as error:
            raise StoreUnavailable(f"the spool {self._path}: {error.strerror}", retry_after=RETRY_AFTER_S) from error
        self._end += len(data)
        self.count += len(records)

    def _stay_in_place(self) -> None:
        """Raises `StoreUnavailable` if what is appended would not be found at the next start."""
        with suppress(FileNotFoundError):
            if self._file >= 0 and os.path.samestat(os.stat(self._path), os.fstat(self._file)):
                return
        if self.count:
            message = f"the spool {self._path} was removed while it holds {self.count} facts that the store lacks"
            raise StoreUnavailable(message, retry_after=RETRY_AFTER_S)
        log.warning("the spool %s was removed; it is made anew", self._path)
        self.close()
        try:
            self.open()
        except ConfigError as error:
            raise StoreUnavailable(error.message, retry_after=RETRY_AFTER_S) from error

    def read(self, position: int = START, count: int = 1 << 62, most_bytes: int = 1 << 62) -> tuple[list[bytes], int]:
        """Up to `count` records from `position` on, the oldest first, and the position after them.

        Stops at a record that begins `most_bytes` or more after `position`.
        """
        records: list[bytes] = []
        end = position + most_bytes
        while len(records) < count and position < end and (header := os.pread(self._file, _RECORD.size, position)):
            if len(header) < _RECORD.size:
                break
            length, crc = _RECORD.unpack(header)
            record = os.pread(self._file, length, position + _RECORD.size)
            if length == 0 or len(record) < length or self._crc(record) != crc:
                break
            records.append(record)
            position += _RECORD.size + length
        return records, position

    def set_aside(self, record: bytes) -> Path:
        """Appends a record that the store refused to `<spool>.refused`; returns that path."""
        path = self._path.with_name(self._path.name + ".refused")
        with path.open("ab") as file:
            file.write(_RECORD.pack(len(record), zlib.crc32(record)) + record)
            file.flush()
            os.fsync(file.fileno())
        return path

    def keep_copy(self) -> Path:
        """Copies the whole file; returns the copy's path."""
        path = self._path.with_name(f"{self._path.name}.damaged-{self._generation}")
        shutil.copyfile(self._path, path)
        return path

    def clear(self) -> None:
        """Removes all records, when they are in the store."""
        self._write_header(self._generation + 1)

    def _crc(self, record: bytes) -> int:
        return _crc(self._generation, record)


def _crc(generation: int, record: bytes) -> int:
    return zlib.crc32(record, zlib.crc32(struct.pack("<Q", generation)))


def sync_folder(folder: Path) -> None:
    """Makes the names of new files in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def holds_records(path: Path) -> bool:
    """Whether a spool contains records. Another process may have it open.

    Raises `StoreUnavailable` if it can't be read: the calls in it would be missing.
    """
    try:
        with path.open("rb", buffering=0) as file:
            header = file.read(_HEADER.size)
            file.seek(START)
            length, crc = _RECORD.unpack(file.read(_RECORD.size))
            record = file.read(length) if length else b""
    except (FileNotFoundError, struct.error):
        return False
    except OSError as error:
        message = f"the spool {path} of another worker can't be read: {error.strerror}"
        raise StoreUnavailable(message, retry_after=RETRY_AFTER_S) from error
    return bool(record) and _crc(_HEADER.unpack(header)[1], record) == crc


PROBE_S = 0.5
STALL_S = 5.0
"""Timeout for the store to commit a group. A slower store counts as unavailable."""

BACK_WITHIN_S = 2.0
"""Seconds that a reader waits for an unavailable store: one that was slow only once is back by then."""

CATCH_UP_S = 10.0
"""Seconds that a reader waits for the spool to be drained."""

POLL_S = 0.1

DRAIN = 1000
DRAIN_BYTES = 4 << 20
"""Maximum facts (`DRAIN`) and approximate maximum bytes of a batch from the spool."""

CALL_BYTES = 65_536
"""A spool with less room for new calls than this is reported as full, although a small call may still fit."""


class SpoolWriter:
    """A `GroupWriter` with a spool before another one: see the module."""

    def __init__(
        self,
        store: GroupWriter,
        spool: Spool,
        *,
        others: Sequence[Path] = (),
        probe_s: float = PROBE_S,
        stall_s: float = STALL_S,
    ) -> None:
        """`others` are the spools of other processes that write to the same store."""
        self._store = store
        self._spool = spool
        self._others = others
        self._probe_s = probe_s
        self._stall_s = stall_s
        self._worker = Worker(1, "rolltap-spool")
        self._appending = asyncio.Lock()
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._away = False
        self._since: float | None = None
        self._refused = 0
        self._batch = DRAIN
        self._position = START
        self._moved = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return self._spool.count + self._store.waiting

    @property
    def spool(self) -> SpoolState:
        room = self._spool.room(for_new_calls=True) >= CALL_BYTES
        seconds = 0.0 if self._since is None else time.monotonic() - self._since
        return SpoolState(self._away, room, seconds)

    @property
    def unseen(self) -> int:
        return self._spool.count + self._store.unseen

    @property
    def blind(self) -> bool:
        return self._store.blind

    @property
    def refused(self) -> int:
        return self._refused + self._store.refused

    async def start(self) -> None:
        """Opens the spool and drains the facts of an earlier process."""
        await self._store.start()
        await self._worker.run(self._spool.open)
        if self._spool.count:
            log.warning("the spool has %d facts of an earlier process; writing them to the store", self._spool.count)
            await self._drain()
        self._emptied.set()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Drains the spool if possible. Otherwise the facts stay in it for the next start."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            if self._spool.count:
                with suppress(StoreUnavailable, TimeoutError):
                    await self._move_all()
        await self._worker.run(self._spool.close)
        self._worker.shutdown()
        await self._store.close()

    async def write(self, facts: Sequence[EncodedFact]) -> None:
        while not await self._store_takes(facts):
            if await self._append([fact for fact in facts if fact.failure is None]):
                return

    async def _store_takes(self, facts: Sequence[EncodedFact]) -> bool:
        """Writes the facts to the store. False if it is unavailable or the spool must be drained first."""
        if self._away or not self._emptied.is_set():
            return False
        try:
            async with asyncio.timeout(self._stall_s):
                await self._store.write(facts)
        except (StoreUnavailable, TimeoutError) as error:
            self._away = True
            self._since = self._since or time.monotonic()
            self._filled.set()
            log.warning("the store is unavailable, calls go to the spool: %s", str(error) or "a commit took too long")
            return False
        return True

    async def _append(self, facts: Sequence[EncodedFact]) -> bool:
        """Appends the facts to the spool. False if it was drained in the meantime: then the store accepts them."""
        async with self._appending:
            if not self._away and self._emptied.is_set():
                return False
            records: list[bytes] = []
            room = {new: self._spool.room(for_new_calls=new) for new in (True, False)}
            for fact in facts:
                record = pack_fact(fact)
                size = self._spool.size(record)
                if size > room[fact.table is call_intents]:
                    message = "the store is unavailable and the spool is full"
                    fact.failure = StoreUnavailable(message, retry_after=RETRY_AFTER_S)
                    continue
                room = {new: left - size for new, left in room.items()}
                records.append(record)
            if records:
                await self._worker.run(lambda: self._spool.append(records))
                crash_point("spool.appended")
                self._emptied.clear()
                self._filled.set()  # also if the spool was just being cleared
            return True

    async def settled(self) -> None:
        try:
            async with asyncio.timeout(BACK_WITHIN_S):
                while self._away:  # noqa: ASYNC110  no event tells when the store is back
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            message = "the store is unavailable; calls wait in the spool"
            raise StoreUnavailable(message, retry_after=RETRY_AFTER_S) from None
        try:
            async with asyncio.timeout(CATCH_UP_S):
                await self._emptied.wait()
                while any(map(holds_records, self._others)):  # noqa: ASYNC110  another process empties it
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise StoreUnavailable("the store is catching up with the spool", retry_after=RETRY_AFTER_S) from None
        await self._store.settled()

    async def _run(self) -> None:
        while True:
            await self._filled.wait()
            await asyncio.sleep(self._probe_s)
            with suppress(StoreUnavailable):
                await self._drain()

    async def _drain(self) -> None:
        """Moves the spool to the store. Raises `StoreUnavailable` if not even one fact is written in time."""
        while True:
            try:
                await self._move_all()
            except StoreUnavailable:
                self._away = True
                raise
            except TimeoutError:
                self._away = True
                if self._batch == 1:
                    raise StoreUnavailable("the store is too slow", retry_after=RETRY_AFTER_S) from None
                self._batch = max(1, self._batch // 8)
            else:
                return

    async def _move_all(self) -> None:
        """Empties the spool. New facts wait while the last batch is moved."""
        while await self._move_batch() and self._leaves_many():
            pass
        async with self._appending:
            while await self._move_batch():
                pass
            if self._moved < self._spool.count:
                copy = await self._worker.run(self._spool.keep_copy)
                log.error("cannot read %d facts of the spool; it is kept as %s", self._spool.count - self._moved, copy)
            crash_point("spool.drained")
            await self._worker.run(self._spool.clear)
            log.warning("the store is back: %d facts were moved from the spool to it", self._moved)
            self._position, self._moved = START, 0
            self._away, self._since = False, None
            self._filled.clear()
            self._emptied.set()

    def _leaves_many(self) -> bool:
        """Whether more than one batch is left."""
        return self._spool.count - self._moved > self._batch or self._spool.left(self._position) > DRAIN_BYTES

    async def _move_batch(self) -> bool:
        """Moves the oldest facts of the spool; False if no readable one is left. Raises `TimeoutError`."""
        records, position = await self._worker.run(lambda: self._spool.read(self._position, self._batch, DRAIN_BYTES))
        if not records:
            return False
        async with asyncio.timeout(self._stall_s):
            await self._move(records)
        self._away = False
        self._position = position
        self._moved += len(records)
        self._batch = min(DRAIN, 2 * self._batch)
        return True

    async def _move(self, records: Sequence[bytes]) -> None:
        facts: list[EncodedFact] = []
        for record in records:
            try:
                facts.append(unpack_fact(record))
            except RecordCorrupt as error:
                await self._set_aside(record, str(error))
        await self._store.write(facts)
        for fact in facts:
            if fact.failure is not None:
                await self._set_aside(pack_fact(fact), f"{fact.name}: {fact.failure}")

    async def _set_aside(self, record: bytes, reason: str) -> None:
        self._refused += 1
        path = await self._worker.run(lambda: self._spool.set_aside(record))
        log.error("the store refused a fact of the spool; it is kept in %s: %s", path, reason)
