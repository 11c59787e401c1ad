"""`--state FILE`: a growing dataset. Each run appends what has ended since the last run, and completes a killed one.

The dataset consists of parts, each written like a dataset of its own (`DatasetWriter`); `merged` makes one manifest of
theirs. A finished part is entered in the state, in one transaction with its units (groups, sessions without a group);
then its files are moved into the dataset. The next run deletes a part that is not in the state, and moves one that is
there but was not moved. So whenever a run is killed, each unit is in the dataset exactly once.

A unit is exported once, when all of it has ended (`ExportItem.settled`); until then it waits for a later run.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.reconstructor.exporters.dataset import DatasetWriter
from rolltap.reconstructor.exporters.destinations import CARD, MANIFEST, card, encoded
from rolltap.reconstructor.exporters.writers import disk_errors
from rolltap.reconstructor.report import report_from, total

TABLES = """
create table if not exists parts (number integer primary key, manifest blob not null);
create table if not exists units (id text primary key) without rowid;
create table if not exists contents (digest blob primary key, claim blob not null) without rowid;
create table if not exists tasks (split text, id text, primary key (split, id)) without rowid;
"""


class ExportState:
    """The contents of a growing dataset, in a SQLite file. Raises `DatasetError` while another export uses the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._errors():  # several threads use it, but never two at once
            self._connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
            self._connection.execute("pragma locking_mode = exclusive")
            self._connection.execute("pragma synchronous = full")
            self._connection.execute("begin immediate")
            for table in filter(None, map(str.strip, TABLES.split(";"))):
                self._connection.execute(table)
            self._connection.execute("commit")
            columns = {row[1] for row in self._connection.execute("pragma table_info(contents)")}
        if "claim" not in columns:
            self.close()
            raise DatasetError(f"--state: {path}: an earlier release wrote it; begin a new dataset with a new file")

    def close(self) -> None:
        self._connection.close()

    @property
    def units(self) -> set[str]:
        return {row[0] for row in self._rows("select id from units")}

    @property
    def contents(self) -> dict[bytes, bytes]:
        """As `DatasetWriter.contents`."""
        return dict(self._rows("select digest, claim from contents"))

    @property
    def parts(self) -> dict[int, dict[str, Any]]:
        """The manifests of the parts, by number."""
        return {row[0]: msgspec.json.decode(row[1]) for row in self._rows("select * from parts order by number")}

    def tasks(self, split: str) -> int:
        return self._rows("select count(*) from tasks where split = ?", split)[0][0]

    def enter(self, number: int, manifest: Mapping[str, Any], units: Sequence[str], writer: DatasetWriter) -> None:
        """Enters a part with its units, contents and tasks, in one transaction."""
        with self._errors():
            run = self._connection.execute
            run("begin immediate")
            run("insert into parts values (?, ?)", (number, msgspec.json.encode(manifest)))
            many = self._connection.executemany
            many("insert into units values (?)", [(unit,) for unit in units])
            many("insert or ignore into contents values (?, ?)", writer.contents.items())
            tasks = [(split, task) for split, ids in writer.tasks.items() for task in ids]
            many("insert or ignore into tasks values (?, ?)", tasks)
            run("commit")

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with self._errors():
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            reason = "another export is using it" if "locked" in str(error) else error
            raise DatasetError(f"--state: {self._path}: {reason}") from None
        except sqlite3.DatabaseError as error:
            raise DatasetError(f"--state: {self._path} is not a state of an export: {error}") from None


