"""Where a dataset is written: a folder that appears only when it is complete, or nowhere (a dry run)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters.base import Container
from rolltap.reconstructor.exporters.figures import card
from rolltap.reconstructor.exporters.writers import FILES, RowFile, Shards

MANIFEST = "manifest.json"
CARD = "README.md"


def encoded(manifest: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


class SplitRows(Protocol):
    """The rows of one split while it is written. `size` is approximate, in bytes."""

    @property
    def size(self) -> int: ...

    def write(self, values: Mapping[str, Any]) -> None: ...

    def finish(self) -> list[dict[str, Any]]:
        """Closes the files. Returns the manifest's entry for each."""
        ...

    def drop(self) -> None:
        """Closes and discards open files."""
        ...


class Destination(Protocol):
    """Call `begin` once, then `finish` and `drop`, or only `drop` if the export failed."""

    def begin(self) -> None: ...

    def split(self, name: str, container: Container, schema: Mapping[str, str], size: int) -> SplitRows: ...

    def finish(self, manifest: Mapping[str, Any]) -> None: ...

    def drop(self) -> None: ...


class NewFolder:
    """A new or empty folder. Files are written to a hidden folder beside it, which is renamed at the end."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._part = out.parent / f".{out.name}.part"

    def begin(self) -> None:
        if self._out.exists() and (not self._out.is_dir() or any(self._out.iterdir())):
            raise DatasetError(f"{self._out} exists and is not empty; name another folder or remove it")
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self.drop()
        self._part.mkdir(mode=0o700)

    def split(self, name: str, container: Container, schema: Mapping[str, str], size: int) -> SplitRows:
        return Shards(self._part, name, container, schema, size)

    def finish(self, manifest: Mapping[str, Any]) -> None:
        (self._part / MANIFEST).write_bytes(encoded(manifest))
        (self._part / CARD).write_text(card(manifest, manifest["files"]), encoding="utf-8")
        for path in self._part.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)  # prompts and replies are private, whatever the umask
        self._part.rename(self._out)

    def drop(self) -> None:
        shutil.rmtree(self._part, ignore_errors=True)


class DryRun:
    """Encodes rows, to find those that can't be encoded, and discards them."""

    def begin(self) -> None:
        pass

    def split(self, name: str, container: Container, schema: Mapping[str, str], size: int) -> SplitRows:
        return _Discarded(FILES[container](Path(os.devnull), schema))

    def finish(self, manifest: Mapping[str, Any]) -> None:
        pass

    def drop(self) -> None:
        pass


class _Discarded:
    """A split that is written to the null device."""

    def __init__(self, file: RowFile) -> None:
        self._file = file

    @property
    def size(self) -> int:
        return self._file.size

    def write(self, values: Mapping[str, Any]) -> None:
        self._file.write(values)

    def finish(self) -> list[dict[str, Any]]:
        self._file.close()
        return []

    def drop(self) -> None:
        self._file.drop()
