"""A person's own terminal: a harness without a prompt, in the sandbox."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rolltap.harnesses.agents.registry import HARNESSES
from rolltap.harnesses.base import Command, Interactive
from rolltap.harnesses.runner.specs import SAMPLE_JOB

TALKING = sorted(name for name, harness in HARNESSES.items() if isinstance(harness, Interactive))
RUN = """
import asyncio
from rolltap.harnesses.base import Command, Limits
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime
from rolltap.harnesses.runtimes.sources import Empty

async def main():
    workspace = await BubblewrapRuntime().prepare(Empty())
    script = "test -t 0 && test -t 1 && echo at $PWD with $TERM; read line; echo got $line"
    ended = await workspace.run(Command(("sh", "-c", script), terminal=True), Limits(), 20)
    await workspace.close()
    print(ended.ending.value)

asyncio.run(main())
"""


def test_the_harnesses_that_people_use_by_hand_have_the_form() -> None:
    assert {"codex", "claude-code", "gemini-cli", "opencode", "mini-swe-agent"} <= set(TALKING)


@pytest.mark.parametrize("name", TALKING)
def test_it_is_the_same_launch_without_a_prompt(name: str) -> None:
    harness = HARNESSES[name]
    assert isinstance(harness, Interactive)
    job = replace(SAMPLE_JOB, instruction="THE-PROMPT")
    unattended, by_hand = harness.launch(job), harness.converse(job)
    assert isinstance(unattended, Command)
    assert by_hand.terminal
    assert not unattended.terminal
    assert "THE-PROMPT" not in by_hand.argv
    assert "-p" not in by_hand.argv
    assert by_hand.argv[0] == unattended.argv[0]
    assert by_hand.env == unattended.env
    assert set(unattended.files) <= set(by_hand.files)


def test_the_sandbox_hands_the_terminal_over(tmp_path: Path) -> None:
    """About 1 CPU second: a process with a terminal of its own."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-color", "TMPDIR": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-c", RUN], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    os.write(ours, b"hello\n")
    seen = b""
    while b"done" not in seen:
        seen += os.read(ours, 4096)
    assert child.wait(20) == 0
    os.close(ours)
    assert b"at /workspace with xterm-color" in seen
    assert b"got hello" in seen
