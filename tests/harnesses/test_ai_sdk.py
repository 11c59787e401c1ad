"""The Vercel AI SDK as a client: the same streamed tool conversation over each of the four dialects is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rolltap.harnesses.base import Command, Ending, Limits, Package

from ..integration.talk import TALK
from .conftest import installed
from .house import Run, house

AI_SDK = Package(
    "npm",
    "ai",
    "7.0.173",
    executable="",
    also=("@ai-sdk/openai@4.0.118", "@ai-sdk/anthropic@4.0.105", "@ai-sdk/google@4.0.121"),
    node=22,
)
SCRIPT = Path(__file__).with_name("ai_sdk.mjs")


@pytest.mark.harness
@pytest.mark.timeout(400)
@pytest.mark.parametrize("dialect", ["openai_chat", "openai_responses", "anthropic", "gemini"])
async def test_the_ai_sdk_does_not_notice(dialect: str, tmp_path: Path) -> None:
    installation = installed(AI_SDK)
    async with house(TALK, tmp_path, history_thinking="keep") as home:
        session = await home.open()
        async with home.workspace(installation) as workspace:
            (workspace.folder / SCRIPT.name).write_text(SCRIPT.read_text())
            endpoint = workspace.endpoint(session.endpoint)
            told = {
                "DIALECT": dialect,
                "BASE_URL": endpoint.base_url,
                "KEY": endpoint.key,
                "MODEL": endpoint.model,
                "MODULES": str(installation.needs[0]),
            }
            command = Command(("node", SCRIPT.name), env=told)
            exit_ = await workspace.run(command, Limits(), 120, reach=session.endpoint.base_url)
        run = await home.read(Run(session))
    assert exit_.ending is Ending.DONE, exit_.output
    steps = json.loads(exit_.output.strip().splitlines()[-1])
    assert [step["text"] for step in steps] == ["I look at both.", "", "A frog.\nNothing else.", "Goodbye."]
    assert [step["places"] for step in steps] == [["shed", "pond"], ["roof"], [], []]
    assert [entry.extends for entry in run.asked] == [None, True, True, True]
    assert [call["break_"] for call in run.calls] == [None] * 4
    counted = [[len(entry.prompt_ids), len(entry.output)] for entry in run.asked]
    assert [step["usage"][:2] for step in steps] == counted
    assert [step["usage"][2] for step in steps] == [call["shared"] for call in run.calls]
    assert run.report["segments"] == 1
