"""One request on its way through an engine's HTTP, from its body to its last token. Each API has a subclass."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, Generic, TypeVar

from rolltap.errors import EngineProtocolError, RolltapError
from rolltap.proxy.engines.base import SampleChunk, SampleRequest, Take, join_chunks
from rolltap.proxy.engines.http import EngineHttp

Event = TypeVar("Event")


class Output(ABC, Generic[Event]):
    """One output as it grows. `finished` once the engine has said why it ended."""

    path: ClassVar[str]
    read_events: ClassVar[Callable[[Sequence[bytes]], Iterator[Any]]]
    """Reads events, or the one body of a reply that is not streamed."""

    def __init__(self, name: str, request: SampleRequest) -> None:
        self.name = name
        self.request = request
        self.finished = False

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The request's body."""

    @abstractmethod
    def cancel_request(self) -> tuple[str, dict[str, Any]]:
        """Path and body of the call that cancels the request: behind a router, closing the connection may not do it."""

    @abstractmethod
    def take(self, event: Event) -> Iterable[SampleChunk]:
        """The chunks of an event. Raises its error, if it is one."""

    @property
    def headers(self) -> Mapping[str, str]:
        return {}

    async def sample(self, http: EngineHttp, take: Take) -> None:
        """Sends the request and hands its output to `take`. Giving up cancels it on the server."""
        goes_on = True

        async def take_events(events: Sequence[bytes]) -> bool:
            nonlocal goes_on
            for chunk in self._chunks(events):
                goes_on = await take(chunk)
            return goes_on

        try:
            if self.request.stream:
                await http.stream(self.path, self.body(), take_events, self.headers)
            else:
                whole = await http.whole(self.path, self.body(), self.request.max_tokens, self.headers)
                await take_events([whole])
        except asyncio.CancelledError:
            goes_on = False
            raise
        finally:
            if not goes_on and not self.finished:
                http.soon(*self.cancel_request())
        if goes_on and not self.finished:
            raise EngineProtocolError(f"engine {self.name}: the stream ended before the output did")

    def _chunks(self, events: Sequence[bytes]) -> Iterator[SampleChunk]:
        """What came with these events, in one chunk as a rule, and then the error that one of them is."""
        chunks: list[SampleChunk] = []
        failure: RolltapError | None = None
        try:
            for event in type(self).read_events(events):
                chunks += self.take(event)
        except RolltapError as error:
            failure = error
        if len(chunks) == 1 and failure is None:
            yield chunks[0]
            return
        for _, alike in groupby(chunks, key=lambda chunk: chunk.logprobs is None):  # known log-probs stay known
            yield join_chunks(list(alike))
        if failure is not None:
            raise failure
