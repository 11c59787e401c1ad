"""Lazy tables over the record: rows come a page at a time, and only when somebody iterates or makes a frame."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from rolltap.records import frames
from rolltap.records.notebook import table_html

if TYPE_CHECKING:
    import datasets
    import pandas
    import pyarrow

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Show = Callable[[int, int], None]
"""Told how many sessions have been read, and of how many."""

SHOWN = 20


@dataclass(frozen=True, slots=True)
class Portion(Generic[T]):
    """Some rows, and how far the reading has come, counted in sessions."""

    rows: Sequence[T]
    done: int
    total: int


Portions = Callable[[], AsyncIterator[Portion[T]]]


class RunsCoroutines(Protocol):
    """Runs coroutines for callers that are not asynchronous."""

    def run(self, work: Coroutine[Any, Any, T]) -> T: ...


class AsyncTable(Generic[T]):
    """Rows of one kind: `async for row in table`, or all of them as a frame."""

    def __init__(self, kind: type[T], portions: Portions[T]) -> None:
        self.kind = kind
        self._portions = portions

    async def __aiter__(self) -> AsyncIterator[T]:
        async for portion in self._portions():
            for row in portion.rows:
                yield row

    async def first(self) -> T | None:
        async for row in self:
            return row
        return None

    async def rows(self, *, progress: bool | None = None) -> list[T]:
        """All of them. `progress` shows how far it is; by default where somebody looks at a terminal."""
        rows: list[T] = []
        with shown(progress, self.kind.__name__) as show:
            async for portion in self._portions():
                rows += portion.rows
                show(portion.done, portion.total)
        return rows

    async def to_pandas(self, *, progress: bool | None = None) -> pandas.DataFrame:
        """A data frame, a row each; per-token columns hold NumPy arrays."""
        return frames.to_pandas(self.kind, await self.rows(progress=progress))

    async def to_arrow(self, *, progress: bool | None = None) -> pyarrow.Table:
        return frames.to_arrow(self.kind, await self.rows(progress=progress))

    async def to_datasets(self, *, progress: bool | None = None) -> datasets.Dataset:
        return frames.to_datasets(self.kind, await self.rows(progress=progress))


class Table(Generic[T]):
    """Rows of one kind: `for row in table`, or all of them as a frame. The blocking twin of `AsyncTable`."""

    def __init__(self, twin: AsyncTable[T], loop: RunsCoroutines) -> None:
        self._twin = twin
        self._loop = loop

    def __iter__(self) -> Iterator[T]:
        portions = self._twin._portions()
        try:
            while (portion := self._loop.run(_next(portions))) is not None:
                yield from portion.rows
        finally:
            self._loop.run(_end(portions))

    def first(self) -> T | None:
        return next(iter(self), None)

    def rows(self, *, progress: bool | None = None) -> list[T]:
        """All of them. `progress` shows how far it is; by default where somebody looks at a terminal."""
        return self._loop.run(self._twin.rows(progress=progress))

    def to_pandas(self, *, progress: bool | None = None) -> pandas.DataFrame:
        """A data frame, a row each; per-token columns hold NumPy arrays."""
        return self._loop.run(self._twin.to_pandas(progress=progress))

    def to_arrow(self, *, progress: bool | None = None) -> pyarrow.Table:
        return self._loop.run(self._twin.to_arrow(progress=progress))

    def to_datasets(self, *, progress: bool | None = None) -> datasets.Dataset:
        return self._loop.run(self._twin.to_datasets(progress=progress))

    def _repr_html_(self) -> str:
        """The first rows, for a notebook."""
        rows: list[T] = []
        for row in self:
            if len(rows) == SHOWN:
                return table_html(self._twin.kind, rows, more=True)
            rows.append(row)
        return table_html(self._twin.kind, rows, more=False)


async def _next(portions: AsyncIterator[Portion[T]]) -> Portion[T] | None:
    return await anext(portions, None)


async def _end(portions: AsyncIterator[Any]) -> None:
    await portions.aclose()  # type: ignore[attr-defined]


@contextmanager
def shown(progress: bool | None, what: str) -> Iterator[Show]:
    """A progress bar on stderr, if it is wanted; it goes away at the end."""
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield lambda done, total: None
        return
    from rich.progress import Progress

    from rolltap.cli.screen import Screen

    with Progress(console=Screen(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
