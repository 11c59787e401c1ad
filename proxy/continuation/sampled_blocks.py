"""A block of tool calls, and what is read from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rolltap.protocols.conversation import Tool
from rolltap.proxy.continuation.json_calls import NAME, is_arguments, repeats_key
from rolltap.proxy.continuation.parsed import ParsedCall
from rolltap.tokenizer import HubTokenizer


class SampledCall(NamedTuple):
    """A call as its block says: `arguments` is JSON text. `id` is empty in formats without ids."""

    name: str
    arguments: str
    id: str = ""


class BlockPart(NamedTuple):
    """A tag of the format, or the text between two."""

    text: str
    is_tag: bool


@dataclass(frozen=True, slots=True)
class CallBlock:
    """A closed block: the ids between its tokens. `is_tagged` is False for a call in plain text."""

    tokenizer: HubTokenizer
    ids: Sequence[int]
    tools: Sequence[Tool] = ()
    is_tagged: bool = True

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.ids)

    def parts(self, tags: Sequence[str]) -> list[BlockPart]:
        """The block cut at its tags, without the empty texts.

        If all tags are tokens of the vocabulary, only these tokens are tags. Else their text is.
        """
        numbers = [self.tokenizer.convert_tokens_to_ids(tag) for tag in tags]
        if None in numbers:
            texts = re.split(f"({'|'.join(map(re.escape, tags))})", self.text)
            return [BlockPart(text, at % 2 == 1) for at, text in enumerate(texts) if text]
        parts: list[BlockPart] = []
        run_at = 0
        for at, id in enumerate([*self.ids, None]):
            if id is not None and id not in numbers:
                continue
            if at > run_at:
                parts.append(BlockPart(self.tokenizer.decode(self.ids[run_at:at]), False))
            if id is not None:
                parts.append(BlockPart(tags[numbers.index(id)], True))
            run_at = at + 1
        return parts

    def declares(self, name: str) -> bool:
        return any(tool.name == name for tool in self.tools)


Read = Callable[[CallBlock], list[SampledCall] | None]
"""Reads a block to its end; None if something is left over, or is not as the format writes it."""


def checked_calls(read: Read, block: CallBlock) -> tuple[ParsedCall, ...] | None:
    """The calls that `read` finds in a block; None if it can't be read. A call that no client can take is not `ok`."""
    try:
        calls = read(block)
        return None if calls is None else tuple(_checked(call, block) for call in calls)
    except (ValueError, RecursionError):  # JSON that Python can't read
        return None


def _checked(call: SampledCall, block: CallBlock) -> ParsedCall:
    """A client can take a call of a name, which may have odd characters if it is declared, and an arguments object
    without repeated keys."""
    is_name = re.fullmatch(NAME, call.name) is not None
    is_whole = is_arguments(call.arguments) and not repeats_key(call.arguments)
    ok = is_whole and (is_name or block.declares(call.name))
    return ParsedCall(call.name, call.arguments, ok, block.text, id=call.id)
