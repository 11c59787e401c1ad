"""A session from which two policies learn: each call is shown with what its own policy's training makes of it."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from rolltap.engine.scripted import ScriptedEngine, say
from rolltap.engine.tiny import FOLDER
from rolltap.harnesses.client import ClaimedRollout
from rolltap.proxy.viewer.pages import Pages
from rolltap.settings import load_settings
from rolltap.types import Task

from ...harnesses.house import house_settings, served
from .conftest import QUESTION, SYSTEM


async def test_each_policys_loss_is_shown(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(say("Two files."), FOLDER) as engine,
        ScriptedEngine(say("Three files."), FOLDER) as other,
        aiohttp.ClientSession() as http,
    ):
        values = dict(house_settings(tmp_path, engine.url))
        model = values["policies"]["tiny"]
        values["engines"] |= {"other": {"url": other.url}}
        second = {**model, "engine": "other"}
        values["policies"] = {"tiny": model, "second": second, "still": {**model, "trainable": False}}
        async with served(engine, load_settings(None, **values)) as home:
            cast = {"solver": "tiny", "critic": "second", "judge": "still"}
            group = await home.client.open_group(Task("debate", "Debate."), policy=cast, n=1)
            opened = await home.client.start_rollout(ClaimedRollout(group.rollout_ids[0], ""), ttl=60)
            for role in cast:
                body = {"model": role, "messages": [{**SYSTEM, "content": f"You are the {role}."}, QUESTION]}
                headers = {"Authorization": f"Bearer {opened.endpoint.key}"}
                async with http.post(
                    f"{home.urls['agent']}/v1/chat/completions", json=body, headers=headers
                ) as response:
                    assert response.status == 200, await response.text()
            detail = await home.reader.session(opened.session_id)
            assert [(line.policy, line.mask) for line in detail.calls] == [
                ("tiny", ""),
                ("second", ""),
                ("still", "other_policy"),
            ]
            tokens = [await home.reader.tokens(line.id) for line in detail.calls]
            trained = [sum(token.trained for token in each.tokens) for each in tokens]
            assert trained == [detail.report["trained_tokens"], detail.others["second"]["trained_tokens"], 0]
            assert min(trained[:2]) > 0
            assert detail.others.keys() == {"second"}
            page = await Pages(home.reader, "").session(opened.session_id, 0)
            assert "Trained tokens of tiny" in page
            assert "Trained tokens of second" in page
