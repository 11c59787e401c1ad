"""Reading a vendor's reply in a dialect's own wire format, for the record of a passthrough call.

A reader takes a dialect's bodies and events and gives the assistant message as the dialect will parse it when the
harness sends it back: that is how the next call finds this one.
"""

from __future__ import annotations

from typing import Protocol

from rolltap.proxy.conversation.chat import Choice, Message, Usage


class ReplyReader(Protocol):
    """One reply. Its methods may raise `msgspec.MsgspecError` and `InvalidRequest` for what they can't read.

    `closing`: clients may take what was read for the reply's end. `ended`: nothing is missing. `error` is what the
    vendor said within a reply that began well. `usage` is None where it told none.
    """

    closing: bool
    ended: bool
    error: str
    usage: Usage | None

    def event(self, data: bytes) -> None:
        """Takes in the data of a server-sent event."""
        ...

    def whole(self, body: bytes) -> None:
        """Takes in a reply that is not streamed."""
        ...

    def choice(self) -> Choice:
        """The turn so far, the first one where there are several."""
        ...


class MakeReader(Protocol):
    def __call__(self) -> ReplyReader: ...


def as_turn(message: Message, finish: str) -> Choice:
    """A choice whose finish is `tool_calls` where it has any and was not cut off."""
    if message.tool_calls and finish == "stop":
        finish = "tool_calls"
    return Choice(message, finish)  # type: ignore[arg-type]
