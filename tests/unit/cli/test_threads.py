"""A caller that is cancelled leaves only when the work in its thread has ended: it may close what the work uses."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from rolltap.calllog.database import in_thread
from rolltap.calllog.stats import WriterFacts
from rolltap.cli import export as export_command


async def test_a_cancelled_caller_waits_for_its_thread() -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        may_end.wait(60)
        ended.set()
        raise ValueError("nobody asks for this any more")

    caller = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(began.wait, 60)
    for _ in range(2):  # an impatient one
        caller.cancel()
        await asyncio.sleep(0.01)
        assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


async def test_results_and_errors_are_the_works_own() -> None:
    assert await in_thread(int, "7", base=8) == 7
    with pytest.raises(ValueError, match="invalid literal"):
        await in_thread(int, "x")


async def test_an_interrupted_export_closes_its_files_after_the_last_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite ends the process where the state of a growing dataset is closed while a thread reads it."""
    began, may_end, story = threading.Event(), threading.Event(), []

    class Writer:
        def __enter__(self) -> Writer:
            return self

        def __exit__(self, *error: object) -> None:
            story.append("closed")

        def add(self, group: Any) -> None:
            began.set()
            may_end.wait(60)
            story.append("added")

    class Record:
        database = None

        async def start(self) -> None: ...
        async def close(self) -> None: ...

    class Job:
        store, state, query, read_options = "", None, type("Query", (), {"session_filter": None}), None

        def writer(self, query: Any) -> Writer:
            return Writer()

    async def groups(*args: Any) -> Any:
        yield []

    async def writer_facts(database: Any) -> WriterFacts:
        return WriterFacts(count=0, behind=0)

    monkeypatch.setattr(export_command, "writer_facts", writer_facts)
    monkeypatch.setattr(export_command, "open_record", lambda store: Record())
    monkeypatch.setattr(export_command, "recorded_groups", groups)
    export = asyncio.create_task(export_command.run_export(Job()))  # type: ignore[arg-type]
    await asyncio.to_thread(began.wait, 60)
    export.cancel()
    await asyncio.sleep(0.01)
    assert story == []
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await export
    assert story == ["added", "closed"]
