"""The lines that `rolltap serve` logs, for people and for machines."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from rolltap.cli.screen import LogFormat, LogLevel, set_up_logging


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("rolltap")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_json_has_an_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(LogLevel.INFO, LogFormat.JSON)
    logging.getLogger("rolltap.call").info("session %s: said\n%s", "s1", '"so"')
    logging.getLogger("rolltap.call").debug("not told")
    logging.getLogger("other").info("not told")
    (line,) = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert (event["level"], event["logger"]) == ("INFO", "rolltap.call")
    assert event["message"] == 'session s1: said\n"so"'
    assert event["time"]


def test_text_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(LogLevel.WARNING, LogFormat.TEXT)
    logging.getLogger("rolltap.call").warning("refused: %s", "\x1b[2Jgone")
    logging.getLogger("rolltap.call").info("not told")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING rolltap.call: refused: ␛[2Jgone")
