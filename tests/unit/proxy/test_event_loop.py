"""A long prompt does not make other calls wait."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rolltap.proxy.continuation.forest import Forest

LONG = " ".join(f"word{number} and then" for number in range(16_000))


async def longest_stall(task: asyncio.Task[Any]) -> float:
    """The longest time that the loop was busy with something else until `task` ended, in seconds."""
    worst, last = 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        worst, last = max(worst, now - last), now
    await task
    return worst


async def test_a_long_prompt_is_encoded_beside_the_loop(plane: Any) -> None:
    from rolltap.protocols.conversation import ChatRequest, Message, Text
    from rolltap.proxy.continuation.canonical import DigestCache

    chat = ChatRequest("test", "tiny", (Message("user", (Text(LONG),)),), items=(LONG.encode(),))
    plane.policy.source.max_context = 200_000
    started = time.perf_counter()
    plan = await plane.policy.source.plan("a", Forest(DigestCache()), chat)
    alone = time.perf_counter() - started
    assert len(plan.prompt_ids) > 100_000

    async def again() -> None:
        await plane.policy.source.plan("b", Forest(DigestCache()), chat)

    stall, tries = float("inf"), 0
    while stall >= max(0.05, alone / 4) and tries < 20:  # other processes stall the loop, too, but not every time
        stall, tries = min(stall, await longest_stall(asyncio.create_task(again()))), tries + 1
    print(f"{len(plan.prompt_ids)} tokens encoded in {alone * 1000:.0f} ms; longest stall {stall * 1000:.0f} ms")
    assert stall < max(0.05, alone / 4)


async def test_a_long_history_that_goes_on_is_not_encoded_again(plane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plane.policy.source.max_context = 200_000
    beside: list[str] = []
    to_thread = asyncio.to_thread

    async def noted(work: Any, *arguments: Any) -> Any:
        beside.append(str(work))
        return await to_thread(work, *arguments)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    long = {"role": "user", "content": LONG}
    more = {"role": "user", "content": "and?"}
    reply = (await plane.client.chat(long)).json()["choices"][0]["message"]
    whole, beside[:] = len(beside), []
    assert (await plane.client.chat(long, reply, more)).status == 200
    in_place, beside[:] = len(beside), []
    assert (await plane.client.chat(long, reply, {"role": "assistant", "content": "mine"}, more)).status == 200
    assert (whole, in_place, len(beside)) == (1, 0, 1)
