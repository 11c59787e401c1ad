"""Converts sampled token ids to a stream of reply events.

Text and reasoning are streamed as they arrive, but never half a character, and never a character that may still change
its meaning (white space at a channel's edge, the beginning of a stop string). A reply ends at the first stop string in
its text; thinking and calls may contain it. A tool call with JSON arguments is streamed from the arguments' beginning
(`json_calls`); any other call is sent when its block is closed.

Some parts are sent only when the reply is complete: text after the first block, and blocks that are not calls; text
after a special token that is not in the family's markers; a reply that begins like a tool call in plain text; and
everything after a call that opens within thinking, as it is only a draft if the thinking is closed after it.

The family's own parser reads each block when it is closed, and all ids at once at the end, so the work is linear in the
reply. The recorded message, which clients without streaming get too, consists of the streamed parts.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from rolltap.proxy.continuation.block_reader import BlockReader
from rolltap.proxy.continuation.handles import MAX_CALLS
from rolltap.proxy.continuation.json_calls import GrowingCall
from rolltap.proxy.continuation.rendering import ParsedCall, ParsedReply, TokenRenderer
from rolltap.proxy.continuation.stop_strings import StopStrings
from rolltap.proxy.conversation.chat import (
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

CONTEXT = 4
"""Number of preceding ids that an id's text may depend on."""

WINDOW = 24
"""Maximum number of old ids that are decoded again with new ones. Then the window shrinks to the last `CONTEXT` ids."""

Channel = Literal["reasoning", "text", "tool", "opaque"]


