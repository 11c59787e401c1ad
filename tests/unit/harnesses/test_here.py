"""A harness that is started with its own approvals off is not let loose on a person's machine unasked."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolltap.errors import RuntimeFailed
from rolltap.harnesses.base import Command, Ending, Harness, Limits
from rolltap.harnesses.install import Installation
from rolltap.harnesses.registry import HARNESSES, get_harness
from rolltap.harnesses.runtimes import bubblewrap
from rolltap.harnesses.runtimes.here import acts_unasked, runtime_here
from rolltap.harnesses.sources import Empty

RUNS_AS_THE_PERSON_DOES = {"command", "mini-swe-agent-inprocess"}


def installed(harness: Harness) -> Installation:
    assert harness.package is not None
    return Installation(harness.package, (), (), {}, 0.0)


@pytest.mark.parametrize("name", sorted(HARNESSES.keys() - RUNS_AS_THE_PERSON_DOES))
def test_every_harness_runs_in_the_sandbox_as_nobody_answers_it(name: str) -> None:
    harness = get_harness(name)
    runtime, notice = runtime_here(harness, installed(harness), unsandboxed=False)
    assert runtime.sandbox is not None
    assert "in a sandbox" in notice
    runtime, notice = runtime_here(harness, installed(harness), unsandboxed=True)
    assert runtime.sandbox is None
    assert "it may do whatever you can" in notice


@pytest.mark.parametrize(("switch", "sandboxed"), [("--yolo", True), ("--careful", False)])
def test_a_persons_own_command_is_sandboxed_if_it_says_that_it_acts_unasked(switch: str, sandboxed: bool) -> None:
    harness = get_harness("command", argv=("agent", switch))
    assert (runtime_here(harness, None, unsandboxed=False)[0].sandbox is not None) is sandboxed
    assert bool(acts_unasked(harness)) is sandboxed


def test_what_is_not_installed_is_named_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, unsandboxed in (("mini-swe-agent", False), ("codex", True)):
        with pytest.raises(RuntimeFailed, match=f"rolltap harness install {name}"):
            runtime_here(get_harness(name), None, unsandboxed=unsandboxed)
    runtime_here(get_harness("command", argv=("sh",)), None, unsandboxed=False)


async def test_it_sees_this_folder_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    here.mkdir()
    other.mkdir()
    monkeypatch.chdir(here)
    harness = get_harness("codex")
    runtime, notice = runtime_here(harness, installed(harness), unsandboxed=False)
    workspace = await runtime.prepare(Empty())
    try:
        exit_ = await workspace.run(
            Command(("bash", "-c", f"echo new > made; test ! -e {other} && echo apart")), Limits(), 20
        )
    finally:
        await workspace.close()
    assert (exit_.ending, exit_.output.strip()) == (Ending.DONE, "apart")
    assert (here / "made").read_text() == "new\n"
    assert "sandbox" in notice


def test_outside_the_sandbox_it_runs_when_that_was_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    harness = get_harness("codex")
    runtime, notice = runtime_here(harness, installed(harness), unsandboxed=True)
    assert runtime.name == "here"
    assert "--dangerously-bypass-approvals-and-sandbox" in notice
    with pytest.raises(RuntimeFailed, match="harness install codex"):
        runtime_here(harness, None, unsandboxed=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    bubblewrap.refusal.cache_clear()
    try:
        with pytest.raises(RuntimeFailed, match="--no-sandbox"):
            runtime_here(harness, installed(harness), unsandboxed=False)
    finally:
        bubblewrap.refusal.cache_clear()
