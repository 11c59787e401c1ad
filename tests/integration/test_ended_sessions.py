"""Sessions that have ended leave no request, prompt or digest in their proxy's caches; only their texts stay."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from rolltap.engine.scripted import Script, ScriptedReply

from ..harnesses.house import POLICY, House, house

TURNS = 4


async def converse(home: House, http: aiohttp.ClientSession) -> None:
    """A session of `TURNS` calls, which is closed at its end."""
    session = await home.client.open_session(policy=POLICY)
    messages = [{"role": "user", "content": "hi"}]
    for _ in range(TURNS):
        url = f"{session.endpoint.base_url}/v1/chat/completions"
        headers = {"Authorization": f"Bearer {session.endpoint.key}"}
        async with http.post(url, json={"model": POLICY, "messages": messages}, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            messages.append((await reply.json())["choices"][0]["message"])
        messages.append({"role": "user", "content": "and now?"})
    await home.client.close_session(session.session_id)


async def test_the_caches_do_not_grow_with_sessions_that_have_ended(tmp_path: Path) -> None:
    async with house(Script(otherwise=ScriptedReply(say="Hello.")), tmp_path) as home, aiohttp.ClientSession() as http:
        await converse(home, http)  # its texts stay
        size = home.app.caches.size
        for _ in range(5):
            await converse(home, http)
        assert home.app.caches.size == size > 0


async def test_two_proxies_in_one_process_share_no_cache(tmp_path: Path) -> None:
    script = Script(otherwise=ScriptedReply(say="Hello."))
    async with (
        house(script, tmp_path / "a") as one,
        house(script, tmp_path / "b") as other,
        aiohttp.ClientSession() as http,
    ):
        unused = other.app.caches.size
        await converse(one, http)
        assert one.app.caches.size > unused
        assert other.app.caches.size == unused
        await converse(other, http)
        assert other.app.caches.size == one.app.caches.size
