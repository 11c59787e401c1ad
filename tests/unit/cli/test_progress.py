"""What the progress of submitted tasks shows."""

from __future__ import annotations

import time

import pytest
from rich.console import Console

from rolltap.cli.screen import working
from rolltap.cli.tasks import ProgressView, bars


def test_it_says_what_the_work_waits_for_while_it_waits() -> None:
    shown = bars()
    view = ProgressView(shown)

    def line(waits_for: str) -> str:
        view.update_from_server({"rollouts": {}, "queued": 2, "n": 1, "ended": False, "waits_for": waits_for})
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


def test_an_interrupt_says_what_it_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), working("installing codex", if_stopped="nothing is left"):
        raise KeyboardInterrupt
    assert capsys.readouterr().err.splitlines()[-1] == "stopped: installing codex; nothing is left"
