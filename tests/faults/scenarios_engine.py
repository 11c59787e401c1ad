"""The model server fails, or says what it should not."""

from __future__ import annotations

import asyncio
from typing import Any

from rolltap.types import Flaw, Outcome

from .clients import Reply, turn
from .world import World

SAY = "one two three four five six"


async def _said(world: World, fault: dict[str, Any], **fields: Any) -> tuple[str, Reply]:
    """The session's id, and the reply of a call with this fault of the engine."""
    key = await world.clients.open_session()
    reply = await world.clients.ask(key, [turn(f"say {world.rng.random()}", say=SAY, fault=fault, **fields)])
    return world.clients.session_of[key], reply


async def _outcome(world: World, session: str) -> dict[str, Any]:
    """The session's one call, as the admin plane shows it."""
    shown = await world.clients.admin(f"/read/sessions/{session}", method="GET")
    (call,) = shown["calls"]
    return call


async def _untrained(world: World, session: str) -> bool:
    report = (await world.clients.admin(f"/read/sessions/{session}", method="GET"))["report"]
    return report["trained_tokens"] == 0


async def refuses_work(world: World) -> None:
    """429 and 5xx: tried again before the first byte, then passed on and recorded."""
    for status in (429, 500, 503):
        _, reply = await _said(world, {"kind": "status", "status": status, "retry_after": 0.05})
        assert reply.ended, reply
        session, reply = await _said(
            world, {"kind": "status", "status": status, "times": 0, "retry_after": 0.05 + world.rng.random() / 20}
        )
        assert not reply.ended
        assert reply.status in (429, 502, 503), reply
        call = await _outcome(world, session)
        assert call["outcome"] == Outcome.ENGINE_ERROR
        assert call["output_tokens"] == 0
        await world.check()


async def hangs(world: World) -> None:
    """Before the first token (504) and between tokens (the stream is cut); partial output is kept, not trained."""
    size = world.rng.randint(1, 4)
    (first, before), (second, between) = await asyncio.gather(
        _said(world, {"kind": "hang"}), _said(world, {"kind": "hang", "after": size, "times": 0})
    )
    assert (before.status, before.ended) == (504, False), before
    assert between.status in (200, 504), between  # 504 where the tokens so far are not text yet
    assert not between.ended
    for session, tokens in ((first, 0), (second, size)):
        call = await _outcome(world, session)
        assert (call["outcome"], call["output_tokens"]) == (Outcome.ENGINE_ERROR, tokens), call
        assert await _untrained(world, session)
    await world.check()


async def drops_mid_stream(world: World) -> None:
    """The connection breaks at any token or byte: no second try after the first token, the part kept, no clean end."""
    for _ in range(world.size):
        fault: dict[str, Any] = {"kind": "cut", "times": 0}
        fault |= (
            {"at_byte": world.rng.randint(1, 900)} if world.rng.random() < 0.5 else {"after": world.rng.randint(1, 5)}
        )
        session, reply = await _said(world, fault)
        assert not reply.ended, reply
        call = await _outcome(world, session)
        assert call["outcome"] == Outcome.ENGINE_ERROR
        assert await _untrained(world, session)
    await world.check()


async def breaks_its_stream(world: World) -> None:
    """Garbage, an error event, an end without a finish: never taken for an answer."""
    for kind in ("garbage", "error", "unfinished", "abort"):
        session, reply = await _said(world, {"kind": kind, "after": world.rng.randint(0, 4), "times": 0})
        assert not reply.ended, (kind, reply)
        call = await _outcome(world, session)
        assert call["outcome"] == Outcome.ENGINE_ERROR, kind
        assert await _untrained(world, session)
    await world.check()


async def gives_no_logprobs(world: World) -> None:
    """Missing, or one too few: the reply is delivered, the call kept, and not trained."""
    for kind in ("no_logprobs", "short_logprobs"):
        session, reply = await _said(world, {"kind": kind, "after": world.rng.randint(0, 3), "times": 0})
        call = await _outcome(world, session)
        assert reply.ended == (call["outcome"] == Outcome.COMPLETED)
        assert call["flaw"] == Flaw.LOGPROBS_MISSING or call["outcome"] == Outcome.ENGINE_ERROR, call
        assert await _untrained(world, session)
    await world.check()


async def gives_nan(world: World) -> None:
    """NaN, or null for it: stored as it is, and not trained."""
    for kind in ("nan_logprobs", "null_logprobs"):
        session, reply = await _said(world, {"kind": kind, "after": world.rng.randint(0, 3), "times": 0})
        assert reply.ended, (kind, reply)
        call = await _outcome(world, session)
        assert (call["outcome"], call["flaw"]) == (Outcome.COMPLETED, Flaw.LOGPROBS_NOT_FINITE), (kind, call)
        assert await _untrained(world, session)
    await world.check()


async def saw_other_tokens(world: World) -> None:
    """The engine's own prompt ids differ from those it was sent: an error, and nothing trained."""
    session, reply = await _said(world, {"kind": "altered_prompt", "times": 0})
    assert not reply.ended, reply
    call = await _outcome(world, session)
    assert call["outcome"] == Outcome.ENGINE_ERROR, call
    assert await _untrained(world, session)
    await world.check()


async def arrives_in_pieces(world: World) -> None:
    """Every byte of the stream comes by itself, characters of several bytes too: the same tokens, byte for byte."""
    clients = world.clients
    key = await clients.open_session()
    text = "".join(world.rng.choices("aä→🙂 漢", k=12)).strip()  # the blanks around a reply are not its text
    whole = await clients.insist(key, [turn("say it", say=text)])
    assert whole.text == text
    session, reply = await _said(world, {"kind": "garbage", "after": world.rng.randint(0, 4), "times": 0})
    assert not reply.ended
    assert (await _outcome(world, session))["outcome"] == Outcome.ENGINE_ERROR
    await world.check()
