"""A selection of the list of sessions as files: its ids, and a dataset."""

from __future__ import annotations

import asyncio
import io
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rolltap.calllog.sql import SqlCallLog
from rolltap.datasets.record import ReadOptions, chosen_groups
from rolltap.errors import InvalidRequest
from rolltap.reading import RecordReader
from rolltap.reading.types import SessionQuery
from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.consumers import layout
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query
from rolltap.reconstructor.exporters.grouping import Grouping
from rolltap.threads import in_thread

MOST_SESSIONS = 2000
"""Maximum sessions of a dataset for a browser; the command has no limit."""

IDS_PAGE = 1000


@dataclass(eq=False)
class Selections:
    """Makes the files that a browser downloads from the list."""

    reader: RecordReader

    async def ids(self, query: SessionQuery, most: int) -> str:
        """Returns the ids of all sessions that the query finds, at most `most`, one per line."""
        return "".join(f"{id}\n" for id in await self._ids(query, most))

    async def dataset(self, query: SessionQuery, format: str, picked: Sequence[str] = ()) -> bytes:
        """Returns a zip of the dataset with its manifest: of the sessions `picked`, else of those that the query finds.

        `format` is one of `layouts`, such as `sft for trl`. Raises `InvalidRequest` for 0 or over `MOST_SESSIONS`.
        """
        chosen, _, reader = format.partition(" for ")
        name, options, container = layout(chosen, reader, {})
        ids = list(picked) or await self._ids(query, MOST_SESSIONS + 1)
        if not ids:
            raise InvalidRequest("no session matches: there is nothing to export")
        if len(ids) > MOST_SESSIONS:
            raise InvalidRequest(f"a browser gets up to {MOST_SESSIONS} sessions; run the command for more")
        log = self.reader.log
        assert isinstance(log, SqlCallLog)
        with tempfile.TemporaryDirectory(prefix="rolltap-") as folder:
            out = Path(folder) / "dataset"
            with DatasetWriter(out, exporter_named(name, options), Query(container=container)) as writer:
                read_options = ReadOptions("tree", self.reader.rules, lambda session: (), Grouping())
                async for group in chosen_groups(log, read_options, ids, writer.fail):
                    await in_thread(writer.add, group)
                await in_thread(writer.finish)
            return await asyncio.to_thread(_zip_folder, out)

    async def _ids(self, query: SessionQuery, most: int) -> list[str]:
        await self.reader.settle(texts=bool(query.search))
        ids: list[str] = []
        while len(ids) < most:
            page = await self.reader.sessions(replace(query, offset=len(ids), limit=min(IDS_PAGE, most - len(ids))))
            ids += [session.id for session in page.sessions]
            if not page.sessions:
                break
        return ids


def _zip_folder(folder: Path) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, str(path.relative_to(folder.parent)))
    return out.getvalue()
