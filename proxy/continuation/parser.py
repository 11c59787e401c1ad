"""Converts sampled token ids to a stream of reply events.

Text and reasoning are streamed as they arrive, but never half a character, and never a character that may still change
its meaning (white space at a channel's edge, the beginning of a stop string). A reply ends at the first stop string in
its text; thinking and calls may contain it. A tool call with JSON arguments is streamed from the arguments' beginning
(`json_calls`); any other call is sent when its block is closed. A block that is no call is text, in its place.

Some parts are sent only when the reply is complete: a reply that begins like a tool call in plain text, one of a family
whose messages are not in one stream (gpt-oss with tools), and everything after a call that opens within thinking, as it
is only a draft if the thinking is closed after it.

Each block is read once, when it is closed, so the work is linear in the reply. The recorded message, which clients
without streaming get too, consists of the streamed parts.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from rolltap.protocols.conversation import (
    Choice,
    Message,
    Part,
    Reasoning,
    ReasoningDelta,
    ReplyEvent,
    Text,
    TextDelta,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from rolltap.protocols.handles import MAX_CALLS
from rolltap.proxy.continuation.json_calls import GrowingCall
from rolltap.proxy.continuation.parsed import CONTEXT, ParsedCall, ReplyText, StopStrings, is_text
from rolltap.proxy.continuation.rendering import TokenRenderer

WINDOW = 24
"""Maximum number of old ids that are decoded again with new ones. Then the window shrinks to the last `CONTEXT` ids."""

Channel = Literal["reasoning", "text", "tool", "held"]


class ReplyParser:
    """Parses one choice of a reply. `mint(position)` makes the id of the tool call at `position`.

    `max_calls` is the number of calls that the client accepts, at most `MAX_CALLS`; set it before the first id. With 0,
    calls are sent as text. Otherwise the reply ends where a surplus call opens, and is `unparsable` if the surplus is
    over `MAX_CALLS`. Surplus calls within one block are not sent, and the reply is `unparsable`.
    """

    def __init__(
        self,
        renderer: TokenRenderer,
        prompt: Sequence[int],
        tools: Sequence[Tool],
        stop: Sequence[str],
        mint: Callable[[int], str],
        index: int = 0,
    ) -> None:
        self._index = index
        self.max_calls = MAX_CALLS
        self.over = False  # a stop string or a surplus call was found: sampling can end
        self._renderer = renderer
        self._prompt = prompt[-64:]
        self._tools = tools
        self._custom = frozenset(tool.name for tool in tools if tool.kind == "custom")
        self._stop = StopStrings(stop)
        self._may_stop = bool(stop)
        self._mint = mint
        self._silent_ids = frozenset(renderer.silent_token_ids)
        self._ids: list[int] = []
        self._thinks = renderer.markers.opens_in_reasoning(prompt)
        self._channel: Channel = "reasoning" if self._thinks else "text"
        self._beginnings = renderer.markers.beginnings if tools else ()
        if renderer.markers.beginnings is None:
            self._channel = "held"
        self._text = ReplyText(self._stop, after_thinking=self._thinks)
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[ToolCall] = []  # completely sent calls
        self._is_complete = False  # one of them can be made
        self._sending: ToolCall | None = None
        self._arguments: list[str] = []  # the sent pieces of its arguments
        self._block: GrowingCall | None = None  # the open block, in a family with JSON arguments
        self._opened_at = 0  # the index of the open channel's first id
        self._run: list[int] = []  # the open channel's ids since it opened
        self._read = 0  # number of ids of `_run` whose text is in `_pending` or sent
        self._window = 0  # the index in `_run` where decoding begins
        self._window_text = ""  # the text of `_run` from `_window` to `_read`
        self._stream = renderer.tokenizer.text_stream()  # needs no window
        self._pending = ""  # white space at the end of the reasoning so far
        self._label = renderer.markers.reasoning_label  # what may still begin the thinking
        self._draft: int | None = None  # the index of the first call within thinking
        self._before_draft = 0  # number of ids of `_run` before it
        self._held_at = 0  # the index of the first id that is held
        self._block_at = 0  # the index of the last block's opening token
        self.reasoning_ids = 0
        self.unparsable = False  # a call's block could not be parsed completely, or a call was refused

    @property
    def stopped(self) -> str | None:
        """The stop string at which the reply ended."""
        return self._text.stopped

    @property
    def consumed(self) -> int:
        """The number of ids in the reply: all ids fed, or those up to the stop string."""
        return len(self._ids)

    def feed(self, ids: Sequence[int]) -> list[ReplyEvent]:
        """Takes new ids; returns the events that they complete. Ignores ids once the reply is `over`."""
        if self.over:
            return []
        text_ids = ids[:-1] if ids and ids[-1] in self._silent_ids else ids
        if not self._may_stop and self._is_plain(text_ids):
            self._ids += ids
            self._run += text_ids
            self.reasoning_ids += len(text_ids) if self._channel == "reasoning" else 0
            return self._drain()
        events: list[ReplyEvent] = []
        for token in ids:
            if self.over:
                break
            events += self._take(token)
        return events + self._drain()

    def finish(self, finish: Literal["stop", "length", "abort"]) -> tuple[list[ReplyEvent], Choice]:
        """The last events and the complete choice."""
        events: list[ReplyEvent] = []
        if self._channel == "held":
            events += self._release()
        elif self._draft is not None:  # nothing closed the thinking: the call ended it
            events += self._replay(self._draft)
        if self._channel == "tool" and not self.over:
            events += self._close_block()
        events += self._drain(is_last=True) + self._say(self._text.end())
        self.over = self.over or self.stopped is not None
        reasoning, text = "".join(self._thoughts), "".join(self._texts)
        parts: tuple[Part, ...] = (Reasoning(reasoning),) if reasoning else ()
        if text:
            parts = (*parts, Text(text))
        message = Message(role="assistant", parts=parts, tool_calls=tuple(self._calls))
        reason: Any = "stop" if self.stopped is not None else finish
        if reason == "stop" and self.stopped is None and self._is_complete:
            reason = "tool_calls"
        return events, Choice(message=message, finish=reason, stop=self.stopped, index=self._index)

    def _take(self, token: int) -> list[ReplyEvent]:
        """Takes one id. The text of the open channel is drained only if it could end the reply."""
        markers, events = self._renderer.markers, []
        if token == markers.tool_open and self._channel == "tool" and markers.tool_close is None:
            events += self._close_block()  # it ends where the next one begins
            if self.over:
                return events
        self._ids.append(token)
        if token in self._silent_ids or self._channel == "held":
            return events
        if token == markers.reasoning_open and self._is_blank():
            self._thinks = True
            self._text.thinks()
            self._open("reasoning")
        elif token == markers.reasoning_close and self._channel == "reasoning":
            self.reasoning_ids += len(self._run) - self._before_draft if self._draft is not None else 0
            self._draft = None
            events += self._drain(is_last=True)
            self._open("text")
        elif token == markers.tool_open and self._channel == "text":
            if self._is_surplus():
                self._ids.pop()
                return events
            events += self._drain(is_last=True)
            if self.over:
                return events
            self._open("tool")
            self._block_at = len(self._ids) - 1
        elif token == markers.tool_close and self._channel == "tool":
            events += self._close_block()
        else:
            events += self._append(token)
        return events

    def _append(self, token: int) -> list[ReplyEvent]:
        """Takes an id of the open channel."""
        if token == self._renderer.markers.tool_open and self._channel == "reasoning" and self._draft is None:
            events = self._drain()
            self._draft, self._before_draft = len(self._ids) - 1, len(self._run)
        else:
            events = []
        self._run.append(token)
        self.reasoning_ids += self._channel == "reasoning" and self._draft is None
        if self._stop:  # check after every token: the reply ends with the token that completes a stop string
            events += self._drain()
        return events

    def _is_blank(self) -> bool:
        """Whether the reply has only white space so far. Only then a tag opens thinking."""
        is_first_run = self._channel != "tool" and not self._calls and len(self._run) == len(self._ids) - 1
        return is_first_run and not self._renderer.tokenizer.decode(self._run).strip()

    def _is_plain(self, ids: Sequence[int]) -> bool:
        """Whether all ids belong to the open channel, as none is special."""
        if self._channel == "held" or self._draft is not None:
            return False
        return self._renderer.tokenizer.special_ids.isdisjoint(ids) and self._silent_ids.isdisjoint(ids)

    def _open(self, channel: Channel) -> None:
        """Switches to `channel`."""
        self._channel, self._run, self._read, self._pending = channel, [], 0, ""
        self._window, self._window_text, self._opened_at = 0, "", len(self._ids)
        self._stream = self._renderer.tokenizer.text_stream()
        head = self._renderer.markers.call_head
        self._block = GrowingCall(head) if channel == "tool" and head is not None else None

    def _drain(self, *, is_last: bool = False) -> list[ReplyEvent]:
        """The events for the open channel's text that can be sent."""
        if self._channel == "tool":
            return self._drain_call()
        if self._channel == "held" or self._draft is not None or (self._may_stop and self.stopped is not None):
            return []
        fresh = self._decode_new(is_last=is_last)
        if self._channel == "reasoning":
            return self._drain_thinking(fresh, is_last=is_last)
        if self._beginnings and not self._texts:
            beginning = self._renderer.tokenizer.decode(self._run[:WINDOW]).lstrip()
            if beginning.startswith(self._beginnings):  # it may be a call
                self._held_at = self._opened_at
                self._text = ReplyText(self._stop, after_thinking=self._thinks)
                self._open("held")
                return []
        events = self._say(self._text.add(fresh)) if fresh else []
        if self._may_stop:
            self.over = self.over or self.stopped is not None
        return events

    def _drain_thinking(self, fresh: str, *, is_last: bool) -> list[ReplyEvent]:
        """The event for the thinking that can be sent: without the family's label and white space at the edges."""
        fresh = self._pending + fresh
        if not self._thoughts:
            fresh, label = fresh.lstrip(), self._label
            if label and len(fresh) < len(label) and label.startswith(fresh) and not is_last:
                self._pending = fresh
                return []
            fresh, self._label = fresh.removeprefix(label).lstrip(), ""
        settled = fresh.rstrip()
        self._pending = fresh[len(settled) :]
        return self._think(settled)

    def _drain_call(self) -> list[ReplyEvent]:
        """The events for the part of the open block that can be sent. A custom tool's text is sent when complete."""
        if self._block is None or self.max_calls == 0:
            return []
        added = self._block.feed(self._decode_new())
        if self._block.name is None or self._block.name in self._custom:
            return []
        events = self._start(self._block.name) if self._sending is None else []
        return events + self._more(added)

    def _decode_new(self, *, is_last: bool = False) -> str:
        """The text of the new ids, without an unfinished character unless the ids are the channel's last.

        A token's text may depend on the tokens before it. Then new ids are decoded together with a window of old ones,
        whose text is known.
        """
        if self._stream is not None:
            new, self._read = self._run[self._read :], len(self._run)
            return self._stream.feed(new, is_last=is_last)
        tokenizer = self._renderer.tokenizer
        if self._read == len(self._run):
            return ""
        if self._read - self._window > WINDOW:
            self._window = self._read - CONTEXT
            self._window_text = tokenizer.decode(self._run[self._window : self._read])
        whole = tokenizer.decode(self._run[self._window :])
        if not is_last and (whole.endswith("\ufffd") or not whole.startswith(self._window_text)):
            return ""
        fresh = whole[len(self._window_text) :]
        self._read, self._window_text = len(self._run), whole
        return fresh

    def _close_block(self) -> list[ReplyEvent]:
        """The events of the block that ends here."""
        events = self._drain_call()
        calls = self._renderer.read_block(self._ids[self._block_at :], self._tools)
        self._open("text")
        return events + self._settle(calls, self._block_at)

    def _settle(self, calls: Sequence[ParsedCall], start: int) -> list[ReplyEvent]:
        """The events of the block of `calls` that begins at `start`: its calls, and its text if one of them is none."""
        self.unparsable = self.unparsable or any(not call.ok for call in calls)
        if self._sending is not None:  # then the block is this call
            return self._end_call(calls[0])
        wanted = [call for call in calls if self._is_call(call)]
        events = self._say_ids(start) if len(wanted) < len(calls) else self._say(self._text.interrupt())
        return events if self.over else events + self._send(wanted)

    def _release(self) -> list[ReplyEvent]:
        """The events of a reply, or of its end, that was held."""
        if self._renderer.markers.beginnings is None:
            return self._release_pieces()
        calls = self._renderer.read_block(self._ids[self._held_at :], self._tools)
        self._open("text")
        self._beginnings = ()
        if calls:
            return self._settle(calls, self._held_at)
        return self._say_ids(self._held_at)

    def _release_pieces(self) -> list[ReplyEvent]:
        """The events of a reply that was held because its family's messages are not in one stream."""
        parsed = self._renderer.parse(self._ids, self._prompt, self._tools)
        self._text = ReplyText(self._stop, after_thinking=parsed.reasoning is not None)
        events = self._think(parsed.reasoning or "")
        for piece in parsed.pieces:
            if piece.calls is not None and self._is_surplus():
                del self._ids[piece.start :]
                break
            calls = piece.calls or ()
            self.unparsable = self.unparsable or any(not call.ok for call in calls)
            events += self._say(self._text.add(piece.text) if is_text(piece, self._is_call) else self._text.interrupt())
            if self.stopped is not None:
                counts = range(piece.start, len(self._ids) + 1)
                del self._ids[counts[bisect_left(counts, True, key=self._stops_by)] :]
                break
            events += self._send([call for call in calls if self._is_call(call)])
        return events

    def _stops_by(self, count: int) -> bool:
        """Whether the text of the first `count` ids has a stop string."""
        parsed = self._renderer.parse(self._ids[:count], self._prompt, self._tools)
        return self._stop.first(parsed.text_beside(self._is_call))[1] is not None

    def _replay(self, start: int) -> list[ReplyEvent]:
        """Takes the ids from `start` again, as what follows thinking that a call ended."""
        again = self._ids[start:]
        del self._ids[start:], self._run[self._before_draft :]
        self._draft = None
        events = self._drain(is_last=True)
        self._open("text")
        for token in again:
            if self.over:
                break
            events += self._take(token)
        return events

    def _say_ids(self, start: int) -> list[ReplyEvent]:
        """Sends the ids from `start` as text. If a stop string is among it, the reply ends there."""
        again = self._ids[start:]
        del self._ids[start:]
        events: list[ReplyEvent] = []
        for token in again:
            self._ids.append(token)
            if token in self._silent_ids:
                continue
            self._run.append(token)
            if self._stop:
                events += self._drain()
                if self.over:
                    return events
        return events + self._drain()

    def _is_surplus(self) -> bool:
        """Whether the client accepts no call more. Then the reply is over."""
        if not self.max_calls or len(self._calls) < self.max_calls:
            return False
        self.over, self.unparsable = True, self.unparsable or self.max_calls == MAX_CALLS
        return True

    def _say(self, text: str) -> list[ReplyEvent]:
        if not text:
            return []
        self._texts.append(text)
        return [TextDelta(text, self._index)]

    def _think(self, text: str) -> list[ReplyEvent]:
        if not text:
            return []
        self._thoughts.append(text)
        return [ReasoningDelta(text, self._index)]

    def _send(self, calls: Sequence[ParsedCall]) -> list[ReplyEvent]:
        """The events for as many of `calls` as the client accepts."""
        events: list[ReplyEvent] = []
        accepted = calls[: self.max_calls - len(self._calls)]
        for call in accepted:
            events += self._start(call.name) + self._end_call(call)
        self.unparsable = self.unparsable or len(accepted) < len(calls)
        return events

    def _is_call(self, call: ParsedCall) -> bool:
        return self.max_calls != 0 and (call.ok or (call.begun and call.name not in self._custom))

    def _start(self, name: str) -> list[ReplyEvent]:
        """Begins to send a call."""
        events, position = self._say(self._text.interrupt()), len(self._calls)
        self._sending = ToolCall(self._mint(position), name, "", "custom" if name in self._custom else "function")
        return [*events, ToolCallStarted(position, self._sending.id, name, self._sending.kind, self._index)]

    def _more(self, arguments: str) -> list[ReplyEvent]:
        """Sends more of a call's arguments."""
        self._arguments.append(arguments)
        return [ToolCallDelta(len(self._calls), arguments, self._index)] if arguments else []

    def _end_call(self, call: ParsedCall) -> list[ReplyEvent]:
        """The rest and the end of the call being sent."""
        assert self._sending is not None
        position, sent = len(self._calls), "".join(self._arguments)
        whole = _custom_input(call.arguments) if self._sending.kind == "custom" else call.arguments
        events = self._more(whole[len(sent) :]) if whole.startswith(sent) else []
        arguments = "".join(self._arguments)
        self._calls.append(msgspec.structs.replace(self._sending, arguments=arguments, given_id=call.id))
        self._is_complete = self._is_complete or call.ok or call.complete
        self._sending, self._arguments = None, []
        return [*events, ToolCallEnded(position, self._index)]


def _custom_input(arguments: str) -> str:
    """A custom tool's text: the `input` argument that its template declared. Other arguments are returned unchanged."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value["input"] if isinstance(value, dict) and isinstance(value.get("input"), str) else arguments
