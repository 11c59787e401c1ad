"""Says that a long step goes on: a spinner in a terminal, a line now and then in a pipe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rolltap.cli.screen import Screen, say

FIRST_LINE_S, BETWEEN_LINES_S = 1.5, 10.0
"""In a pipe: a step that takes less than the first says nothing."""


@contextmanager
def working(what: str, *, if_stopped: str = "") -> Iterator[Callable[[str], None]]:
    """Shows on stderr that `what` goes on, and what the yielded function is told last.

    Ctrl-C prints that it was stopped, and `if_stopped`: what is left behind, and how to go on.
    """
    console = Screen(stderr=True, highlight=False)
    latest = what
    ended = threading.Event()
    try:
        if console.is_terminal:
            with console.status(what) as status:
                yield lambda text: status.update(f"{what}: {text}")
        else:
            began = time.monotonic()

            def note(text: str) -> None:
                nonlocal latest
                latest = f"{what}: {text}"

            def lines() -> None:
                if not ended.wait(FIRST_LINE_S):
                    say(f"{latest} ...", err=True)
                while not ended.wait(BETWEEN_LINES_S):
                    say(f"{latest} ({time.monotonic() - began:.0f} s)", err=True)

            teller = threading.Thread(target=lines, daemon=True)
            teller.start()
            try:
                yield note
            finally:
                ended.set()
                teller.join()
    except KeyboardInterrupt:
        say(f"stopped: {what}" + (f"; {if_stopped}" if if_stopped else ""), err=True)
        raise
