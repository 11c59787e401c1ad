"""A call whose intent is not in the store, or not yet, is no part of another call's record."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from rolltap.calllog.sql import open_call_log
from rolltap.engine.scripted import ScriptedEngine, ScriptedReply
from rolltap.engine.scripted.script import Rule, Script
from rolltap.engine.tiny import FOLDER
from rolltap.errors import StoreUnavailable
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.types import BreakReason, Outcome
from tests.unit.proxy.conftest import serve
from tests.unit.proxy.test_chat_mode import chat_mode_proxy

USER = {"role": "user", "content": "list the files"}
HURRY = {"role": "user", "content": "quickly"}
TITLE = {"role": "system", "content": "Write a title."}
AGENT = {"role": "system", "content": "You are an agent."}
OK = {"role": "assistant", "content": "ok"}


def let_fail(plane: Any, monkeypatch: pytest.MonkeyPatch, after: asyncio.Event | None = None) -> asyncio.Event:
    """The store refuses the next intent, once `after` is set. The event returned is set when it has come."""
    take, come = plane.log.append_intent, asyncio.Event()

    async def refuse(intent: Any) -> None:
        monkeypatch.setattr(plane.log, "append_intent", take)
        come.set()
        if after is not None:
            await after.wait()
        raise StoreUnavailable("the store is unavailable and the spool is full")

    monkeypatch.setattr(plane.log, "append_intent", refuse)
    return come


async def test_a_session_stays_readable_where_its_first_call_was_refused(
    plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A harness asks for a title; the store takes the agent's own call, which begins with the same message."""
    let_fail(plane, monkeypatch)
    assert (await plane.client.chat(TITLE, USER)).status == 503
    assert (await plane.client.chat(AGENT, USER)).status == 200
    history = (AGENT, USER, OK, HURRY)
    assert (await plane.client.chat(*history)).status == 200
    started_again = serve(plane.log, plane.engine, plane.session, plane.limits)
    assert (await started_again.client.chat(*history, OK, USER)).status == 200
    rows = await plane.rows()
    assert [row.prompt_ids.tolist() for row in rows] == [list(sent.prompt_ids) for sent in plane.engine.seen]
    assert [row.intent.break_ for row in rows] == [None] * 3


async def test_a_call_stands_by_itself_beside_one_whose_intent_is_on_its_way(
    plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its break names that one all the same, as it may yet be recorded; a reader bears it where it is not."""
    gate = asyncio.Event()
    come = let_fail(plane, monkeypatch, gate)
    _, _, first = plane.client.start("/v1/chat/completions", {"model": "tiny", "messages": [TITLE, USER]})
    await come.wait()
    assert (await plane.client.chat(AGENT, USER)).status == 200
    gate.set()
    await first
    (row,) = await plane.rows()
    assert (row.intent.parent_id, row.intent.shared, row.intent.request.items_shared) == (None, 0, 0)
    assert row.intent.break_.reason is BreakReason.SYSTEM_CHANGED
    (segment,) = reconstruct([row.call()]).segments
    assert segment.loss_mask.any()


async def test_what_begins_as_a_refused_call_does_is_found_all_the_same(
    plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edited history is recognised by the call that came while the first one's intent was on its way."""
    gate = asyncio.Event()
    come = let_fail(plane, monkeypatch, gate)
    _, _, first = plane.client.start("/v1/chat/completions", {"model": "tiny", "messages": [USER]})
    await come.wait()
    await plane.client.chat(USER)
    gate.set()
    await first
    await plane.client.chat(USER, HURRY)
    one, two = await plane.rows()
    assert (two.intent.parent_id, two.intent.break_.reason) == (one.intent.id, BreakReason.HISTORY_EDITED)


async def test_a_chat_upstreams_call_does_not_rest_on_one_that_has_no_intent_yet(tmp_path: Path) -> None:
    """The intent of the first waits for the upstream's prompt. A reader sees what a kill of the proxy would leave."""
    slow = Rule(when="list the files", turns=(ScriptedReply(say="slow", hold=0),))
    script = Script(
        rules=(
            Rule(when="quickly", turns=(ScriptedReply(say="fast"),)),
            slow,
            Rule(turns=(ScriptedReply(say="probed"),)),
        )
    )
    async with ScriptedEngine(script, FOLDER, wire="vllm") as engine, chat_mode_proxy(tmp_path, engine) as (app, url):
        named = {"authorization": f"Bearer {app.settings.keys.project}", "x-session-id": "one"}
        async with httpx.AsyncClient(base_url=url, headers=named, timeout=30) as client:

            async def call(*messages: Any) -> httpx.Response:
                body = {"model": "default", "messages": list(messages)}
                return await client.post("/v1/chat/completions", json=body)

            first = asyncio.create_task(call(USER))
            await engine.model.journal.until(lambda seen: any(entry.outcome == "running" for entry in seen))
            assert (await call(USER, HURRY)).status_code == 200
            (session,) = await app.call_log.sessions()
            reader = open_call_log(f"sqlite:///{tmp_path / 'rolltap.db'}", writable=False)
            await reader.start()
            calls = [row.call() for row in await reader.rows(session.id)]
            await reader.close()
            first.cancel()  # read before: its end is written as an aborted call
    assert calls[0].outcome is Outcome.COMPLETED
    assert calls[0].parent_id is None


async def test_a_client_that_leaves_while_its_intent_is_written_leaves_an_aborted_call(
    plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store takes nothing back: what a cancelled caller gave it is written (`GroupCommit`)."""
    take, come, gate = plane.log.append_intent, asyncio.Event(), asyncio.Event()

    async def written_anyway(intent: Any) -> None:
        come.set()
        await gate.wait()
        await take(intent)

    async def append(intent: Any) -> None:
        await asyncio.shield(asyncio.create_task(written_anyway(intent)))

    monkeypatch.setattr(plane.log, "append_intent", append)
    _, hang_up, task = plane.client.start("/v1/chat/completions", {"model": "tiny", "messages": [USER]})
    await come.wait()
    hang_up.set()
    await task
    gate.set()
    await plane.log.completing.wait()
    (row,) = await plane.rows()
    assert row.completion.outcome is Outcome.ABORTED
    assert plane.engine.seen == []
