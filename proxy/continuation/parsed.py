"""What is read from a reply's token ids: thinking, text and tool calls, in sampled order."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from rolltap.proxy.continuation.json_calls import read_call
from rolltap.proxy.continuation.reply_text import ReplyText
from rolltap.proxy.continuation.stop_strings import StopStrings


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
class Piece:
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

    pieces: tuple[Piece, ...] = ()
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


def is_text(piece: Piece, is_call: IsCall) -> bool:
    """Whether the client gets the piece as text: it is text, or one of its calls is none."""
    return piece.calls is None or not all(map(is_call, piece.calls))
