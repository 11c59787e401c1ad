"""What a client sends to a plane, and how it reads the reply. `rolltap.http_client` sends it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

import msgspec

from rolltap.decoding import from_json
from rolltap.errors import RolltapError

T = TypeVar("T")

TRY_HEADER = "x-rolltap-try"
CALL_HEADER = "x-rolltap-call"
"""Of a reply on the agent plane: the id of the call that it answers, with several choices of the first."""


@dataclass(frozen=True, slots=True)
class RequestTry:
    """One of a client's tries of a request that changes something. `number` counts from 0."""

    request: str
    number: int

    @classmethod
    def read(cls, header: str) -> RequestTry | None:
        """The try of a header; None if there is no such header, or another client wrote it."""
        request, _, number = header.partition("/")
        return cls(request[:64], int(number[:9])) if request and number.isascii() and number.isdigit() else None

    @property
    def header(self) -> dict[str, str]:
        return {TRY_HEADER: f"{self.request}/{self.number}"}


current_try: ContextVar[RequestTry | None] = ContextVar("rolltap_current_try", default=None)
"""The try that is carried out now."""


def read_json(body: bytes) -> Any:
    return msgspec.json.decode(body) if body else None


def read_as(kind: type[T]) -> Callable[[bytes], T]:
    """Reads a reply as `kind`, a dataclass of `rolltap.contract`. Fields that it does not have are ignored."""
    return lambda body: from_json(body, kind)


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """One call. `body` is sent as JSON; `parse` reads the reply's body.

    `wait` is how many seconds the server may take on purpose, beyond the client's time-out.
    """

    method: str
    path: str
    body: Any = None
    query: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    parse: Callable[[bytes], T] = read_json
    wait: float = 0.0
    once: bool = False

    @property
    def target(self) -> str:
        return f"{self.path}?{urlencode(self.query, doseq=True)}" if self.query else self.path

    @property
    def content(self) -> bytes | None:
        return None if self.body is None else msgspec.json.encode(self.body)

    def read(self, body: bytes) -> T:
        """The parsed reply; `RolltapError` if no rolltap server writes such a reply."""
        try:
            return self.parse(body)
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            raise RolltapError(f"{self.method} {self.path}: the reply is not a rolltap server's: {error}") from error
