"""The reader processes of this runner: everything that an agent wrote is parsed there, never in the runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from rolltap.untrusted import ReaderServer

P = ParamSpec("P")
T = TypeVar("T")

MODULES = (
    "rolltap.harnesses.tampering",
    "rolltap.harnesses.logs.check",
    "sqlite3",
    "xml.etree.ElementTree",
)
READERS = ReaderServer(MODULES)


async def read_untrusted(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns `function(*args)`, run by a reader process: see `ReaderServer.ask`."""
    return await READERS.ask(function, *args, **kwargs)
