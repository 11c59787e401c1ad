"""The archive file of `rolltap log export|import`, to keep sessions or to move them between stores.

The file is a magic line, then one zstd frame of records: a length (8 bytes, little endian) and that many bytes of
msgpack. A `Block` is a session with its rows exactly as stored, including notes and annotations, so nothing is lost or
re-encoded. A large request part is in the first block that needs it. The last record, `End`, has the counts and the
SHA-256 of the blocks: a file without it was cut off. Importing also checks the rows' own hashes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import zstandard

from rolltap.decoding import msgpack_decoder
from rolltap.errors import ConfigError, RecordCorrupt, StoreUnavailable

MAGIC = b"rolltap call log 1\n"
LEVEL = 6
MAX_RECORD_BYTES = 4 << 30


class Block(msgspec.Struct, array_like=True, frozen=True, tag="session"):
    """A session's rows, in the order of their tables' columns. `pruning`: the row about removed calls, if any.

    In files of earlier versions a block ends with `pruning`; it has no notes and no annotations.
    """

    session: list[Any]
    parts: list[tuple[bytes, bytes]]
    intents: list[list[Any]]
    completions: list[list[Any]]
    deliveries: list[list[Any]]
    pruning: list[Any] | None
    notes: list[list[Any]] = []
    annotations: list[list[Any]] = []

    def digest(self) -> bytes:
        """SHA-256 of the block's row ids and checksums: see `calls_digest`."""
        return calls_digest(
            ((row[0], row[_CRC_OF_INTENT]) for row in self.intents),
            ((row[0], row[_CRC_OF_COMPLETION]) for row in self.completions),
            ((row[0], row[1]) for row in self.deliveries),
            ((row[0], row[1]) for row in self.annotations),
        )


class End(msgspec.Struct, array_like=True, frozen=True, tag="end"):
    """The last record."""

    sessions: int
    calls: int
    sha256: bytes


_CRC_OF_INTENT, _CRC_OF_COMPLETION = 10, 6
_encoder = msgspec.msgpack.Encoder()
_decoder = msgpack_decoder(Block | End)


def calls_digest(
    intents: Iterable[tuple[str, int]],
    completions: Iterable[tuple[str, int]],
    deliveries: Iterable[tuple[str, bool]],
    annotations: Iterable[tuple[str, int]],
) -> bytes:
    """SHA-256 of the rows that pruning removes: calls by id and row checksum, deliveries, and annotations by call and
    fencing token (an annotation never changes)."""
    tables = (intents, completions, deliveries, annotations)
    lines = [sorted((key, int(value)) for key, value in rows) for rows in tables]
    return hashlib.sha256(_encoder.encode(lines)).digest()


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
            self._file = self._partial.open("wb")
            self._partial.chmod(0o600)
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
                    _sync_folder(self._path.parent)
        finally:
            self._file.close()
            self._partial.unlink(missing_ok=True)


def read_archive(path: Path) -> Iterator[Block]:
    """Yields the sessions of a file. Raises `RecordCorrupt` at the end if it is cut off or damaged."""
    with _file_errors(path), path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise RecordCorrupt(f"{path} is not a file of `rolltap log export`")
        sessions = calls = 0
        sha256 = hashlib.sha256()
        for data, record in _records(path, file):
            if isinstance(record, End):
                if record != End(sessions, calls, sha256.digest()):
                    raise RecordCorrupt(f"{path} is damaged: its {sessions} sessions don't match its final checksum")
                return
            sha256.update(data)
            sessions += 1
            calls += len(record.intents)
            yield record
    raise RecordCorrupt(f"{path} is cut off after {sessions} sessions")


def _records(path: Path, file: BinaryIO) -> Iterator[tuple[bytes, Block | End]]:
    stream = zstandard.ZstdDecompressor().stream_reader(file, closefd=False)
    try:
        while length := stream.read(8):
            size = int.from_bytes(length, "little")
            if size > MAX_RECORD_BYTES:
                raise RecordCorrupt(f"{path}: a record of {size} bytes")
            data = stream.read(size)
            if len(data) < size:
                return
            yield data, _decoder.decode(data)
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise RecordCorrupt(f"{path} is damaged: {error}") from error


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"{path}: {error.strerror or error}") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
