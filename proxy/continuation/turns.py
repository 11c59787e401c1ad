"""Reads the messages of a request as turns: the pieces of one reply become one message again.

A protocol lets a client spell a reply in several ways: each call followed by its own result, text and calls in messages
of their own, thinking in tags at the beginning of the text, results in another order than the calls. `TurnReader` finds
the recorded reply that pieces belong to, by their handles or by their place in the conversation, and joins them only if
they are that reply: its texts in order with nothing but white space between them, all its calls, its thinking. Any
other message stays as the client wrote it, so an edit stays an edit. A message that is a recorded reply at its place is
never joined with others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from rolltap.protocols.conversation import Message, Reasoning, Text, ToolCall
from rolltap.protocols.handles import recorded_name
from rolltap.proxy.continuation.call_node import CallNode
from rolltap.proxy.continuation.canonical import canonical_arguments, extend_chain, message_digest

THINKING_TAG = re.compile(r"<(?P<tag>think|thinking|thought|reasoning)>\s*")
"""How thinking begins that a client sends back as text."""

MAX_PIECES = 64
"""Maximum number of a reply's pieces, besides those of its calls: a history may be as long as a client likes."""


class RecordedReplies(Protocol):
    """What a session has on record of replies."""

    def call(self, call_id: str) -> CallNode | None:
        """The completed call with this id."""
        ...

    def answers(self, link: bytes) -> Sequence[CallNode]:
        """The completed calls whose request's chain digest is `link`, the latest first; of equal replies one."""
        ...


@dataclass(slots=True)
class Turns:
    """A conversation's messages as turns.

    `firsts[i]`: the number of the first of the messages read that message i consists of. `open_at`: the number of the
    first message that later ones may still change. `proven`: every assistant message is a recorded reply.
    """

    messages: list[Message] = field(default_factory=list)
    links: list[bytes] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    open_at: int = 0
    proven: bool = True


@dataclass(slots=True)
class Piecing:
    """The part of a recorded reply that the pieces so far have. `end`: the number of the message after them."""

    reply: Message
    end: int
    place: int = 0  # in the reply's text
    thinking: list[Reasoning] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)
    handle: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.place == len(self.reply.text.strip()) and len(self.calls) == len(self.reply.tool_calls)

    def take(self, piece: Message) -> bool:
        """Adds a piece if the reply goes on with it. Returns False, and is of no use any more, if it does not."""
        self.handle = self.handle or piece.handle
        known = {part.text.strip() for part in self.thinking}
        self.thinking += [p for p in piece.parts if isinstance(p, Reasoning) and p.text.strip() not in known]
        texts = [part.text.strip() for part in piece.parts if isinstance(part, Text)]
        if not all(map(self._take_text, texts)):
            return False
        due = self.reply.tool_calls[len(self.calls) :]
        self.calls += piece.tool_calls
        return len(piece.tool_calls) <= len(due) and all(map(_is_same_call, piece.tool_calls, due))

    def message(self) -> Message:
        """The whole reply, with the client's handles and thinking."""
        text = (Text(self.reply.text),) if self.reply.text else ()
        return Message("assistant", (*self.thinking, *text), tuple(self.calls), handle=self.handle)

    def _take_text(self, text: str) -> bool:
        whole = self.reply.text.strip()
        rest = whole[self.place :].lstrip()
        if not rest.startswith(text):
            after = self._after_tags(text)
            if after is None or not rest.startswith(after):
                return False
            thought = self.reply.reasoning
            if thought.strip() not in {part.text.strip() for part in self.thinking}:
                self.thinking.append(Reasoning(thought))
            text = after
        if text:
            self.place = len(whole) - len(rest) + len(text)
        return True

    def _after_tags(self, text: str) -> str | None:
        """The text after the reply's thinking in tags; None if the text does not begin with it."""
        opening, thought = THINKING_TAG.match(text), self.reply.reasoning.strip()
        if opening is None or not thought or self.place or self.calls:
            return None
        rest = text[opening.end() :]
        closing = f"</{opening['tag']}>"
        after = rest[len(thought) :].lstrip()
        return after[len(closing) :].lstrip() if rest.startswith(thought) and after.startswith(closing) else None


