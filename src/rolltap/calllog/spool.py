"""A bounded file of facts for the time when the store is unavailable. A fact is durable when `append` returns.

The file's disk space is allocated when it is created, so that it works on a full disk. Records follow each other from
`START` on: length, CRC-32, bytes. The CRC includes the file's generation, which grows when the spool is emptied. So
remains of an older generation or of an incomplete write are not read as records.

Only one process uses a spool at a time.
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


def holds_records(path: Path) -> bool:
    """Whether a spool contains records. Another process may have it open."""
    try:
        with path.open("rb", buffering=0) as file:
            header = file.read(_HEADER.size)
            file.seek(START)
            length, crc = _RECORD.unpack(file.read(_RECORD.size))
            record = file.read(length) if length else b""
    except (OSError, struct.error):
        return False
    return bool(record) and _crc(_HEADER.unpack(header)[1], record) == crc
