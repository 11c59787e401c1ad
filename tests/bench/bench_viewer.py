"""How fast the viewer's pages are over a large record: `python -m tests.bench.bench_viewer`. Writes
reports/bench_viewer.json.

Two records on SQLite. One of `--sessions` sessions in groups of 8, each of two calls, all of them annotated by a
trainer: the pages that a person opens, and the run's page while a trainer goes on annotating. And one session of 127 MB
of text and token ids, opened by a reader that has not seen it. Times are of making a page in the process that reads:
the median and the worst of `--looks` looks, and the first one where it differs in kind. Then `rolltap view` shows the
same pages to Chromium: the time to the first paint (from the navigation on), and from a key to the frame behind it. It
ends with 1 if a page over the many sessions misses `GOALS`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa
from rich.console import Console
from rich.table import Table

from rolltap import __version__
from rolltap.calllog.backend import Insert, columns
from rolltap.calllog.codec import completion_row, intent_row, pack_arrays, pack_bytes, session_row
from rolltap.calllog.database import Database
from rolltap.calllog.facts import CallCompletion, CallIntent, RequestParts
from rolltap.calllog.schema import annotations, call_completions, call_intents, parts, sessions
from rolltap.calllog.sql import SqlCallLog, open_call_log
from rolltap.ids import first_id_at
from rolltap.ledger.schema import groups, policies, rewards, rollouts, tasks
from rolltap.ledger.views import GroupQuery
from rolltap.protocols.conversation import Message, Text
from rolltap.proxy.viewer.listing import ListAddress
from rolltap.proxy.viewer.pages import Pages
from rolltap.reading.reader import RecordReader, opened_reader
from rolltap.types import Finish, Outcome, Session, VersionSpan

from ..integration.browser import Browser, chromium
from ..pictures import viewing

REPORT = Path("reports") / "bench_viewer.json"
POLICY, HARNESSES = "policy", ("codex", "claude-code", "pi", "mini-swe-agent")
GROUP, CALLS, SAMPLED = 8, 2, 16
AT_ONCE = 500
BEGAN = 1_780_000_000.0
LONG_CALLS, LONG_BYTES, CONVERSATION = 2_000, 127_000_000, 100
"""The long session: its calls, the bytes of its text and token ids, and how many calls a context goes on for."""
CHARS_PER_TOKEN = 4


@dataclass
class Rows:
    """Rows of each table, in the order in which they are written."""

    by_table: dict[sa.Table, list[tuple[Any, ...]]] = field(default_factory=dict)

    def add(self, table: sa.Table, *row: Any, **values: Any) -> None:
        """A whole row, or the values of one whose other columns are null."""
        rows = self.by_table.setdefault(table, [])
        rows.append(row or tuple(values.get(column.name) for column in table.columns))

    async def write(self, database: Database) -> None:
        def work(connection: sa.Connection) -> None:
            for table, rows in self.by_table.items():
                insert = Insert(table, connection.dialect)
                if connection.dialect.name == "postgresql":  # its ledger's keys begin with the tenant
                    plain = insert.sql.rpartition(" ON CONFLICT ")[0]
                    connection.exec_driver_sql(plain, tuple(columns(rows)))
                else:
                    insert.run(connection, rows)

        await database.transact(work)


def an_id(at: float, *, group: int = 0, place: int = 0, call: int = 0) -> str:
    """An id of that time, as `rolltap.ids` makes them: readers go by the times in ids."""
    return f"{first_id_at(at)[:10]}{group:05d}{place:01d}{call:04d}"


def group_id(number: int) -> str:
    return an_id(BEGAN + 60.0 * number, group=number, place=GROUP)


def session_id(group: int, place: int) -> str:
    return an_id(BEGAN + 60.0 * group, group=group, place=place)


def harness_of(group: int) -> str:
    return HARNESSES[group % len(HARNESSES)]


def call_id(session: str, number: int) -> str:
    return f"{session[:16]}{number + 1:04d}"


LONG = an_id(BEGAN)


def add_call(rows: Rows, intent: CallIntent, reply: str, sampled: int, version: int) -> None:
    row, large = intent_row(intent)
    rows.add(call_intents, *row)
    for digest, data in large.items():
        rows.add(parts, digest, intent.created_at, pack_bytes(data))
    done = CallCompletion(
        intent.id, intent.created_at + 2, Outcome.COMPLETED, Finish.STOP, np.arange(sampled, dtype=np.int32),
        np.full(sampled, -0.5, np.float32), (VersionSpan(version, 0, sampled),),
        message=msgspec.json.encode(Message("assistant", (Text(reply),))),
    )  # fmt: skip
    rows.add(call_completions, *completion_row(done))


def add_session(rows: Rows, session: Session, version: int) -> None:
    """A question, and a second one behind its answer."""
    rows.add(sessions, *session_row(session))
    answer = f"answer of {session.id}"
    reply = msgspec.json.encode({"role": "assistant", "content": answer})
    for number in range(CALLS):
        question = msgspec.json.encode({"role": "user", "content": f"question {number} of {session.id}"})
        intent = CallIntent(
            call_id(session.id, number), session.id, "bench", session.created_at + 3 * number, POLICY, "openai_chat",
            np.arange(40, dtype=np.int32), RequestParts(b'{"model":"policy"}', (reply, question)[1 - number :], number),
            parent_id=call_id(session.id, number - 1) if number else None, shared=(40 + SAMPLED) * number,
        )  # fmt: skip
        add_call(rows, intent, answer, SAMPLED, version)


def add_annotations(rows: Rows, session: str, group: int, token: int, version: int) -> None:
    streams = pack_arrays({"logprobs": np.full(SAMPLED, -0.6, np.float32)})
    for number in range(CALLS):
        rows.add(
            annotations, call_id=call_id(session, number), token=token, session_id=session, group_id=group_id(group),
            policy=POLICY, harness=harness_of(group), trainer="trainer", step=token, version=version,
            created_at=BEGAN, compared=SAMPLED, mismatch_sum=0.1 * SAMPLED, mismatch_max=0.2, fresh=SAMPLED,
            fresh_sum=0.1 * SAMPLED, kept=0, clipped=0, streams=streams,
        )  # fmt: skip


def add_group(rows: Rows, number: int) -> None:
    """A group that was trained, with its sessions."""
    at, group, version = BEGAN + 60.0 * number, group_id(number), number // 64
    rows.add(
        groups, id=group, task_id=f"task-{number % 500}", task_digest=f"digest-{number % 500}", policy=POLICY, n=GROUP,
        priority=0, tags="[]", rule="{}", status="acknowledged", reason="", failures=0, created_at=at,
        completed_at=at + 50, oldest_version=version, newest_version=version, zero_variance=False,
        reward_mean=0.5, generation=0, acked_step=number,
    )  # fmt: skip
    for position in range(GROUP):
        session = session_id(number, position)
        rollout, tags = f"r{session}", {"harness": harness_of(number)}
        add_session(rows, Session(session, POLICY, session, at, at + 3600, rollout, at + 50, tags), version)
        rows.add(
            rollouts, id=rollout, group_id=group, position=position, status="succeeded", attempt=1, session_id=session,
            scoring="scored", reason="", oldest_version=version, newest_version=version, trained_calls="[]",
            infra_failures=0, finished_at=at + 50,
        )  # fmt: skip
        rows.add(
            rewards, id=rollout, rollout_id=rollout, attempt=1, value=float(position % 2), scope="rollout",
            source="bench", detail="{}", created_at=at + 50, key_id="", number=0, hash=rollout,
        )  # fmt: skip
        add_annotations(rows, session, number, number + 1, version)


async def started(path: Path) -> SqlCallLog:
    log = open_call_log(f"sqlite:///{path}")
    await log.start()
    return log


async def write_record(log: SqlCallLog, many: int) -> None:
    first = Rows()
    first.add(policies, name=POLICY, version=0, tokenizer_hash="", given=0, created_at=BEGAN)
    for number in range(500):
        first.add(tasks, f"digest-{number}", f"task-{number}", f"Do {number}.", "{}", "[]")
    await first.write(log.database)
    for start in range(0, many // GROUP, AT_ONCE):
        rows = Rows()
        for number in range(start, min(start + AT_ONCE, many // GROUP)):
            add_group(rows, number)
        await rows.write(log.database)


def long_session() -> Iterator[Rows]:
    """A conversation of `LONG_CALLS` calls whose context is begun anew now and then, a few calls at a time."""
    session = Session(LONG, POLICY, LONG, BEGAN, BEGAN + 9e6, None, BEGAN + 8e6, {"harness": "codex"})
    rows = Rows()
    rows.add(sessions, *session_row(session))
    rng = np.random.default_rng(0)
    size = LONG_BYTES // LONG_CALLS // 2  # of the text; its ids take as many bytes
    tokens, words = size // CHARS_PER_TOKEN, np.array([f"{value:x} " for value in range(4096)])
    answer = "I go on."
    reply = msgspec.json.encode({"role": "assistant", "content": answer})
    context = items = 0
    for number in range(LONG_CALLS):
        if number % CONVERSATION == 0:
            context = items = 0
        text = "".join(rng.choice(words, size // 4))[: size - 40]
        asked = msgspec.json.encode({"role": "user", "content": text})
        intent = CallIntent(
            call_id(LONG, number), LONG, "bench", BEGAN + 3 * number, POLICY, "openai_chat",
            rng.integers(0, 150_000, tokens, np.int32),
            RequestParts(b'{"model":"policy"}', (reply, asked) if items else (asked,), items),
            parent_id=call_id(LONG, number - 1) if items else None, shared=context,
        )  # fmt: skip
        items += 2 if items else 1
        context += tokens + SAMPLED
        add_call(rows, intent, answer, SAMPLED, 0)
        if number % 50 == 49:
            yield rows
            rows = Rows()


@dataclass
class Looks:
    """Seconds of looking at each page; `first` apart from the later looks."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    kilobytes: dict[str, float] = field(default_factory=dict)

    async def look(self, name: str, page: Callable[[], Awaitable[str]], times: int) -> None:
        for _ in range(times):
            began = time.perf_counter()
            html = await page()
            self.seconds.setdefault(name, []).append(time.perf_counter() - began)
            self.kilobytes[name] = len(html.encode()) / 1e3


