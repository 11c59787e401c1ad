"""What every harness promises, over the registry and over those that installed packages bring.

A command's definition is pure data that points the harness at the session, in HOME and nowhere else. A Python call is
run against a stand-in for the model.
"""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from rolltap.harnesses.agents.registry import get_harness, harness_names
from rolltap.harnesses.base import Command, Ending, Endpoint, Job, Limits, PythonCall
from rolltap.harnesses.runner.specs import launch_type

from ..unit.harnesses.stub import Stub, running, tool_call

BASE = "http://127.0.0.1:8710/s/SESSION"
JOB = Job(Endpoint(BASE, "the-key", "tiny"), "Do it; don't `rm`.", Path("/w"), Path("/h"))
NAMES = harness_names()
COMMANDS = [name for name in NAMES if launch_type(get_harness(name)) is Command]
CALLS = [name for name in NAMES if launch_type(get_harness(name)) is PythonCall]
DIALECTS = [
    (name, dialect)
    for name, dialects in {
        "pi": ("openai_chat", "openai_responses", "anthropic", "gemini"),
        "opencode": ("openai_chat", "openai_responses", "anthropic", "gemini"),
        "openclaw": ("openai_chat", "openai_responses", "anthropic", "gemini"),
        "qwen-code": ("openai_chat", "openai_responses", "anthropic"),
        "copilot-cli": ("openai_chat", "openai_responses", "anthropic"),
        "openai-agents": ("openai_chat", "openai_responses"),
    }.items()
    for dialect in dialects
]


@pytest.mark.parametrize(
    ("name", "dialect"), [(name, "") for name in COMMANDS] + DIALECTS, ids=lambda part: part or "default"
)
def test_the_launch_names_the_session_the_key_the_model_and_the_task(name: str, dialect: str) -> None:
    harness = get_harness(name, dialect=dialect)
    launch = harness.launch(JOB)
    assert isinstance(launch, Command)
    assert launch == harness.launch(JOB), "a launch is data, the same every time"
    text = json.dumps([launch.argv, dict(launch.env), dict(launch.files)])
    assert BASE in text
    assert "the-key" in text
    assert "tiny" in text
    assert any(JOB.instruction in part for part in (*launch.argv, *launch.env.values()))
    assert all(not Path(path).is_absolute() and ".." not in path for path in launch.files)
    assert "the-key" not in " ".join(launch.argv), "keys in argv are seen by every user of the machine"


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_was_tested_with_and_what_to_know(name: str) -> None:
    harness = get_harness(name)
    assert harness.name == name
    assert harness.package is not None
    assert harness.package.version[0].isdigit()
    assert harness.quirks
    assert harness.dialect in ("openai_chat", "openai_responses", "anthropic", "gemini")


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("name", CALLS)
async def test_a_python_call_uses_its_session_and_ends(name: str, stopped: bool, tmp_path: Path) -> None:
    turns = [tool_call("true"), {"role": "assistant", "content": "I am done."}]
    async with running(Stub(lambda messages: turns[sum(m["role"] == "assistant" for m in messages) > 0])) as stub:
        stub.sessions["the-key"] = "s0"
        for folder in ("work", "home"):
            (tmp_path / folder).mkdir()
        endpoint = Endpoint(f"{stub.url}/s/s0", "the-key", "tiny")
        job = replace(JOB, endpoint=endpoint, workdir=tmp_path / "work", home=tmp_path / "home", limits=Limits(turns=3))
        launch = get_harness(name).launch(job)
        assert isinstance(launch, PythonCall)
        stop = threading.Event()
        if stopped:
            stop.set()
        ending, output = await asyncio.wait_for(asyncio.to_thread(launch.run, stop), 60)
    assert ending in Ending
    assert isinstance(output, str)
    assert stopped or len(stub.calls["s0"]) >= 1
    assert len(stub.calls.get("s0", [])) <= 6
