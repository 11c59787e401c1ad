"""Lazy tables over the record: rows are read page by page, when the table is iterated or converted to a frame.

In a notebook, sessions and tables are displayed as HTML. All recorded text is escaped: it may contain anything.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from rolltap.errors import ConfigError
from rolltap.extras import install_line
from rolltap.reading.types import CallTurn, MessageView, SessionDetail
from rolltap.wording import utc_text

if TYPE_CHECKING:
    import datasets
    import pandas
    import pyarrow


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Show = Callable[[int, int], None]
"""Called with the number of sessions read so far, and their total."""

SHOWN = 20


@dataclass(frozen=True, slots=True)
class Portion(Generic[T]):
    """Some rows, and the progress of reading, in sessions."""

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
        return pandas_of(self.kind, await self.rows(progress=progress))

    async def to_arrow(self, *, progress: bool | None = None) -> pyarrow.Table:
        return arrow_of(self.kind, await self.rows(progress=progress))

    async def to_datasets(self, *, progress: bool | None = None) -> datasets.Dataset:
        return datasets_of(self.kind, await self.rows(progress=progress))


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
    from rich.console import Console  # it prints a type's name and numbers
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def pandas_of(kind: type, rows: Sequence[Any]) -> pandas.DataFrame:
    pandas = _needs("pandas")
    return pandas.DataFrame.from_records([_values(row) for row in rows], columns=_names(kind))


def arrow_of(kind: type, rows: Sequence[Any], *, maps: bool = True) -> pyarrow.Table:
    """The rows as a table. Types of columns are those of the rows' fields, so empty tables have them, too.

    Without `maps` a table in a field is JSON text.
    """
    pa = _needs("pyarrow")
    hints = get_type_hints(kind)
    columns = {}
    for name in _names(kind):
        arrow = _arrow_type(hints[name], pa)
        if pa.types.is_map(arrow) and not maps:
            arrow = pa.string()
        columns[name] = pa.array([_plain(getattr(row, name), arrow, pa) for row in rows], type=arrow)
    return pa.table(columns)


def datasets_of(kind: type, rows: Sequence[Any]) -> datasets.Dataset:
    """The rows as a dataset, whose types have no maps."""
    return _needs("datasets").Dataset(arrow_of(kind, rows, maps=False))


def _needs(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        line = install_line("export") if package == "pyarrow" else f"pip install {package}"
        raise ConfigError(f"this needs {package}: {line}") from None


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def _values(row: Any) -> dict[str, Any]:
    """A row's fields; values that are objects themselves become plain structures."""
    values = {name: getattr(row, name) for name in _names(type(row))}
    return {
        name: value if isinstance(value, np.ndarray) else msgspec.to_builtins(value) for name, value in values.items()
    }


def _arrow_type(hint: Any, pa: Any) -> Any:
    """The column type for a field; what has no plain one is JSON text."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = [one for one in get_args(hint) if one is not type(None)]
    simple = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    if hint in simple:
        return simple[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple and arguments[0] in simple:
        return pa.list_(simple[arguments[0]])
    if origin is np.ndarray:
        return pa.list_(pa.from_numpy_dtype(get_args(arguments[1])[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping) and arguments[1] in simple:
        return pa.map_(pa.string(), simple[arguments[1]])
    return pa.string()


def _plain(value: Any, arrow: Any, pa: Any) -> Any:
    if value is None or isinstance(value, np.ndarray):
        return value
    if pa.types.is_map(arrow):
        return list(value.items())
    if pa.types.is_string(arrow) and not isinstance(value, str):
        return msgspec.json.encode(value).decode()
    return list(value) if isinstance(value, tuple) and not is_dataclass(value) else value


LONGEST_PART = 2000
COLUMNS = ("id", "policy", "harness", "calls", "output_tokens", "breaks", "reward", "status", "tags")
_CELL = 'style="text-align:left;vertical-align:top;padding:2px 8px"'
_PRE = 'style="white-space:pre-wrap;margin:2px 0 8px 0;font-family:monospace"'


def session_html(session: SessionDetail, turns: Sequence[CallTurn], *, at_most: int = 40) -> str:
    """A session's line and its transcript, the first `at_most` calls."""
    summary = session.summary
    opened = utc_text(summary.created_at, "%Y-%m-%d %H:%M UTC")
    facts = {
        "policy": summary.policy,
        "harness": summary.harness,
        "opened": opened,
        "calls": summary.calls,
        "sampled tokens": f"{summary.output_tokens:,}",
        "breaks": summary.breaks,
        "reward": summary.reward,
    }
    head = " · ".join(
        f"{escape(name)} {escape(str(value))}" for name, value in facts.items() if value not in (None, "")
    )
    lines = {line.id: line for line in session.calls}
    blocks = []
    for turn in turns[:at_most]:
        line = lines[turn.call_id]
        note = f"{line.kind} call, {line.prompt_tokens:,} + {line.output_tokens:,} tokens, {line.outcome}"
        messages = [*turn.new, *([turn.reply] if turn.reply is not None else [])]
        blocks.append(f"<details open><summary>{escape(note)}</summary>{''.join(map(_message, messages))}</details>")
    rest = len(turns) - len(blocks)
    more = f"<p>… and {rest:,} more calls</p>" if rest > 0 else ""
    return f"<div><b>session {escape(summary.id)}</b><br>{head}{''.join(blocks)}{more}</div>"


def table_html(kind: type, rows: Sequence[Any], *, more: bool) -> str:
    """The first rows of a table."""
    known = [field.name for field in fields(kind)]
    names = [name for name in COLUMNS if name in known] or known[:8]
    head = "".join(f"<th {_CELL}>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td {_CELL}>{escape(_short(getattr(row, name)))}</td>" for name in names) + "</tr>"
        for row in rows
    )
    end = "<p>… and more</p>" if more else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{end}"


def _message(message: MessageView) -> str:
    parts = []
    for part in message.parts:
        text = f"{part.name}({part.text})" if part.kind == "tool_call" else part.text
        text = "(an image)" if part.kind == "image" else text
        cut = (
            text
            if len(text) <= LONGEST_PART
            else f"{text[:LONGEST_PART]} … {len(text) - LONGEST_PART:,} more characters"
        )
        role = message.role if part.kind == "text" else f"{message.role}, {part.kind.replace('_', ' ')}"
        parts.append(f"<i>{escape(role)}</i><div {_PRE}>{escape(cut)}</div>")
    return "".join(parts)


def _short(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


class LoopThread:
    """Runs coroutines one after the other in a thread of its own, for blocking callers, also beside another event loop
    (as in a notebook). It closes what was pushed on `stack`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rolltap-record", daemon=True)
        self._thread.start()
        self.stack = AsyncExitStack()
        atexit.register(self.close)  # a record that its user left open

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; an interrupt cancels it."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the record is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        """Closing again changes nothing."""
        if self._loop.is_closed():
            return
        atexit.unregister(self.close)
        try:
            self.run(self.stack.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
