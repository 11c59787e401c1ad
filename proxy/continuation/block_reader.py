"""Reads a reply's token ids with the family's parser: all of them, or one tool-call block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rolltap.proxy.continuation.blocks import find_blocks
from rolltap.proxy.continuation.rendering import ParsedCall, ParsedReply, TokenRenderer, begins_with
from rolltap.proxy.conversation.chat import Tool


class BlockReader:
    """Reads the ids of a reply to `prompt`. They may end anywhere.

    The family's parser fails on JSON that Python cannot read: nested a thousand deep, or with a number of 5,000 digits.
    A block with such JSON is a call that is not `ok`.
    """

    def __init__(self, renderer: TokenRenderer, prompt: Sequence[int], tools: Sequence[Tool]) -> None:
        self._renderer = renderer
        self._prompt = prompt
        self._tools = tools

    def read(self, ids: Sequence[int]) -> ParsedReply:
        """The reply as the family's parser reads it."""
        try:
            return self._renderer.parse(ids, self._prompt, self._tools)
        except (ValueError, RecursionError):
            return self._read_by_block(ids)

    def read_block(self, ids: Sequence[int]) -> ParsedReply:
        """One block. It is not in thinking, whatever the prompt opens."""
        try:
            return self._renderer.parse(ids, (), self._tools)
        except (ValueError, RecursionError):
            markers = self._renderer.markers
            marks = (markers.tool_open, markers.tool_close, *self._renderer.stop_token_ids)
            raw = self._renderer.tokenizer.decode([token for token in ids if token not in marks]).strip()
            return ParsedReply("", "", (ParsedCall("", "", False, raw).as_begun(markers.call_head),))

    def blocks(self, ids: Sequence[int]) -> list[slice]:
        """The places of the blocks in `ids`. Drafts in closed thinking are none."""
        markers = self._renderer.markers
        return find_blocks(ids, markers.tool_open, markers.tool_close, self._thinking_end(ids))

    def text(self, parsed: ParsedReply, ids: Sequence[int], is_call: Callable[[ParsedCall], bool]) -> str:
        """The reply's text, followed by the sampled text of blocks that are not calls."""
        calls = parsed.tool_calls
        broken = [at for at, call in enumerate(calls) if not is_call(call)]
        if not broken:
            return parsed.text
        texts = [self._block_text(ids[block]) for block in self.blocks(ids)]
        if len(texts) != len(calls) and calls[0].block is None:
            texts = [call.raw for call in calls]
        numbers = [at if call.block is None else call.block for at, call in enumerate(calls)]
        return "\n".join([parsed.text, *(texts[at] for at in dict.fromkeys(numbers[at] for at in broken))]).strip()

    def _read_by_block(self, ids: Sequence[int]) -> ParsedReply:
        """Reads the reply without its blocks' contents, and each block by itself."""
        blocks = self.blocks(ids)
        if not blocks:  # the reply is a call in plain text
            end = self._thinking_end(ids)
            before = self._renderer.parse(ids[:end], self._prompt, self._tools)
            return ParsedReply(before.text, before.reasoning, self.read_block(ids[end:]).tool_calls)
        marks = (self._renderer.markers.tool_open, self._renderer.markers.tool_close)
        rest: list[int] = []
        end = 0
        for block in blocks:
            rest += [*ids[end : block.start], *(token for token in ids[block] if token in marks)]
            end = block.stop
        outside = self._renderer.parse([*rest, *ids[end:]], self._prompt, self._tools)
        calls = [
            replace(call, block=number)
            for number, block in enumerate(blocks)
            for call in self.read_block(ids[block]).tool_calls
        ]
        return ParsedReply(outside.text, outside.reasoning, tuple(calls))

    def _thinking_end(self, ids: Sequence[int]) -> int:
        """The number of ids of closed thinking at the reply's beginning."""
        markers = self._renderer.markers
        begins = begins_with(markers.reasoning_open, ids, self._renderer.tokenizer)
        if not begins and not markers.opens_in_reasoning(self._prompt):
            return 0
        return ids.index(markers.reasoning_close) + 1 if markers.reasoning_close in ids else 0

    def _block_text(self, block: Sequence[int]) -> str:
        stop_ids = self._renderer.stop_token_ids
        return self._renderer.tokenizer.decode([token for token in block if token not in stop_ids]).strip()
