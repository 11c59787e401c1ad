"""Reading a vendor's reply in a dialect's own wire format, for the record of a passthrough call."""

from __future__ import annotations

from typing import Protocol

from rolltap.proxy.conversation.chat import Choice, Message, Usage


class ReplyReader(Protocol):
    """Reads one reply.

    `closing`: clients may take what was read for the reply's end. `ended`: nothing is missing. `error`: the vendor's
    error within a reply that began well. `usage`: None where the vendor gave none. All methods may raise
    `msgspec.MsgspecError` and `InvalidRequest` for a reply that they can't read.
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
        """The message so far; of several choices the first.

        The dialect parses the same message when the harness sends the reply back: that is how the next call finds
        this one.
        """
        ...


def make_choice(message: Message, finish: str) -> Choice:
    """A choice; its finish is `tool_calls` where the message has any and was not cut off."""
    if message.tool_calls and finish == "stop":
        finish = "tool_calls"
    return Choice(message, finish)  # type: ignore[arg-type]