async def look_at_many(store: Path, looks: Looks, log: SqlCallLog, times: int, many: int) -> float:
    """Looks at every page; the seconds that the index took."""
    async with opened_reader(f"sqlite:///{store}") as reader:
        began = time.perf_counter()
        await reader.settle(texts=True)
        index_s = time.perf_counter() - began
    async with opened_reader(f"sqlite:///{store}") as reader:
        pages = Pages(reader, "bench")
        middle = many // GROUP // 2
        session = session_id(middle, 3)
        for name, page in {
            "sessions": lambda: pages.sessions(ListAddress()),
            "sessions, filtered and sorted": lambda: pages.sessions(
                ListAddress(where="harness=codex and reward>=1", sort="reward")
            ),
            "sessions, searched": lambda: pages.sessions(ListAddress(session)),
            "the list's facets": lambda: pages.facets(ListAddress()),
            "session": lambda: pages.session(session, 0),
            "a call's tokens": lambda: pages.call(call_id(session, 1)),
            "groups": lambda: pages.groups(GroupQuery()),
            "group": lambda: pages.group(group_id(middle)),
            "runs": lambda: pages.runs(),
            "run, first": lambda: pages.run(POLICY, []),
        }.items():
            await looks.look(name, page, 1 if name.endswith("first") else times)
        await looks.look("run", lambda: pages.run(POLICY, []), times)
        for number in range(times):
            rows = Rows()
            for position in range(GROUP):
                add_annotations(rows, session_id(number, position), number, many + number, 1)
            await rows.write(log.database)
            await looks.look("run, while a trainer annotates", lambda: pages.run(POLICY, []), 1)
    return index_s


