"""A proxy that is cut off from Postgres goes on through its spool, and its peers know that they can't see its calls."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

from rolltap.calllog.sql import open_call_log

from ..unit.calllog.facts import a_completion, a_session, an_intent
from .relay import relayed


async def test_calls_of_a_proxy_that_is_cut_off_are_waited_for_or_told_to_be_missing(postgres_url: str, tmp_path: Path):
    parts = urlsplit(postgres_url)
    async with relayed(str(parts.hostname), parts.port or 5432) as link:
        cut_url = parts._replace(netloc=f"{parts.username}@127.0.0.1:{link.own_port}").geturl()
        cut = open_call_log(cut_url, spools=[tmp_path / "cut"])
        peer = open_call_log(postgres_url, spools=[tmp_path / "peer"])
        for log, name in ((cut, "cut"), (peer, "peer")):
            await log.start()
            await log.abort_orphans([name], at=1.0)
        session = a_session()
        await cut.open_session(session)
        await asyncio.sleep(1.5)  # a heartbeat of each
        assert await peer.peers_behind(5) == []
        target, link.port = link.port, 1
        for writer in link._writers:
            writer.transport.abort()
        intent = an_intent(session)
        await cut.append_intent(intent)
        await cut.append_completion(a_completion(intent.id))
        assert await peer.peers_behind(1.5) == ["cut"]
        assert len(await peer.rows(session.id)) == 0
        waiting = asyncio.create_task(peer.peers_behind(20))
        link.port = target
        assert await waiting == []
        assert [row.intent.id for row in await peer.rows(session.id)] == [intent.id]
        await cut.close()
        await peer.close()
