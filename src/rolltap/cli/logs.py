"""Logging of the commands that run for long: one line an event on stderr, as text or as JSON."""

from __future__ import annotations

import logging
from enum import StrEnum

from pythonjsonlogger.json import JsonFormatter

from rolltap.cli.screen import visible

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
    """Lines for a terminal: recorded text in a message has nothing that a terminal would obey."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def json_only() -> bool:
    """Whether stderr is for machines: then nothing but events is printed there, and no link with a token."""
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