class TurnReader:
    """Reads conversations of one session. `digest(message)` is the digest of a message without its thinking."""

    def __init__(self, record: RecordedReplies, digest: Callable[[Message], bytes]) -> None:
        self._record = record
        self._digest = digest

    def read(self, messages: Sequence[Message], link: bytes) -> Turns:
        """The messages as turns. `link`: the chain digest of what is before them."""
        turns = Turns()
        at = 0
        while at < len(messages):
            first = at
            if messages[at].role != "assistant":
                group, at = messages[at : at + 1], at + 1
                turns.open_at = len(turns.messages) + 1
            else:
                turns.open_at = len(turns.messages)
                group, at, is_reply = self._turn(messages, at, link)
                turns.proven = turns.proven and is_reply
            for message in group:
                link = extend_chain(link, self._digest(message))
                turns.messages.append(message)
                turns.links.append(link)
                turns.firsts.append(first)
        return turns

    def _turn(self, messages: Sequence[Message], at: int, link: bytes) -> tuple[Sequence[Message], int, bool]:
        """The turn that begins with message `at`, with the results that follow it; the number of the message after it;
        and whether it is a recorded reply."""
        first = messages[at]
        results_end = at + 1
        while results_end < len(messages) and messages[results_end].role == "tool":
            results_end += 1
        name = _named_call(first)
        named = self._record.call(name) if name else None
        literal = self._is_reply(first, link, named)
        next_name = _named_call(messages[results_end]) if results_end < len(messages) else ""
        if not literal or (name and next_name == name):
            for node in self._candidates(messages, at, link, named):
                pieces = self._pieces(node, messages, at, link)
                if pieces is not None:
                    turn = pieces.message()
                    return [turn, *_in_order(pieces.results, turn.tool_calls)], pieces.end, True
        results = messages[at + 1 : results_end]
        if any(result.call_offset for result in results):
            results = _in_order(results, first.tool_calls)
        return [first, *results], results_end, literal

    def _is_reply(self, message: Message, link: bytes, named: CallNode | None) -> bool:
        """Whether a message alone is the reply of the call that it names, or one that is on record at its place."""
        digest = self._digest(message)
        if named is not None:
            return extend_chain(named.request_digest(), digest) == named.context_digest
        context = extend_chain(link, digest)
        return any(node.context_digest == context for node in self._record.answers(link))

    def _candidates(
        self, messages: Sequence[Message], at: int, link: bytes, named: CallNode | None
    ) -> Iterable[CallNode]:
        """The calls whose reply may begin with message `at`."""
        if named is not None:
            yield named
            return
        if not messages[at].tool_calls:
            for message in messages[at + 1 : at + MAX_PIECES]:
                if message.role != "assistant":
                    break
                if name := _named_call(message):
                    if (node := self._record.call(name)) is not None:
                        yield node
                    break
        yield from self._record.answers(link)

    def _pieces(self, node: CallNode, messages: Sequence[Message], at: int, link: bytes) -> Piecing | None:
        """The pieces from message `at` on that are the reply of `node`, with the results beside them; None if they are
        not."""
        assert node.reply is not None
        piecing = Piecing(node.reply, at)
        for number in range(at, min(len(messages), at + MAX_PIECES + 4 * len(node.reply.tool_calls))):
            message = messages[number]
            if message.role == "tool":
                piecing.results.append(message)
            elif message.role != "assistant" or not self._goes_on(piecing, node, message, link, number == at):
                break
            elif not piecing.take(message):
                return None
            link = extend_chain(link, self._digest(message))
            piecing.end = number + 1
        digest = message_digest(piecing.message())
        is_reply = piecing.is_complete and extend_chain(node.request_digest(), digest) == node.context_digest
        return piecing if is_reply else None

    def _goes_on(self, piecing: Piecing, node: CallNode, message: Message, link: bytes, is_first: bool) -> bool:
        """Whether a message may be the next piece of the reply. One that is itself a reply at its place is none."""
        if is_first:
            return True
        name = _named_call(message)
        if name:
            return name == node.call_id and not (
                piecing.is_complete and (message.text.strip() or message.tool_calls or message.reasoning.strip())
            )
        return not piecing.is_complete and not self._is_reply(message, link, None)


def _named_call(message: Message) -> str:
    """The id of the call in a message's handles; empty if it has none."""
    handles = [message.handle, *(call.id for call in message.tool_calls)]
    handles += [part.handle for part in message.parts if isinstance(part, Reasoning)]
    return next((name for handle in handles if (name := recorded_name(handle))), "")


def _is_same_call(call: ToolCall, recorded: ToolCall) -> bool:
    if call.name != recorded.name:
        return False
    if call.kind == "function" == recorded.kind:
        return canonical_arguments(call.arguments) == canonical_arguments(recorded.arguments)
    return call.arguments.strip() == recorded.arguments.strip()


def _in_order(results: Sequence[Message], calls: Sequence[ToolCall]) -> list[Message]:
    """The results of a turn in the order of its calls. Results of other turns' calls leave the order as it is."""
    places = {call.id: place for place, call in enumerate(calls)}
    numbers = [places.get(result.tool_call_id or "", -1) for result in results]
    if -1 in numbers:
        return list(results)
    ordered = sorted(zip(numbers, results, strict=True), key=lambda numbered: numbered[0])
    return [
        result if result.call_offset == place - due else replace(result, call_offset=place - due)
        for due, (place, result) in enumerate(ordered)
    ]
