"""The output of the commands: text and tables, the progress of long steps, and log lines.

Recorded text comes from agents and strangers, and a terminal obeys control characters. So control characters, and those
that change the direction of writing, are printed as visible symbols (ESC as U+241B). Square brackets are text: our own
colours are given as a style or as `rich.text.Text`, never as markup.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
import typer
from pythonjsonlogger.json import JsonFormatter
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_TURNS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that change the direction of writing."""

_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *_TURNS], 0xFFFD),
}


def visible(text: str) -> str:
    """`text` with its control characters made visible; line ends and tabs stay."""
    return text.translate(_PICTURES)


def json_text(value: Any) -> str:
    """A server's reply as JSON text."""
    return msgspec.json.encode(value).decode()


def say(text: str, *, err: bool = False, style: str | None = None) -> None:
    """Prints `text`, in a colour where `style` names one and the output is a terminal."""
    typer.secho(visible(text), err=err, fg=style)


class Screen(Console):
    """A rich console that prints control characters visibly, and does not wrap lines in a file or a pipe."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        if not self.is_terminal and all(isinstance(each, str | Text) for each in objects):
            options.setdefault("soft_wrap", True)  # a file or a pipe has no width
        super().print(*objects, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


@dataclass
class Stopped:
    """Whether the running command has said that it was stopped, and what it leaves."""

    told: bool = False

    def say(self, text: str) -> None:
        self.told = True
        say(text, err=True)


stopped = Stopped()


FIRST_LINE_S, BETWEEN_LINES_S = 1.5, 10.0
"""Seconds, in a pipe: before the first line (a shorter step prints nothing), and between two lines."""


@contextmanager
def working(what: str, *, if_stopped: str = "") -> Iterator[Callable[[str], None]]:
    """Shows on stderr that `what` is in progress, with the last text given to the yielded function.

    Ctrl-C prints that it was stopped, and `if_stopped`: what it leaves behind and how to continue.
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
        stopped.say(f"stopped: {what}" + (f"; {if_stopped}" if if_stopped else ""))
        raise


TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
JSON = "%(asctime)s %(levelname)s %(name)s %(message)s"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class TextFormatter(logging.Formatter):
    """Formats log lines for a terminal: control characters of recorded text are made visible."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def json_only() -> bool:
    """Whether stderr is for machines: then only events are printed there, and no link with a token."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def set_up_logging(level: LogLevel, form: LogFormat) -> None:
    """Sends rolltap's events of `level` and above to stderr, and the warnings of all others."""
    handler = logging.StreamHandler()
    if form is LogFormat.JSON:
        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        handler.setFormatter(JsonFormatter(JSON, rename_fields=names))
    else:
        handler.setFormatter(TextFormatter(TEXT, datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("rolltap").setLevel(level.upper())
