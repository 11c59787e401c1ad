"""Reads a vendor's reply in a dialect's own wire format, for the record of a passthrough call."""

from __future__ import annotations

from typing import Protocol

from rolltap.proxy.conversation.chat import Choice, Message, Usage


class ReplyReader(Protocol):
    """Reads one reply.

    `closing`: clients may take the data so far as the end of the reply. `ended`: the reply is complete. `error`: the
    vendor's error inside a reply that began well. `usage`: None if the vendor sent none. All methods may raise
    `msgspec.MsgspecError` and `InvalidRequest` for an unreadable reply.
    """

    closing: bool
    ended: bool
    error: str
    usage: Usage | None

    def event(self, data: bytes) -> None:
        """Reads the data of a server-sent event."""
        ...

    def whole(self, body: bytes) -> None:
        """Reads a reply that is not streamed."""
        ...

    def choice(self) -> Choice:
        """Returns the message so far; of several choices the first.

        The dialect parses the same message when the harness sends the reply back. So the next call finds this one.
        """
        ...


def make_choice(message: Message, finish: str) -> Choice:
    """Returns a choice. Its finish is `tool_calls` if the message has tool calls and was not cut off."""
    if message.tool_calls and finish == "stop":
        finish = "tool_calls"
    return Choice(message, finish)  # type: ignore[arg-type]
