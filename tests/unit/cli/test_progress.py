"""What the progress of submitted tasks shows."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rolltap.cli.main import app
from rolltap.cli.screen import working
from rolltap.cli.tasks import ProgressView, bars
from rolltap.harnesses.agents.install import Installation
from rolltap.harnesses.base import Package

from .plane import submission


def test_it_says_what_the_work_waits_for_while_it_waits() -> None:
    shown = bars()
    view = ProgressView(shown)

    def line(waits_for: str) -> str:
        view.update_from_server(submission(queued=2, waits_for=waits_for))
        console = Console(width=200)
        with console.capture() as captured:
            console.print(shown.get_renderable())
        return captured.get()

    assert "waits for a free slot of [n1]" in line("a free slot of [n1]")
    assert "waits" not in line("")


def test_in_a_pipe_a_long_step_says_that_it_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolltap.cli.screen.FIRST_LINE_S", 0.0)
    monkeypatch.setattr("rolltap.cli.screen.BETWEEN_LINES_S", 0.01)
    with working("exporting sft") as note:
        note("3 sessions")
        time.sleep(0.05)
    first, *others = capsys.readouterr().err.splitlines()
    assert first in ("exporting sft ...", "exporting sft: 3 sessions ...")
    assert "exporting sft: 3 sessions (0 s)" in others


def told_in_a_pipe(*arguments: str) -> str:
    """What a command says on stderr."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stderr


def test_an_install_and_an_export_say_that_they_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolltap.cli.screen.FIRST_LINE_S", 0.0)
    monkeypatch.setattr("rolltap.cli.screen.BETWEEN_LINES_S", 0.01)
    monkeypatch.chdir(tmp_path)

    def install(package: Package) -> Installation:
        time.sleep(0.05)
        return Installation(package, (Path("bin"),), (), {}, seconds=0.05)

    async def run_export(job: object, show: Callable[[int, int], None]) -> dict[str, Any]:
        show(3, 1)
        await asyncio.sleep(0.05)
        return {"failed": {"count": 0}, "rows": 1}

    monkeypatch.setattr("rolltap.cli.harness.install", install)
    monkeypatch.setattr("rolltap.cli.export.run_export", run_export)
    monkeypatch.setattr("rolltap.cli.export._print", lambda *_: None)
    assert re.search(r"installing codex [\d.]+ \(0 s\)", told_in_a_pipe("harness", "install", "codex"))
    assert "exporting trajectories to out: 3 sessions, 1 group (0 s)" in told_in_a_pipe(
        "export", "out", "--format", "trajectories"
    )


def test_an_interrupt_says_what_it_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), working("installing codex", if_stopped="nothing is left"):
        raise KeyboardInterrupt
    assert capsys.readouterr().err.splitlines()[-1] == "stopped: installing codex; nothing is left"
