"""What is read from a reply's token ids: thinking, text and tool calls, in sampled order.

The client gets the text as sampled, up to the first stop string. A block that is no call is text like any other. The
only characters that are left out belong to the format: line breaks next to thinking or to a call, and white space that
stands alone there. Texts between which calls stood are joined by one line break.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rolltap.proxy.continuation.json_calls import read_call

CONTEXT = 4
"""Number of preceding ids that an id's text may depend on."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call as sampled. `arguments` is JSON text. `ok` is False if its block could not be read to its end.

    A block that has `begun` counts as a call even if it is not `ok`; `arguments` may be incomplete then (`json_calls`).
    `id` is the id that the model sampled, in a format with ids. `raw` is the text between the block's tokens.
    """

    name: str
    arguments: str
    ok: bool
    raw: str
    begun: bool = False
    complete: bool = False
    id: str = ""

    def as_begun(self, head: re.Pattern[str] | None) -> ParsedCall:
        """The call with name and arguments from its sampled text, if the text begins with `head`."""
        begun = read_call(head, self.raw) if head is not None else None
        if begun is None or begun.name is None:
            return self
        ok, complete = self.ok and begun.complete, begun.complete
        return replace(self, name=begun.name, arguments=begun.arguments, ok=ok, begun=True, complete=complete)


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """A part of a reply: a block with its `calls`, or text, whose `calls` are None.

    `text` is the sampled text, `start` the index of the part's first id in the reply.
    """

    text: str
    start: int
    calls: tuple[ParsedCall, ...] | None = None


IsCall = Callable[[ParsedCall], bool]


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """An assistant message read from its token ids. `reasoning` is None if the reply does not think."""

    pieces: tuple[ReplyPiece, ...] = ()
    reasoning: str | None = None

    @property
    def tool_calls(self) -> tuple[ParsedCall, ...]:
        return tuple(call for piece in self.pieces for call in piece.calls or ())

    @property
    def text(self) -> str:
        return self.text_beside(lambda call: call.ok or call.begun)

    def text_beside(self, is_call: IsCall) -> str:
        """The text around the calls, as a client gets it (`ReplyText`)."""
        text = ReplyText(StopStrings(()), after_thinking=self.reasoning is not None)
        parts: list[str] = []
        for piece in self.pieces:
            parts.append(text.add(piece.text) if is_text(piece, is_call) else text.interrupt())
        return "".join([*parts, text.end()])


def is_text(piece: ReplyPiece, is_call: IsCall) -> bool:
    """Whether the client gets the piece as text: it is text, or one of its calls is none."""
    return piece.calls is None or not all(map(is_call, piece.calls))


class ReplyText:
    """Takes text in sampled order; each method returns what can be sent. `stopped` is the stop string that was found.

    A run is the text between two calls. Line breaks at its end are held until it is known whether a call follows, and
    white space at its beginning until other characters do.
    """

    def __init__(self, stops: StopStrings, *, after_thinking: bool = False) -> None:
        self.stopped: str | None = None
        self._stops = stops
        self._may_stop = bool(stops)
        self._follows = after_thinking  # the run follows thinking or a call
        self._blank = True  # the run has only white space so far
        self._held = ""
        self._is_sent = False
        self._tail = ""  # the end of what was sent, where a stop string may have begun

    def thinks(self) -> None:
        """The reply has thinking before its text, and white space before that."""
        self._follows, self._held = True, ""

    def add(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        self._held += text
        if self._blank:
            if not self._held.strip():
                return ""
            self._begin_run()
        if not self._may_stop:
            return self._send(self._held.rstrip("\n"))
        if self._stop_found():
            return self._send(self._held)
        size = min(len(self._held.rstrip("\n")), len(self._held) - self._stops.possible(self._tail + self._held))
        return self._send(self._held[: max(0, size)])

    def interrupt(self) -> str:
        """A call stands here."""
        text = "" if self._blank or self.stopped is not None else self._send(self._held.rstrip("\n"))
        self._held, self._blank, self._follows = "", True, True
        return text

    def end(self) -> str:
        """The reply ends here."""
        if self._blank and not self._follows and self.stopped is None and self._held:
            self._begin_run()
            self._stop_found()
        return "" if self._blank else self._send(self._held)

    def _begin_run(self) -> None:
        self._blank = False
        if self._follows:
            self._held = self._held.lstrip("\n")
        if self._is_sent:
            self._held = f"\n{self._held}"

    def _stop_found(self) -> bool:
        """Cuts the held text at the first stop string."""
        at, self.stopped = self._stops.first(self._tail + self._held)
        if self.stopped is not None:
            self._held = self._held[: max(0, at - len(self._tail))]
        return self.stopped is not None

    def _send(self, text: str) -> str:
        self._held = self._held[len(text) :]
        self._is_sent = self._is_sent or bool(text)
        if text and self._may_stop:
            self._tail = (self._tail + text)[-self._stops.longest :]
        return text


class StopStrings:
    """The stop strings of a request; false without any. `longest` is the length of the longest one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self.longest = max(map(len, stops), default=0)

    def __bool__(self) -> bool:
        return bool(self._stops)

    def first(self, text: str) -> tuple[int, str | None]:
        """The index of the first stop string, and the string; (length, None) if there is none."""
        return min(((text.index(stop), stop) for stop in self._stops if stop in text), default=(len(text), None))

    def possible(self, text: str) -> int:
        """The number of characters at the end that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
