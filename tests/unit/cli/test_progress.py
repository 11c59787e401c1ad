"""What the progress of submitted tasks shows."""

from __future__ import annotations

from rich.console import Console

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
