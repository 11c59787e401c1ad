"""`rolltap log verify`: what it must notice, each fault put into a sound log."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from rolltap.calllog.codec import completion_row, intent_row
from rolltap.calllog.facts import CallIntent, RequestParts
from rolltap.calllog.schema import call_completions, call_intents, deliveries, parts, sessions
from rolltap.calllog.sql import SqlCallLog, open_call_log
from rolltap.calllog.verify import verify
from rolltap.cli.main import app
from rolltap.types import Flaw, VersionSpan

from .facts import a_completion, a_session, append, ids

TOOLS = b'[{"name": "tool"}]' * 100


async def fill(log: SqlCallLog) -> tuple[CallIntent, CallIntent]:
    """A session of two calls, the second a continuation of the first."""
    session = a_session()
    await log.open_session(session)
    request = RequestParts(b'{"model":"m"}', (b'{"role":"user"}',), 0, {"tools": TOOLS})
    first = await append(log, session, request=request)
    items = RequestParts(b'{"model":"m"}', (b'{"role":"tool"}',), 1, {"tools": TOOLS})
    second = await append(log, session, request=items, parent_id=first.id, shared=5)
    await log.append_delivery(second.id, True)
    return first, second


def change(table: sa.Table, **values: object) -> sa.Update:
    return sa.update(table).values(**values)


def other_intent(second: CallIntent, **changes: object) -> sa.Update:
    """The second call's row with a right checksum, but other content."""
    row, _ = intent_row(replace(second, **changes))  # type: ignore[arg-type]
    values = dict(zip(call_intents.columns.keys(), row, strict=True))
    return sa.update(call_intents).where(call_intents.c.id == second.id).values(values)


def other_completion(second: CallIntent, **changes: object) -> sa.Update:
    row = completion_row(a_completion(second.id, **changes))
    values = dict(zip(call_completions.columns.keys(), row, strict=True))
    return sa.update(call_completions).where(call_completions.c.call_id == second.id).values(values)


def faults(first: CallIntent, second: CallIntent) -> dict[str, tuple[sa.Executable, str]]:
    fewer, more = RequestParts(b"{}", (), 0), RequestParts(b"{}", (b"{}",), 9)
    nan = np.array([-1.0, np.nan], np.float32)
    return {
        "intent changed": (change(call_intents, policy="other"), "does not match its checksum"),
        "completion changed": (change(call_completions, logprobs=b""), "does not match its checksum"),
        "part changed": (change(parts, data=b"\0other"), "does not match its hash"),
        "part gone": (sa.delete(parts), "is not in the log"),
        "parent gone": (sa.delete(call_intents).where(call_intents.c.id == first.id), f"its parent {first.id}"),
        "session gone": (sa.delete(sessions), "belongs to a session"),
        "stray delivery": (sa.insert(deliveries).values(call_id="x", delivered=True), "deliveries x: there is no"),
        "shares too much": (other_intent(second, shared=99), "shares 99 tokens, but its parent has 5"),
        "shares too many items": (other_intent(second, request=more), "shares 9 items, but its parent has 1"),
        "short log-probs": (other_completion(second, logprobs=np.zeros(1, np.float32)), "but 1 log-probs"),
        "spans off": (other_completion(second, versions=(VersionSpan(1, 0, 1),)), "do not tile 2 ids"),
        "extra off": (other_completion(second, extras={"entropy": np.zeros(3)}), "has 3 rows for 2 ids"),
        "silent NaN": (other_completion(second, logprobs=nan), "not finite"),
        "no fault": (other_intent(second, request=fewer), ""),
        "NaN that is told": (other_completion(second, logprobs=nan, flaw=Flaw.LOGPROBS_NOT_FINITE), ""),
    }


@pytest.mark.parametrize("name", faults(*[CallIntent("", "", "", 0, "", "", ids(), RequestParts(b""))] * 2))
async def test_a_fault_is_named_and_a_sound_log_is_not(sql_log: SqlCallLog, name: str):
    first, second = await fill(sql_log)
    sound = await verify(sql_log.database)
    assert (sound.problems, sound.sessions, sound.calls, sound.tokens, sound.parts) == ([], 1, 2, 10, 1)
    statement, words = faults(first, second)[name]
    await sql_log.database.transact(lambda connection: connection.execute(statement))
    found = await verify(sql_log.database)
    assert found.problem_count == len(found.problems)
    assert any(words in problem for problem in found.problems) if words else found.problems == []


async def damaged(path: Path) -> None:
    log = open_call_log(f"sqlite:///{path}")
    await log.start()
    await fill(log)
    await log.database.transact(lambda connection: connection.execute(change(call_intents, policy="other")))
    await log.close()


async def test_the_command_ends_with_status_1_and_names_the_first_problems(tmp_path: Path):

    await damaged(tmp_path / "log.db")
    arguments = ["log", "verify", "--store", f"sqlite:///{tmp_path}/log.db"]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 1
    assert "checksum" in result.output
    assert "2 problems" in result.output
