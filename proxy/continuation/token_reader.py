"""Reads a whole reply's token ids: thinking, then text and blocks of tool calls in their order."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence

from rolltap.protocols.conversation import Tool, ToolCall
from rolltap.proxy.continuation.block_formats import CallBlock, checked_calls
from rolltap.proxy.continuation.parsed import ParsedCall, ParsedReply, ReplyPiece
from rolltap.proxy.continuation.tool_formats import TOOL_FORMATS, ToolFormat
from rolltap.tokenizer import HubTokenizer

THINK, END_THINK = "<think>", "</think>"
"""The tags of thinking in vocabularies that have no tokens for them."""


class TokenReader:
    """Reads replies of one model family in `form`.

    A call inside closed thinking is part of the thinking. Unclosed thinking ends at the first call. Only the tag that a
    reply begins with, after white space, opens thinking.
    """

    def __init__(self, tokenizer: HubTokenizer, form: ToolFormat, silent_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._markers = form.markers(tokenizer)
        self._form = form
        self._silent_ids = frozenset(silent_ids)

    def read(self, output: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]) -> ParsedReply:
        ids = list(output)
        if self._form.read_reply is not None:
            return self._form.read_reply(self._tokenizer, ids, prompt, tools)
        start, skipped, reasoning = self._thinking(ids, prompt, tools)
        if self._form.find_pieces is not None:
            rest = list(ids)
            while rest and rest[-1] in self._silent_ids:
                rest.pop()
            return ParsedReply(tuple(self._form.find_pieces(self._tokenizer, rest, start, tools)), reasoning)
        pieces: list[ReplyPiece] = []
        text_at = start
        for block in self._blocks(ids, start, tools):
            pieces.append(ReplyPiece(self._decode(ids[text_at : block.start]), text_at))
            pieces.append(ReplyPiece(self._decode(ids[block]), block.start, self.read_block(ids[block], tools)))
            text_at = block.stop
        pieces.append(ReplyPiece(self._decode(ids[text_at:]), text_at))
        first = pieces[0]
        pieces[0] = ReplyPiece(first.text[skipped:], first.start, first.calls)
        return ParsedReply(tuple(piece for piece in pieces if piece.text or piece.calls is not None), reasoning)

    def begins_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether a reply to `prompt` begins with thinking that the prompt opens."""
        return self.read(self._tokenizer.encode("text"), prompt, ()).reasoning is not None

    def read_block(self, block: Sequence[int], tools: Sequence[Tool]) -> tuple[ParsedCall, ...]:
        """The calls of a block, which begins with its opening token. A block that can't be read is one broken call."""
        ids = [token for token in block if token not in self._silent_ids]
        opening, closing = self._markers.tool_open, self._markers.tool_close
        is_closed = closing is None or ids[-1:] == [closing]
        inner = ids[ids[:1] == [opening] : len(ids) - (closing is not None and is_closed)]
        content = CallBlock(self._tokenizer, inner, tools, is_tagged=ids[:1] == [opening])
        calls = checked_calls(self._form.read, content) if is_closed else None
        if calls is None:
            calls = (ParsedCall("", "", False, self._tokenizer.decode(inner)),)
        return tuple(call.as_begun(self._form.head) for call in calls)

    def _blocks(self, ids: Sequence[int], start: int, tools: Sequence[Tool]) -> list[slice]:
        """The places of the blocks in `ids` from `start`.

        A block begins with the opening token. It ends with the closing one or, if the format has none, before the next
        opening. The last block may be unclosed. In plain text, a block is the whole reply, if there are tools to call.
        """
        opening, closing = self._markers.tool_open, self._markers.tool_close
        beginnings = self._markers.beginnings if tools else ()
        if beginnings and self._decode(ids[start:]).lstrip().startswith(beginnings):
            whole = slice(start, len(ids))
            return [whole] if self.read_block(ids[whole], tools) else []
        blocks: list[slice] = []
        opened: int | None = None
        for at in range(start, len(ids)):
            if ids[at] == closing and opened is not None:
                blocks.append(slice(opened, at + 1))
                opened = None
            elif ids[at] == opening and (opened is None or closing is None):
                blocks += [] if opened is None else [slice(opened, at)]
                opened = at
        return blocks if opened is None else [*blocks, slice(opened, len(ids))]

    def _thinking(
        self, ids: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]
    ) -> tuple[int, int, str | None]:
        """Where the rest begins: the index of its first id, and the number of characters of that text to skip. And the
        thinking, None if there is none."""
        markers = self._markers
        if self._form.thinks_in_text and markers.reasoning_open is None:
            return self._text_thinking(ids, prompt)
        opening = next((at for at, id in enumerate(ids) if self._tokenizer.decode(id).strip()), len(ids))
        begins = markers.reasoning_open is not None and ids[opening : opening + 1] == [markers.reasoning_open]
        if not begins and not markers.opens_in_reasoning(prompt):
            return 0, 0, None
        start = opening + 1 if begins else 0
        if markers.reasoning_close in ids[start:]:
            end = ids.index(markers.reasoning_close, start)
            after = end + 1
        else:
            end = after = self._first_call(ids, start, tools)
        return after, 0, self._decode(ids[start:end]).lstrip().removeprefix(markers.reasoning_label).strip()

    def _first_call(self, ids: Sequence[int], start: int, tools: Sequence[Tool]) -> int:
        """Where the first call begins in `ids` from `start`; their number if there is none."""
        if self._form.find_pieces is not None:
            pieces = self._form.find_pieces(self._tokenizer, ids, start, tools)
            return next((piece.start for piece in pieces if any(call.ok for call in piece.calls or ())), len(ids))
        opening = self._markers.tool_open
        return ids.index(opening, start) if opening in ids[start:] else len(ids)

    def _text_thinking(self, ids: Sequence[int], prompt: Sequence[int]) -> tuple[int, int, str | None]:
        """`_thinking`, if its tags are spelled in ordinary tokens."""
        text = self._decode(ids)
        begins = text.lstrip().startswith(THINK)
        tail = self._tokenizer.decode(list(prompt[-64:]))
        if not begins and tail.rfind(THINK) <= tail.rfind(END_THINK):
            return 0, 0, None
        start = text.index(THINK) + len(THINK) if begins else 0
        close = text.find(END_THINK, start)
        if close < 0:
            end = ids.index(self._markers.tool_open) if self._markers.tool_open in ids else len(ids)
            return end, 0, self._decode(ids[:end])[start:].strip()
        after = close + len(END_THINK)
        count = bisect_left(range(len(ids)), True, key=lambda count: len(self._decode(ids[:count])) >= after)
        before = self._decode(ids[: count - 1])
        return count - 1, after - len(before), text[start:close].strip()

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([token for token in ids if token not in self._silent_ids])


def reads(tokenizer: HubTokenizer, form: ToolFormat, turn: Sequence[int], calls: Sequence[ToolCall]) -> bool:
    """Whether `form` reads a turn as these calls of declared tools, and as no others."""
    names = dict.fromkeys(call.name for call in calls) or ("look",)
    found = TokenReader(tokenizer, form, ()).read(turn, (), tuple(map(Tool, names))).tool_calls
    return [(call.name, call.ok) for call in found] == [(call.name, True) for call in calls] and all(
        json.loads(one.arguments) == json.loads(other.arguments) for one, other in zip(found, calls, strict=True)
    )


def detect_format(tokenizer: HubTokenizer, turns: Sequence[tuple[Sequence[int], ToolCall]]) -> str:
    """The name of the known format that reads each turn as its call; "none" if none does."""
    for name, form in TOOL_FORMATS.items():
        if all(reads(tokenizer, form, turn, [call]) for turn, call in turns):
            return name
    return "none"
