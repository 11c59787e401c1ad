"""The spans of a reply that the session's rules leave without loss (`rolltap.contract.rules.MaskRule`), as token spans.

A reply's text is that of its tokens' bytes, with those that the prompt began it with (a fork's kept ones, a demanded
call's). A byte that is no part of a character counts as one, and a token that holds a part of a span is masked whole.
Where the text can't be had (the upstream's tokenizer is not known) or a pattern takes too long, what was not searched
is masked.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from rolltap.contract.rules import MaskRule, pattern_of
from rolltap.proxy.call.open_call import OpenCall
from rolltap.proxy.continuation.forest import Forest

log = logging.getLogger("rolltap.call")

READ_INLINE = 1000
"""Tokens of a reply up to which patterns are searched on the event loop."""

Spans = tuple[tuple[int, int], ...]


async def masked_spans(forest: Forest, call: OpenCall, tokenizer: Any) -> Spans:
    """The masked spans of the call's sampled tokens, in order and apart. `tokenizer`: the policy's, None if unknown."""
    if not forest.rules.masks or not call.sampled.ids:
        return ()
    rules = [rule for _, rule in forest.due(forest.rules.masks, call.node.request_hash(), call.node.role)]
    beginning = call.plan.lineage.call_beginning
    ids = [*call.prompt[len(call.prompt) - beginning :], *call.sampled.ids]
    try:
        if len(ids) <= READ_INLINE:
            return spans_of(rules, ids, tokenizer, beginning)
        return await asyncio.to_thread(spans_of, rules, ids, tokenizer, beginning)
    except Exception:  # the call must be recorded all the same, and nothing of it may be trained
        log.exception("call %s: its masks can't be worked out, so all of its reply is masked", call.id)
        return ((0, len(call.sampled.ids)),)


def spans_of(rules: Iterable[MaskRule], ids: Sequence[int], tokenizer: Any, beginning: int = 0) -> Spans:
    """The spans of the tokens `ids` that `rules` mask, behind the first `beginning` ones and counted from there."""
    text = SampledText(ids, tokenizer) if tokenizer is not None else None
    found: list[tuple[int, int]] = []
    for rule in rules:
        if rule.tokens is not None:
            start, end = rule.tokens
            found.append((start, len(ids) if end is None else end))
        elif not (rule.pattern or rule.characters) or text is None:
            found.append((0, len(ids)))
        elif rule.characters is not None:
            start, end = rule.characters
            found.append(text.tokens(text.place(start), text.place(end)))
        else:
            found += [text.tokens(*span) for span in text.matches(rule.pattern)]
    return _joined((max(start - beginning, 0), min(end, len(ids)) - beginning) for start, end in found)


class SampledText:
    """The text of tokens as bytes, and the tokens of a part of it."""

    def __init__(self, ids: Sequence[int], tokenizer: Any) -> None:
        pieces = [tokenizer.token_bytes(token) for token in ids]
        self.data = b"".join(pieces)
        self._ends = list(accumulate(map(len, pieces)))

    def place(self, character: int | None) -> int:
        """The first byte of a character; the text's end for None."""
        text = self.data.decode(errors="surrogateescape")
        return len(self.data) if character is None else len(text[:character].encode(errors="surrogateescape"))

    def matches(self, pattern: str) -> list[tuple[int, int]]:
        """The spans in bytes that the pattern matches, and what could not be searched for it."""
        spans, whole = pattern_of(pattern).spans(self.data)
        return spans if whole else [*spans, (spans[-1][1] if spans else 0, len(self.data))]

    def tokens(self, first: int, last: int) -> tuple[int, int]:
        """The span of the tokens that hold one of the bytes `[first, last)`."""
        if first >= last:
            return 0, 0
        return bisect_right(self._ends, first), bisect_left(self._ends, last) + 1


def _joined(spans: Iterable[tuple[int, int]]) -> Spans:
    """The spans in order; those that touch are one."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return tuple(joined)
