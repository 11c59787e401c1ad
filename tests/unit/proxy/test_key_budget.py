"""A project's minted key has its budget once, for all its sessions and on all proxies."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from rolltap.contract.keys import Caller, KeyBudget, KeyUsage, key_hash
from rolltap.errors import StoreUnavailable
from rolltap.proxy.call import budget
from rolltap.proxy.call.budget import FINAL_ANSWERS
from rolltap.proxy.sessions import key_accounts
from rolltap.settings import LimitSettings
from rolltap.tokenizer import HubTokenizer

from .conftest import Plane, make_plane, serve

KEY = "rt-key.project.k"


class StoredKeys:
    """One minted project key, as the store has it."""

    def __init__(self, given: KeyBudget) -> None:
        self.budget = given
        self.away = False
        self.used: defaultdict[str, KeyUsage] = defaultdict(KeyUsage)

    async def working(self) -> dict[str, tuple[Caller, float | None]]:
        return {key_hash(KEY): (Caller("k", "project", budget=self.budget), None)}

    async def add_usage(self, usages: Mapping[str, KeyUsage]) -> dict[str, KeyUsage]:
        if self.away:
            raise StoreUnavailable("away")
        await asyncio.sleep(0)
        for id, more in usages.items():
            self.used[id] += more
        return {id: self.used[id] for id in usages}


async def proxy(tokenizer: HubTokenizer, keys: StoredKeys, beside: Plane | None = None) -> Plane:
    plane = beside or await make_plane(tokenizer, LimitSettings())
    return serve(plane.log, plane.engine, plane.session, plane.limits, keys=keys)


async def status(plane: Plane, conversation: str, **more: Any) -> int:
    return (await answer(plane, conversation, **more)).status


async def answer(plane: Plane, conversation: str, **more: Any) -> Any:
    headers = {"session_id": conversation}
    return await plane.client.chat({"role": "user", "content": "hello"}, key=KEY, headers=headers, **more)


@pytest.mark.parametrize(
    ("given", "served", "told"),
    [
        (KeyBudget(calls=2), 2, "2 calls"),
        (KeyBudget(tokens=5), 1, "5 tokens"),
        (KeyBudget(mb=0.0002), 2, "0.0002 MB of requests"),
    ],
)
async def test_a_keys_budget_ends_politely_and_opens_no_more_sessions(
    tokenizer: HubTokenizer, given: KeyBudget, served: int, told: str
) -> None:
    plane = await proxy(tokenizer, StoredKeys(given))
    assert [await status(plane, name) for name in "ab"[:served]] == [200] * served
    refusal = await answer(plane, "a")
    assert refusal.status == 400
    message = refusal.json()["error"]["message"]
    assert message == f"budget used: this key has {told}; finish now with the work done so far"
    assert [await status(plane, "a") for _ in range(FINAL_ANSWERS)] == [400] * (FINAL_ANSWERS - 1) + [409]
    sessions = len(plane.log._sessions)
    assert [await status(plane, name) for name in ("x", "y", "z")] == [409] * 3
    assert len(plane.log._sessions) == sessions
    assert len(plane.engine.seen) == served


async def test_choices_are_calls_and_none_goes_over(tokenizer: HubTokenizer) -> None:
    plane = await proxy(tokenizer, StoredKeys(KeyBudget(calls=3)))
    assert [await status(plane, "a", n=n) for n in (2, 2, 1)] == [200, 400, 200]
    assert plane.accounts.of("k").used_up() == "3 calls"  # type: ignore[union-attr]


async def test_calls_at_once_share_the_budget(tokenizer: HubTokenizer) -> None:
    plane = await proxy(tokenizer, StoredKeys(KeyBudget(calls=5)))
    assert await status(plane, "0") == 200
    statuses = await asyncio.gather(*(status(plane, str(number % 8)) for number in range(24)))
    assert statuses.count(200) == 4
    assert len(plane.engine.seen) == 5


async def test_the_rate_is_of_all_its_sessions(tokenizer: HubTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(budget.time, "monotonic", lambda: now)
    plane = await proxy(tokenizer, StoredKeys(KeyBudget(per_minute=3)))
    assert [await status(plane, name) for name in "abcd"] == [200, 200, 200, 429]
    refused = await answer(plane, "a")
    assert (refused.status, refused.headers["retry-after"]) == (429, "20")
    assert "this key makes 3 calls a minute" in refused.json()["error"]["message"]
    now += 20
    assert [await status(plane, name) for name in "ab"] == [200, 429]


async def test_what_is_saved_outlasts_a_proxy_and_is_known_beside_it(tokenizer: HubTokenizer) -> None:
    keys = StoredKeys(KeyBudget(calls=3))
    one = await proxy(tokenizer, keys)
    other = await proxy(tokenizer, keys, one)
    assert [await status(plane, "a") for plane in (one, other)] == [200, 200]
    await one.accounts.save()
    await other.accounts.save()
    await other.accounts.save()  # nothing is new
    assert keys.used["k"].calls == 2
    assert keys.used["k"].tokens > 0
    again = await proxy(tokenizer, keys, one)
    assert [await status(again, "b"), await status(again, "b")] == [200, 400]
    await again.accounts.save()
    assert await status(other, "c") == 200  # it does not know yet
    await other.accounts.save()
    assert await status(other, "d") == 409


async def test_a_count_waits_for_a_store_that_is_away(tokenizer: HubTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_accounts, "SAVE_S", 0.01)
    keys = StoredKeys(KeyBudget(calls=3))
    plane = await proxy(tokenizer, keys)
    saving = asyncio.create_task(plane.accounts.saving())
    assert await status(plane, "a") == 200
    keys.away = True
    assert await status(plane, "a") == 200
    await asyncio.sleep(0.05)
    keys.away = False
    async with asyncio.timeout(20):
        while keys.used["k"].calls < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [await status(plane, "a"), await status(plane, "a")] == [200, 400]
    saving.cancel()
    await plane.accounts.save()
    assert keys.used["k"].calls == 3


async def test_the_settings_key_has_no_account(tokenizer: HubTokenizer) -> None:
    plane = await proxy(tokenizer, StoredKeys(KeyBudget(calls=1)))
    hello = {"role": "user", "content": "hello"}
    assert [(await plane.client.chat(hello, key="project-key")).status for _ in range(3)] == [200] * 3


async def test_refused_bodies_count(tokenizer: HubTokenizer) -> None:
    """Also those that lead to no session."""
    plane = await proxy(tokenizer, StoredKeys(KeyBudget(mb=0.0005)))
    junk = [await plane.client.post("/v1/chat/completions", b"no JSON " * 40, key=KEY) for _ in range(2)]
    assert [answer.status for answer in junk] == [400, 400]
    assert await status(plane, "a") == 409
    assert plane.engine.seen == []