class GrowingDataset:
    """Used like `DatasetWriter`: takes groups, and `finish` returns the manifest of the whole dataset.

    `part(folder, known)` returns the writer of a part; `known` are the contents of earlier ones. A part ends at about
    `part_bytes`.
    """

    def __init__(
        self, out: Path, state: Path, part: Callable[[Path, Mapping[bytes, bytes]], DatasetWriter], part_bytes: float
    ) -> None:
        self._out = out
        self._parts = out.parent / f".{out.name}.parts"
        self._state = ExportState(state)
        self._make = part
        self._part_bytes = part_bytes
        self._writer: DatasetWriter | None = None
        self._pending: list[str] = []
        self.waiting = 0

    def __enter__(self) -> GrowingDataset:
        try:
            with disk_errors(self._out):
                parts = self._state.parts
                self._check(parts)
                for number, manifest in parts.items():
                    self._move(number, manifest)
                shutil.rmtree(self._parts, ignore_errors=True)
                self._units, self._contents = self._state.units, self._state.contents
                self._number = max(parts, default=-1) + 1
        except BaseException:
            self._state.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.__exit__(kind, error, at)
        self._state.close()

    def add(self, group: Sequence[ExportItem]) -> None:
        """Adds a group if all of it has ended and no earlier run added it."""
        unit = group[0].group_id or group[0].session.id
        if unit in self._units:
            return
        if not all(item.settled for item in group):
            self.waiting += len(group)
            return
        writer = self._enter(unit)
        writer.add(group)
        if writer.size >= self._part_bytes:
            self._commit()

    def fail(self, session_id: str, error: Exception) -> None:
        """Counts a session that can't be read, in the first run that meets it."""
        unit = f"unreadable {session_id}"  # a session that is mended later is a unit of its own
        if unit not in self._units:
            self._enter(unit).fail(session_id, error)

    def _enter(self, unit: str) -> DatasetWriter:
        """The writer of the part that the unit belongs to."""
        if self._writer is None:
            self._writer = self._make(self._folder(self._number), self._contents)
            self._writer.__enter__()
        self._units.add(unit)
        self._pending.append(unit)
        return self._writer

    def finish(self) -> dict[str, Any]:
        """Enters the last part. Returns the manifest of all parts, with the number of sessions that wait."""
        if self._writer is None and not self._state.parts:  # the first run writes a dataset even without rows
            self._writer = self._make(self._folder(self._number), self._contents)
            self._writer.__enter__()
        if self._writer is not None:
            self._commit()
        with disk_errors(self._out):
            shutil.rmtree(self._parts, ignore_errors=True)
            return self._describe(self._state.parts)

    def _commit(self) -> None:
        assert self._writer is not None
        with disk_errors(self._out):
            writer, self._writer = self._writer, None
            manifest = writer.finish()
            self._state.enter(self._number, manifest, self._pending, writer)
            self._contents |= writer.contents
            self._move(self._number, manifest)
            self._describe(self._state.parts)
        self._pending = []
        self._number += 1

    def _folder(self, number: int) -> Path:
        return self._parts / f"{number:05d}"

    def _check(self, parts: Mapping[int, Mapping[str, Any]]) -> None:
        """Raises `DatasetError` if the folder or a file is not this state's, or the query is not the earlier parts'."""
        if not parts:
            if self._out.exists() and (not self._out.is_dir() or any(self._out.iterdir())):
                raise DatasetError(f"{self._out} exists and is not empty, and --state knows nothing of it")
            return
        query = msgspec.json.decode(msgspec.json.encode(self._make(self._folder(0), {}).asked))
        for name, value in query.items():
            before = next(iter(parts.values()))[name]
            if name == "query":  # an older release knew fewer of its parts
                value = {part: value[part] for part in value if part in before}
            if before != value:
                raise DatasetError(f"--state: {self._out} was made with {name} {before}, not {value}")
        for number, manifest in parts.items():
            for file in manifest["files"]:
                name = _name(number, file["path"])
                if not (self._out / name).exists() and not (self._folder(number) / file["path"]).exists():
                    raise DatasetError(f"--state: {self._out / name} is gone")

    def _move(self, number: int, manifest: Mapping[str, Any]) -> None:
        """Moves a part's files into the dataset, except those that an earlier run moved."""
        self._out.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in manifest["files"]:
            source = self._folder(number) / file["path"]
            if source.exists():
                source.rename(self._out / _name(number, file["path"]))

    def _describe(self, parts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """Writes the manifest and the card of all parts."""
        named = [
            {**manifest, "files": [{**file, "path": _name(number, file["path"])} for file in manifest["files"]]}
            for number, manifest in parts.items()
        ]
        manifest = merged(named)
        for split, figures in manifest["splits"].items():
            figures["tasks"] = self._state.tasks(split)
        manifest["sessions_waiting"] = self.waiting
        for name, text in ((MANIFEST, encoded(manifest)), (CARD, card(manifest, manifest["files"]).encode())):
            temporary = self._out / f".{name}"
            temporary.write_bytes(text)
            temporary.chmod(0o600)
            temporary.rename(self._out / name)
        return manifest


def _name(number: int, path: str) -> str:
    """`train-00000-of-00001.parquet` of part 3 is `train-p00003-00000-of-00001.parquet`."""
    split, rest = path.split("-", 1)
    return f"{split}-p{number:05d}-{rest}"


ADDED = (
    "rows", "splits", "lengths", "files", "sessions", "sessions_selected", "sessions_left_out", "duplicates_left_out",
    "near_duplicates_left_out", "rows_with_secrets_left_out", "secrets_redacted", "secrets_by_kind", "skipped",
    "failed", "rerendered",
)  # fmt: skip


def merged(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One manifest: counts are added, other values are the last part's. A task in two parts counts twice."""
    result = dict(manifests[-1])
    for name in ADDED:
        if name in result:
            values = [manifest[name] for manifest in manifests]
            result[name] = values[0]
            for value in values[1:]:
                result[name] = _sum(result[name], value)
    result["policies"] = _policies([manifest["policies"] for manifest in manifests])
    result["reconstruction"] = total(report_from(manifest["reconstruction"]) for manifest in manifests).to_dict()
    return result


def _sum(first: Any, second: Any) -> Any:
    if isinstance(first, Mapping):
        return {
            name: _sum(first[name], second[name]) if name in first and name in second else {**second, **first}[name]
            for name in [*first, *(name for name in second if name not in first)]
        }
    if isinstance(first, list):
        return [*first, *second]
    return first if second is None else second if first is None else first + second


def _policies(parts: Sequence[Mapping[str, Mapping[str, int | None]]]) -> dict[str, dict[str, int | None]]:
    """The oldest and newest version of each policy."""
    policies: dict[str, dict[str, int | None]] = {}
    for part in parts:
        for name, versions in part.items():
            before = policies.setdefault(name, {"oldest_version": None, "newest_version": None})
            for key, choose in (("oldest_version", min), ("newest_version", max)):
                known = [value for value in (before[key], versions[key]) if value is not None]
                before[key] = choose(known, default=None)
    return dict(sorted(policies.items()))
