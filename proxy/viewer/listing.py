"""The address of the list of sessions, and a selection of the list as files.

An address has words, conditions, order and page; each link changes one of them. The address determines what the list
shows, so it can be bookmarked and shared. The files of a selection are its ids, or a dataset.
"""

from __future__ import annotations

import asyncio
import io
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, get_args
from urllib.parse import urlencode

from rolltap.calllog.database import in_thread
from rolltap.calllog.sql import SqlCallLog
from rolltap.datasets.record import ReadOptions, chosen_groups
from rolltap.errors import DatasetError, InvalidRequest
from rolltap.reading.index import FIELDS
from rolltap.reading.reader import RecordReader
from rolltap.reading.types import Facet, SessionOrder, SessionQuery
from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.consumers import layout
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Grouping, Query
from rolltap.reconstructor.exporters.where import parse_parts

PAGE = 50
ORDERS: tuple[SessionOrder, ...] = get_args(SessionOrder)


@dataclass(frozen=True, slots=True)
class ListAddress:
    """An address of the list. `where`: as `rolltap export` has it, over fields of sessions."""

    search: str = ""
    where: str = ""
    sort: SessionOrder = "created_at"
    ascending: bool = False
    offset: int = 0

    @property
    def query(self) -> SessionQuery:
        """Returns the query of its page."""
        conditions = (self.where.strip(),) if self.where.strip() else ()
        return SessionQuery(self.search.strip(), conditions, self.sort, not self.ascending, PAGE, self.offset)

    @property
    def filtered(self) -> bool:
        return bool(self.search.strip() or self.where.strip())

    @property
    def selection(self) -> str:
        """Returns the part of the address that names the sessions and their order, as a query string."""
        order = "asc" if self.ascending else ""
        values = {"q": self.search, "where": self.where, "sort": self.sort, "order": order}
        return urlencode({name: value for name, value in values.items() if value})

    @property
    def href(self) -> str:
        values = {"q": self.search, "where": self.where, "sort": self.sort if self.sort != "created_at" else ""}
        values |= {"order": "asc" if self.ascending else "", "offset": str(self.offset or "")}
        query = urlencode({name: value for name, value in values.items() if value})
        return f"/view/?{query}" if query else "/view/"

    def at(self, offset: int) -> str:
        return replace(self, offset=max(0, offset)).href

    def sorted_by(self, sort: SessionOrder) -> str:
        """Returns the link of a column's heading: the largest first, and the other way round at the second click."""
        return replace(self, sort=sort, ascending=self.sort == sort and not self.ascending, offset=0).href

    def aria_sort(self, sort: str) -> str:
        return ("ascending" if self.ascending else "descending") if self.sort == sort else ""

    def conditions(self) -> list[str]:
        """Returns the parts of its `where` that `and` joins, one by one. Empty if they can't be read."""
        try:
            return [each.text for each in parse_parts([self.where], FIELDS)]
        except DatasetError:
            return []

    def has(self, condition: str) -> bool:
        return set(_parts(condition)) <= set(map(_bare, self.conditions()))

    def toggled(self, condition: str) -> str:
        """Returns the link that adds a condition, or takes it away if the address has it."""
        parts = _parts(condition)
        kept = [each for each in self.conditions() if _bare(each) not in parts]
        added = [] if self.has(condition) else [condition]
        return replace(self, where=" and ".join([*kept, *added]), offset=0).href

    def without(self, condition: str) -> str:
        """Returns the link without one of its `conditions`."""
        kept = [each for each in self.conditions() if each != condition]
        return replace(self, where=" and ".join(kept), offset=0).href

    def only(self, field: str, condition: str) -> str:
        """Returns the link with this condition on the field instead of others; none for an empty one."""
        kept = [each for each in self.conditions() if not _bare(each).startswith(f"{field}=")]
        return replace(self, where=" and ".join([*kept, *filter(None, [condition])]), offset=0).href


def _parts(condition: str) -> list[str]:
    return [_bare(each.text) for each in parse_parts([condition], FIELDS)]


def _bare(condition: str) -> str:
    """A condition without the spaces that a user may write around its operator."""
    return condition.replace(" ", "")


def address_of(search: str, where: str, sort: str, order: str = "", offset: int = 0) -> ListAddress:
    """Returns the address for the parameters of a request; an unknown order is the newest first."""
    known = cast(SessionOrder, sort) if sort in ORDERS else "created_at"
    return ListAddress(search, where, known, order == "asc", max(0, offset))


@dataclass(frozen=True, slots=True)
class FacetLink:
    """A value of a facet as a link that adds or takes away its condition."""

    text: str
    count: int
    href: str
    chosen: bool


def facet_links(address: ListAddress, facets: Sequence[Facet]) -> list[tuple[str, list[FacetLink]]]:
    """Returns the facets by name."""
    return [
        (
            facet.name,
            [
                FacetLink(each.text, each.count, address.toggled(each.where), address.has(each.where))
                for each in facet.values
            ],
        )
        for facet in facets
    ]


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