async def look_at_long(store: Path, looks: Looks) -> None:
    """Each time with a reader that has not seen the session."""

    async def with_new(page: Callable[[Pages, RecordReader], Awaitable[str]], name: str) -> None:
        async with opened_reader(f"sqlite:///{store}") as reader:
            await looks.look(name, lambda: page(Pages(reader, "bench"), reader), 1)

    for _ in range(3):
        await with_new(lambda pages, _: pages.session(LONG, 0), "127 MB: seen at once")
        await with_new(lambda pages, _: pages.whole_session(LONG, 0), "127 MB: its transcript")
        await with_new(lambda pages, _: pages.call(call_id(LONG, LONG_CALLS - 1)), "127 MB: its last call's tokens")


PAINT = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
KEY = """
const done = arguments[1], began = performance.now()
document.body.dispatchEvent(new KeyboardEvent("keydown", {key: arguments[0], bubbles: true}))
requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)))
"""


def paint(store: Path, pages: Mapping[str, tuple[str, str]], times: int) -> dict[str, dict[str, float]]:
    """Of each page (its path, and a key that is pressed there) the medians in seconds."""
    painted: dict[str, dict[str, float]] = {}
    with chromium(store.parent / f"{store.stem}-profile") as driver, viewing(store) as link:
        browser = Browser(driver, link.partition("/view/")[0])
        browser.open(link.removeprefix(browser.admin))
        for name, (path, key) in pages.items():
            first, pressed = [], []
            for _ in range(times):
                browser.open(path)
                browser.until(lambda: browser.run(PAINT) is not None)
                first.append(browser.run(PAINT) / 1e3)
                pressed.append(driver.execute_async_script(KEY, key) / 1e3)
            painted[name] = {"paint_s": statistics.median(first), "key_s": statistics.median(pressed)}
    return painted


