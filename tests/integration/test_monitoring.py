"""The dashboard and the alert rules in deploy/monitoring ask for series that a server really has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import aiohttp
import yaml

from rolltap.engine.scripted import say
from rolltap.types import Task

from ..harnesses.house import POLICY, house

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
NAME = re.compile(r"\brolltap_[a-z_]+")
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}


def expressions() -> list[str]:
    board = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    alerts = [rule["expr"] for group in rules for rule in group["rules"]]
    assert len(shown) > 15
    assert len(alerts) >= 10
    return [*shown, *alerts]


def served(text: str) -> dict[str, str]:
    """The names of all series of a scrape, with those of their labels that it shows."""
    names: dict[str, str] = {}
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        for suffix in SUFFIXES.get(kind, ("",)):
            names[name + suffix] = " ".join(re.findall(rf"^{name}{suffix}\{{(.*)\}}", text, re.MULTILINE))
    return names


async def test_every_series_that_is_asked_for_is_served(tmp_path: Path):
    async with house(say("Hello."), tmp_path) as home, aiohttp.ClientSession() as http:
        await home.client.open_group(Task("t", "Look."), policy=POLICY, n=1)
        opened = await home.open()
        body = {"model": POLICY, "messages": [{"role": "user", "content": "hi"}]}
        for key, status in ((opened.endpoint.key, 200), ("wrong", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            async with http.post(f"{home.urls['agent']}/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == status
        headers = {"Authorization": f"Bearer {home.app.settings.keys.admin}"}
        async with http.get(f"{home.urls['admin']}/metrics", headers=headers) as response:
            text = await response.text()
    names = served(text)
    asked = {name for expression in expressions() for name in NAME.findall(expression)}
    assert asked <= names.keys()
    for expression in expressions():
        assert expression.count("(") == expression.count(")")
    assert 'rolltap_http_responses_total{plane="agent",status="401"} 1.0' in text
    assert f'rolltap_groups{{policy="{POLICY}",status="open"}} 1.0' in text
    assert f'rolltap_rollouts{{policy="{POLICY}",status="pending"}} 1.0' in text
    assert "rolltap_store_up 1.0" in text
    assert "rolltap_tasks_queued 0.0" in text
