"""A weight version is the engine's, or is known because only rolltap pushes; else it is unknown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rolltap.engine.scripted import ScriptedEngine, ScriptedReply, say
from rolltap.engine.tiny import FOLDER
from rolltap.types import Flaw

from .conftest import ToldEngine, serve
from .test_chat_mode import chat_mode_proxy, client_of

USER = {"role": "user", "content": "hi"}


async def versions(plane: Any, *, cut: bool) -> Any:
    """Of a call whose reply ends at a stop string, before the engine says its version, or by itself."""
    plane.engine.replies = ["one STOP two<|im_end|>"]
    await plane.client.chat(USER, **({"stop": ["STOP"]} if cut else {}))
    completion = (await plane.rows())[-1].completion
    return completion.flaw.value if completion.flaw else [span.version for span in completion.versions]


@pytest.mark.parametrize(("says", "found"), [(False, [0]), (True, "version_unknown")])
async def test_a_reply_that_was_cut_before_its_version(plane: Any, says: bool, found: Any) -> None:
    plane.policy.weight_versions = says
    assert await versions(plane, cut=True) == found


async def test_what_the_engine_said_last_counts(plane: Any) -> None:
    plane.policy.weight_versions = True
    assert await versions(plane, cut=False) == [0]
    assert await versions(plane, cut=True) == [0]


async def test_weights_that_somebody_else_pushed(plane: Any) -> None:
    plane.policy.weight_versions = True
    plane.engine.version = 7
    assert await versions(plane, cut=False) == [7]
    assert await versions(plane, cut=True) == "version_unknown"


@dataclass
class AskedEngine(ToldEngine):
    """Says its version when asked, too."""

    async def served_weights(self) -> int | None:
        return self.version


async def test_an_engine_that_can_be_asked_is_asked_where_a_reply_is_cut(plane: Any) -> None:
    """Somebody pushes after the last reply that said its version: what rolltap knows is no longer true."""
    asked = serve(plane.log, AskedEngine(plane.engine.tokenizer), plane.session, plane.limits)
    asked.policy.weight_versions = asked.policy.states_weights = True
    assert await versions(asked, cut=True) == "version_unknown"  # it has said none yet
    assert await versions(asked, cut=False) == [0]
    assert await versions(asked, cut=True) == [0]
    asked.engine.version = 7
    assert await versions(asked, cut=True) == "version_unknown"
    assert await versions(asked, cut=False) == [7]
    assert await versions(asked, cut=True) == [7]


async def stated(folder: Path, wire: str) -> list[Any]:
    """The versions on record of four chat-mode calls; somebody pushes 7 before the second, 8 during the third."""
    script = say(ScriptedReply(say="one two three four five", hold=6))
    async with ScriptedEngine(script, FOLDER, wire=wire) as engine, chat_mode_proxy(folder, engine) as (app, url):
        engine.release()
        async with client_of(app, url) as client, httpx.AsyncClient(base_url=engine.url) as trainer:

            async def push(version: str) -> None:
                (await trainer.post("/update_weight_version", json={"new_version": version})).raise_for_status()

            async def call(pushed: str = "") -> None:
                """A call; `pushed` is pushed once it has begun to answer."""
                messages: Any = [USER]
                async for _ in await client.chat.completions.create(model="default", messages=messages, stream=True):
                    if pushed and not engine.model.released.is_set():
                        await push(pushed)
                        engine.release()

            await call()
            await push("7")
            await call()
            engine.hold()
            await call(pushed="8")
            await call()
        rows = [row for session in await app.call_log.sessions() for row in await app.call_log.rows(session.id)]
    calls = [row.call() for row in sorted(rows, key=lambda row: row.intent.id)]
    return [call.flaw or [span.version for span in call.versions] for call in calls]


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
async def test_chat_mode_asks_where_others_push(wire: str, tmp_path: Path) -> None:
    assert await stated(tmp_path, wire) == [[0], [7], Flaw.VERSION_UNKNOWN, [8]]