GOALS = {"paint_s": 1.0, "key_s": 0.1}
"""Seconds within which a page over many sessions is painted, and answers a key."""


def missed(browser: Mapping[str, Mapping[str, float]], pages: Iterable[str]) -> list[str]:
    """What is over its goal, of these pages."""
    return [
        f"{page}: {name} is {browser[page][name]:.2f}, the goal {goal:g}"
        for page in pages
        for name, goal in GOALS.items()
        if browser[page][name] > goal
    ]


def pages_of_many(many: int) -> dict[str, tuple[str, str]]:
    middle = many // GROUP // 2
    session = session_id(middle, 3)
    return {
        "sessions": ("/view/", "j"),
        "sessions, filtered and sorted": ("/view/?where=harness%3Dcodex%20and%20reward%3E%3D1&sort=reward", "j"),
        "sessions, searched": (f"/view/?q={session}", "j"),
        "session": (f"/view/sessions/{session}", "j"),
        "a call's tokens": (f"/view/calls/{call_id(session, 1)}", "j"),
        "groups": ("/view/groups", "j"),
        "group": (f"/view/groups/{group_id(middle)}", "j"),
        "run": (f"/view/runs/{POLICY}", "?"),
    }


def figures(looks: Looks) -> dict[str, dict[str, float]]:
    return {
        name: {
            "median_s": statistics.median(seconds),
            "worst_s": max(seconds),
            "kilobytes": looks.kilobytes[name],
        }
        for name, seconds in looks.seconds.items()
    }


def shown(pages: dict[str, dict[str, float]], browser: dict[str, dict[str, float]]) -> Table:
    table = Table("page", "median, ms", "worst, ms", "kB", "first paint, ms", "a key, ms")
    for name, figure in pages.items():
        milliseconds: Sequence[float] = (1e3 * figure["median_s"], 1e3 * figure["worst_s"])
        seen = [f"{1e3 * value:,.0f}" for value in browser.get(name, {}).values()]
        table.add_row(name, *(f"{value:,.0f}" for value in milliseconds), f"{figure['kilobytes']:,.0f}", *seen)
    return table


async def measure(folder: Path, many: int, times: int) -> dict[str, Any]:
    report: dict[str, Any] = {"sessions": many, "load_average_before": os.getloadavg()[0]}
    looks = Looks()
    log = await started(folder / "many.db")
    try:
        await write_record(log, many)
        report["index_s"] = await look_at_many(folder / "many.db", looks, log, times, many)
    finally:
        await log.close()
    report["browser"] = await asyncio.to_thread(paint, folder / "many.db", pages_of_many(many), times)
    log = await started(folder / "long.db")
    try:
        for rows in long_session():
            await rows.write(log.database)
    finally:
        await log.close()
    await look_at_long(folder / "long.db", looks)
    long_pages = {
        "127 MB: seen at once": (f"/view/sessions/{LONG}", "j"),
        "127 MB: its last call's tokens": (f"/view/calls/{call_id(LONG, LONG_CALLS - 1)}", "j"),
    }
    report["browser"] |= await asyncio.to_thread(paint, folder / "long.db", long_pages, times)
    return {**report, "pages": figures(looks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--looks", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(measure(Path(folder), options.sessions, options.looks))
    Console().print(shown(report["pages"], report["browser"]))
    REPORT.parent.mkdir(exist_ok=True)
    machine = {"version": __version__, "cores": os.cpu_count(), "python": platform.python_version()}
    machine["sqlite"] = sqlite3.sqlite_version
    REPORT.write_text(json.dumps({**machine, "time": time.time(), **report}, indent=2), encoding="utf-8")
    if over := missed(report["browser"], pages_of_many(options.sessions)):
        raise SystemExit("\n".join(over))


if __name__ == "__main__":
    main()
