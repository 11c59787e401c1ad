"""A bounded file of facts, each durable when `append` returns: where they wait while the store is away.

The file's room is taken on the disk when it is made, so that it works on a disk that is full. Records follow each
other from `START` on: length, CRC-32, bytes. The CRC begins with the file's generation, which grows when the spool
is emptied, so what is left of an older generation, or of a write that was cut off, is not taken for a record.

One process uses a spool at a time.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from rolltap.errors import ConfigError, RecordCorrupt, StoreUnavailable

_MAGIC = b"rolltap1"
_HEADER = struct.Struct("<8sQI")  # magic, generation, CRC-32 of both
_RECORD = struct.Struct("<II")  # length, CRC-32 of generation and bytes
START = 64

OPEN_SHARE = 0.75
"""New calls may fill this share; the rest is for the ends of calls that are under way."""

RETRY_AFTER_S = 5.0


class Spool:
    """Not thread-safe: one call at a time."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._file = -1
        self._generation = 0
        self._end = START
        self.count = 0
        """How many records wait."""

    def open(self) -> None:
        """Opens or makes the file; records of an earlier process are still there."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"the spool {self._path} is in use by another process; give each its own `data` folder"
            ) from None
        try:
            self._recover()
            os.posix_fallocate(self._file, 0, max(self._limit, self._end))
        except OSError as error:
            self.close()
            raise StoreUnavailable(f"no room for the spool {self._path}: {error.strerror}") from error

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
        """How many bytes may still be appended, for an intent or for what follows one."""
        limit = self._limit * OPEN_SHARE if for_new_calls else self._limit
        return int(limit) - self._end

    def left(self, position: int) -> int:
        """How many bytes of records there are from `position` on."""
        return self._end - position

    @staticmethod
    def size(record: bytes) -> int:
        """The room that a record takes."""
        return _RECORD.size + len(record)

    def append(self, records: Sequence[bytes]) -> None:
        """Returns when the records are on the disk; the caller has seen to it that there is room."""
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

    def read(self, position: int = START, count: int = 1 << 62, most_bytes: int = 1 << 62) -> tuple[list[bytes], int]:
        """Up to `count` records from `position` on, oldest first, and the position after them.

        A record that begins `most_bytes` after `position` is left for the next time.
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
        """Keeps a record that the store refused beside the spool; returns where."""
        path = self._path.with_name(self._path.name + ".refused")
        with path.open("ab") as file:
            file.write(_RECORD.pack(len(record), zlib.crc32(record)) + record)
            file.flush()
            os.fsync(file.fileno())
        return path

    def keep_copy(self) -> Path:
        """Copies the whole file aside; returns where."""
        path = self._path.with_name(f"{self._path.name}.damaged-{self._generation}")
        shutil.copyfile(self._path, path)
        return path

    def clear(self) -> None:
        """Forgets everything: it is in the store."""
        self._write_header(self._generation + 1)

    def _crc(self, record: bytes) -> int:
        return _crc(self._generation, record)


def _crc(generation: int, record: bytes) -> int:
    return zlib.crc32(record, zlib.crc32(struct.pack("<Q", generation)))


def holds_records(path: Path) -> bool:
    """Whether a spool, which another process may have open, holds records."""
    try:
        with path.open("rb", buffering=0) as file:
            header = file.read(_HEADER.size)
            file.seek(START)
            length, crc = _RECORD.unpack(file.read(_RECORD.size))
            record = file.read(length) if length else b""
    except (OSError, struct.error):
        return False
    return bool(record) and _crc(_HEADER.unpack(header)[1], record) == crc