class ReplyParser:
    """Parses one choice of a reply. `mint(position)` makes the id of the tool call at `position`.

    `max_calls` is the number of calls that the client accepts, at most `MAX_CALLS`; set it before the first id. With 0,
    calls are sent as text. Otherwise the reply ends where a surplus call opens, and is `unparsable` if the surplus is
    over `MAX_CALLS`. If the family has no opening token, surplus calls are not sent and the reply is `unparsable`.
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
        self._reader = BlockReader(renderer, prompt[-64:], tools)
        self._tools = {tool.name: tool for tool in tools}
        self._stop = StopStrings(stop)
        self._mint = mint
        self._stop_ids = frozenset(renderer.stop_token_ids)
        self._ids: list[int] = []
        self._channel: Channel = "reasoning" if renderer.markers.opens_in_reasoning(prompt) else "text"
        self._beginnings = renderer.markers.beginnings if tools else ()
        if self._beginnings is None:
            self._channel = "opaque"
        self._tool_seen = False
        self._calls: list[ToolCall] = []  # completely sent calls
        self._sending: ToolCall | None = None
        self._arguments: list[str] = []  # the sent pieces of its arguments
        self._block: GrowingCall | None = None  # the open block, in a family with JSON arguments
        self._sent = {"reasoning": "", "text": ""}
        self._run: list[int] = []  # the open channel's ids since it opened
        self._read = 0  # number of ids of `_run` whose text is in `_pending` or sent
        self._window = 0  # the index in `_run` where decoding begins
        self._window_text = ""  # the text of `_run` from `_window` to `_read`
        self._pending = ""
        self._block_at = 0  # the index of the last block's opening token
        self._settled = 0  # number of ids up to the end of the last closed block
        self._sent_ids = 0  # number of ids up to the end of the last block of which a call was sent
        self._unchecked = ""  # the end of the text before `_settled`, where a stop string may begin
        self._suspected = False  # a stop string may be in the text before `_settled`
        self._searched = 0  # number of ids in which none was found
        self.stopped: str | None = None
        self.reasoning_ids = 0
        self.unparsable = False  # known after `finish`: a call's block could not be parsed completely, or was refused

    def feed(self, ids: Sequence[int]) -> list[ReplyEvent]:
        """Takes new ids; returns the events that they complete. Ignores ids once the reply is `over`."""
        if self.over:
            return []
        text_ids = ids[:-1] if ids and ids[-1] in self._stop_ids else ids  # the stop token has no text
        if not self._stop and self._channel != "opaque" and self._plain(text_ids):
            self._ids += ids
            self._run += text_ids
            self.reasoning_ids += len(text_ids) if self._channel == "reasoning" else 0
            return self._drain()
        events: list[ReplyEvent] = []
        markers = self._renderer.markers
        for token in ids:
            if self.over:
                break
            if token == markers.tool_open and self._channel == "tool" and markers.tool_close is None:
                events += self._open("text") + self._settle_block()  # it ends where the next one begins
                if self.over:
                    break
            self._ids.append(token)
            if token in self._renderer.stop_token_ids:
                continue
            if self._channel == "opaque":
                continue
            if token == markers.reasoning_open and self._is_blank():
                events += self._open("reasoning")
            elif token == markers.reasoning_close and self._channel == "reasoning":
                events += self._open("text")
            elif token == markers.tool_open and self._channel != "tool":
                events += self._open("opaque" if self._channel == "reasoning" else "tool")
                self._block_at = len(self._ids) - 1
                if self.max_calls and len(self._calls) >= self.max_calls:
                    self._ids.pop()
                    self.over, self.unparsable = True, self.max_calls == MAX_CALLS
            elif token == markers.tool_close and self._channel == "tool":
                events += self._open("text") + self._settle_block()
            elif token in self._renderer.tokenizer.special_ids and self._channel != "tool":
                events += self._open("opaque")
            else:
                self._run.append(token)
                self.reasoning_ids += self._channel == "reasoning"
                if self._stop:  # check after every token: the reply ends with the token that completes a stop string
                    events += self._drain()
        events += self._drain()
        return events

    def _is_blank(self) -> bool:
        """Whether the reply has only white space so far. Only then do families' parsers read a tag as thinking."""
        is_first_run = not self._tool_seen and len(self._run) == len(self._ids) - 1
        return is_first_run and not self._renderer.tokenizer.decode(self._run).strip()

    def _plain(self, ids: Sequence[int]) -> bool:
        """Whether no id is special, so that all of them belong to the open channel."""
        return self._renderer.tokenizer.special_ids.isdisjoint(ids) and self._stop_ids.isdisjoint(ids)

    def finish(self, finish: Literal["stop", "length", "abort"]) -> tuple[list[ReplyEvent], Choice]:
        """The last events and the complete choice."""
        self._end_at_surplus_call()
        parsed, text = self._whole()
        calls = self._calls_of(parsed)
        events = self._end_call(calls[len(self._calls) :])
        events += self._rest("reasoning", parsed.reasoning) + self._settle(parsed, text)
        broken = any(not call.ok for call in parsed.tool_calls) or len(calls) != len(self._calls)
        self.unparsable = self.unparsable or broken
        reasoning, text = self._sent["reasoning"], self._sent["text"]
        parts: tuple[Part, ...] = (Reasoning(reasoning),) if reasoning else ()
        if text:
            parts = (*parts, Text(text))
        message = Message(role="assistant", parts=parts, tool_calls=tuple(self._calls))
        reason: Any = "stop" if self.stopped is not None else finish
        if reason == "stop" and self.stopped is None and any(call.ok or call.complete for call in calls):
            reason = "tool_calls"
        return events, Choice(message=message, finish=reason, stop=self.stopped, index=self._index)

    def _end_at_surplus_call(self) -> None:
        """Cuts the ids where a surplus call opens, if the reply's last part is sent only now."""
        if self._channel != "opaque" or self.max_calls == 0:
            return

        def is_surplus(start: int) -> bool:
            return len(self._calls_of(self._reader.read(self._ids[:start]))) >= self.max_calls

        starts = [block.start for block in self._reader.blocks(self._ids)]
        if len(starts) <= self.max_calls:
            return
        surplus = starts[bisect_left(starts, True, key=is_surplus) :]
        if surplus:
            del self._ids[surplus[0] :]
            self.unparsable = self.max_calls == MAX_CALLS

    def _whole(self) -> tuple[ParsedReply, str]:
        """The reply as the family's parser reads it, and its text. Cuts the text at the first stop string, and the ids
        where it is complete or, if that is later, after the last call that was sent."""
        parsed = self._reader.read(self._ids)
        if self.stopped is not None:  # all text before the stop string is sent
            return parsed, self._sent["text"]
        text = self._reader.text(parsed, self._ids, self._is_call)
        at, stop = self._stop.first(text)
        if stop is None:
            return parsed, text
        self.stopped, self.over = stop, True
        to_stop = text[: at + len(stop)]
        counts = range(len(self._ids) if self._sending else self._sent_ids, len(self._ids) + 1)
        del self._ids[counts[bisect_left(counts, True, key=lambda count: self._shows(to_stop, count))] :]
        return self._reader.read(self._ids), text[:at].rstrip()

    def _shows(self, text: str, count: int) -> bool:
        """Whether the reply of the first `count` ids begins with `text`."""
        ids = self._ids[:count]
        return self._reader.text(self._reader.read(ids), ids, self._is_call).startswith(text)

    def _delta(self, channel: str, text: str) -> ReplyEvent:
        kind = ReasoningDelta if channel == "reasoning" else TextDelta
        return kind(text, self._index)

    @property
    def consumed(self) -> int:
        """The number of ids in the reply: all ids fed, or those up to the stop string."""
        return len(self._ids)

    def _open(self, channel: Channel) -> list[ReplyEvent]:
        """Switches to `channel`; returns the events for the last text of the previous one."""
        events = self._drain(ended=channel == "tool")
        self._tool_seen = self._tool_seen or channel == "tool"
        self._channel, self._run, self._read, self._pending = channel, [], 0, ""
        self._window, self._window_text = 0, ""
        head = self._renderer.markers.call_head
        self._block = GrowingCall(head) if channel == "tool" and head is not None else None
        return events

    def _drain(self, *, ended: bool = False) -> list[ReplyEvent]:
        """The events for the open channel's text that can be sent. After it has `ended`, no stop string can begin."""
        if self._channel == "tool":
            return self._drain_call()
        if self.stopped is not None or self._channel == "opaque":
            return []
        if self._channel == "text" and self._tool_seen:
            return []
        fresh = self._decode_new()
        sent = self._sent[self._channel]
        if not sent:
            fresh = fresh.lstrip()
        if not fresh:
            return []
        if self._channel == "text":
            if not sent and self._beginnings and fresh.startswith(self._beginnings):
                self._channel = "opaque"
                return []
            fresh = self._until_stop(sent, fresh)
        settled = fresh.rstrip()
        unsettled = 0
        if self._channel == "text" and self.stopped is None and not ended:
            unsettled = self._stop.possible(sent + settled)
        settled = settled[: len(settled) - unsettled].rstrip() if unsettled else settled
        self._pending = fresh[len(settled) :]
        if not settled:
            return []
        self._sent[self._channel] = sent + settled
        return [self._delta(self._channel, settled)]

    def _drain_call(self) -> list[ReplyEvent]:
        """The events for the part of the open block that can be sent. A custom tool's text is sent when complete."""
        if self._block is None or self.max_calls == 0:
            return []
        fresh, self._pending = self._decode_new(), ""
        added = self._block.feed(fresh)
        if self._block.name is None or self._is_custom(self._block.name):
            return []
        events = self._start(self._block.name) if self._sending is None else []
        return events + self._more(added)

    def _decode_new(self) -> str:
        """The pending text and the text of the new ids, without an unfinished character.

        A token's text may depend on the tokens before it. So new ids are decoded together with a window of old ones,
        whose text is known.
        """
        tokenizer = self._renderer.tokenizer
        if self._read - self._window > WINDOW:
            self._window = self._read - CONTEXT
            self._window_text = tokenizer.decode(self._run[self._window : self._read])
        whole = tokenizer.decode(self._run[self._window :])
        if whole.endswith("\ufffd") or not whole.startswith(self._window_text):
            return self._pending
        fresh = whole[len(self._window_text) :]
        self._read, self._window_text = len(self._run), whole
        return self._pending + fresh

    def _until_stop(self, sent: str, fresh: str) -> str:
        before = sent[max(0, len(sent) - self._stop.longest) :]
        at, self.stopped = self._stop.first(before + fresh)
        self.over = self.stopped is not None
        return fresh if self.stopped is None else (before + fresh)[len(before) : at]

    def _settle_block(self) -> list[ReplyEvent]:
        """The events that end the call being sent, and the other calls of the block that ends here.

        A stop string that is known to the whole reply only (`_may_have_stopped` is not exact) is looked for when the
        reply has doubled, so that all looks together are linear in it. Then later calls may have been sent.
        """
        parsed = self._reader.read_block(self._ids[self._block_at :])
        self._suspected = self._suspected or (bool(self._stop) and self._may_have_stopped(parsed))
        if self._suspected and len(self._ids) >= 2 * self._searched:
            whole, text = self._whole()
            if self.stopped is not None:
                return self._settle(whole, text)
            self._suspected, self._searched = False, len(self._ids)
        self._settled = len(self._ids)
        calls, before = self._calls_of(parsed), len(self._calls)
        events = self._end_call(calls)
        return events + self._send(calls[len(self._calls) - before :])

    def _may_have_stopped(self, parsed: ParsedReply) -> bool:
        """Whether a stop string may be in the text since the block before, or in this block as far as it is text."""
        decode = self._renderer.tokenizer.decode
        between = decode(self._ids[self._settled : self._block_at]) if self._settled else self._sent["text"]
        broken = any(not self._is_call(call) for call in parsed.tool_calls)
        text = self._unchecked + between + (f"\n{decode(self._ids[self._block_at :])}" if broken else "")
        self._unchecked = text[max(0, len(text) - self._stop.longest) :]
        return bool(text.strip()) and self._stop.first(text)[1] is not None

    def _settle(self, parsed: ParsedReply, text: str) -> list[ReplyEvent]:
        """The events that end the call being sent, the rest of the text, and the calls not sent yet."""
        calls = self._calls_of(parsed)
        events = self._end_call(calls[len(self._calls) :]) + self._rest("text", text)
        return events + self._send(calls[len(self._calls) :])

    def _send(self, calls: Sequence[ParsedCall]) -> list[ReplyEvent]:
        """The events for as many of the next `calls` as the client accepts."""
        events: list[ReplyEvent] = []
        for call in calls[: self.max_calls - len(self._calls)]:
            events += self._start(call.name) + self._end_call([call])
        return events

    def _rest(self, channel: str, whole: str) -> list[ReplyEvent]:
        """The event for the part of the channel's `whole` text that was not sent yet."""
        sent = self._sent[channel]
        if not whole.startswith(sent) or whole == sent:
            return []
        self._sent[channel] = whole
        return [self._delta(channel, whole[len(sent) :])]

    def _calls_of(self, parsed: ParsedReply) -> list[ParsedCall]:
        """The blocks that are calls: parsed ones, and those whose sending has begun."""
        return [call for call in parsed.tool_calls if self._is_call(call)]

    def _is_call(self, call: ParsedCall) -> bool:
        return self.max_calls != 0 and (call.ok or (call.begun and not self._is_custom(call.name)))

    def _is_custom(self, name: str) -> bool:
        return name in self._tools and self._tools[name].kind == "custom"

    def _start(self, name: str) -> list[ReplyEvent]:
        """Begins to send a call."""
        position = len(self._calls)
        self._sending = ToolCall(self._mint(position), name, "", "custom" if self._is_custom(name) else "function")
        return [ToolCallStarted(position, self._sending.id, name, self._sending.kind, self._index)]

    def _more(self, arguments: str) -> list[ReplyEvent]:
        """Sends more of a call's arguments."""
        self._arguments.append(arguments)
        return [ToolCallDelta(len(self._calls), arguments, self._index)] if arguments else []

    def _end_call(self, calls: Sequence[ParsedCall]) -> list[ReplyEvent]:
        """The rest and the end of the call being sent, if any. It is the first of `calls`."""
        if self._sending is None:
            return []
        position, sent = len(self._calls), "".join(self._arguments)
        whole = calls[0].arguments if calls else sent
        if self._sending.kind == "custom":
            whole = _custom_input(whole)
        events = self._more(whole[len(sent) :]) if whole.startswith(sent) else []
        self._calls.append(msgspec.structs.replace(self._sending, arguments="".join(self._arguments)))
        self._sending, self._arguments, self._sent_ids = None, [], len(self._ids)
        return [*events, ToolCallEnded(position, self._index)]


def _custom_input(arguments: str) -> str:
    """A custom tool's text: the `input` argument that its template declared. Other arguments are returned unchanged."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value["input"] if isinstance(value, dict) and isinstance(value.get("input"), str) else arguments
