"""The pages of groups on the admin plane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from rolltap.engine.scripted import ScriptedEngine, say
from rolltap.engine.tiny import FOLDER
from rolltap.proxy.app import Rolltap
from rolltap.settings import Settings


async def test_groups_are_listed_a_page_at_a_time(tmp_path: Path) -> None:
    async with ScriptedEngine(say("hi"), FOLDER, wire="openai") as engine:
        engines = {"main": {"kind": "openai_compatible", "url": engine.url}}
        policies = {"default": {"engine": "main", "model": "scripted"}}
        settings = Settings.model_validate({"data": tmp_path, "engines": engines, "policies": policies})
        async with Rolltap.running(settings) as app:
            transport = httpx.ASGITransport(app.planes["admin"])
            key = {"authorization": f"Bearer {app.settings.keys.admin}"}
            async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=key) as client:
                for number in range(3):
                    body: Any = {"policy": "default", "n": 1, "task": {"id": f"t{number}", "instruction": "hi"}}
                    (await client.post("/groups", json=body)).raise_for_status()
                whole = (await client.get("/read/groups")).json()
                first = (await client.get("/read/groups", params={"limit": 2})).json()
                rest = (await client.get("/read/groups", params={"limit": 2, "before": first[-1]["id"]})).json()
                refused = await client.get("/read/groups", params={"limit": 0})
                by_status = {
                    status: (await client.get("/read/groups", params={"status": status})).json()
                    for status in ("open", "complete")
                }
    assert [len(whole), len(first), len(rest)] == [3, 2, 1]
    assert first + rest == whole
    assert by_status == {"open": whole, "complete": []}
    assert 400 <= refused.status_code < 500
