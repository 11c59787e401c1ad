"""A call's tokens for its page: runs of tokens with the call that rendered or sampled them, and chunks as JSON.

A call's context is its prompt followed by its output. A prompt's first `shared` tokens are its parent's context, so a
walk up the parents tells which call rendered or sampled each token, without reading any token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from rolltap.proxy.viewer.session import MASKS
from rolltap.proxy.viewer.templating import visible
from rolltap.reading.types import BreakView, CallLine, CallTokens, TokenView

AROUND = 500
"""Tokens of each side of a break that are compared."""

SIDE = 72
"""Tokens of each side of a break that are shown."""

MEETING = 8
"""Number of equal tokens in a row after which the sides of a break count as equal again."""

FACTS = 6
"""Entries of a token's row before the trainer's: id, text, flags, log-prob, version, candidates."""

CHUNK = 2048
"""Tokens that a browser asks for at once."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens `[start, end)` of a context that one call rendered into its prompt, or sampled."""

    start: int
    end: int
    call_id: str
    number: int
    sampled: bool
    own: bool
    mask: str  # why the sampled tokens carry no loss; "" if they do


def runs_of(call_id: str, lines: Mapping[str, CallLine], numbers: Mapping[str, int]) -> list[TokenRun]:
    """Returns the runs of a call's context, in order."""
    runs: list[TokenRun] = []
    line: CallLine | None = lines[call_id]
    limit = line.length
    visited: set[str] = set()
    while line is not None and limit > 0 and line.id not in visited:
        visited.add(line.id)
        pieces = ((line.prompt_tokens, line.prompt_tokens + line.output_tokens, True), (0, line.prompt_tokens, False))
        for start, end, sampled in pieces:
            first = start if sampled or lines.get(line.parent_id or "") is None else line.shared
            last = min(end, limit)
            if first < last:
                own = line.id == call_id
                runs.append(TokenRun(first, last, line.id, numbers[line.id], sampled, own, line.mask))
        limit = min(limit, line.shared)
        line = lines.get(line.parent_id or "")
    return runs[::-1]


def call_json(
    call_id: str, lines: Mapping[str, CallLine], numbers: Mapping[str, int], view: BreakView | None
) -> dict[str, Any]:
    """Returns a call for `tokens.js`, without its tokens."""
    line = lines[call_id]
    names = ("start", "end", "number", "sampled", "own", "mask")
    return {
        "title": f"Tokens of call {numbers[call_id]}",
        "total": line.length,
        "break_at": view.differs_at if view is not None and view.against is not None else None,
        "runs": [
            {"call": run.call_id, "why": MASKS.get(run.mask, ""), **{name: getattr(run, name) for name in names}}
            for run in runs_of(call_id, lines, numbers)
        ],
    }


def chunk_json(tokens: CallTokens) -> dict[str, Any]:
    """Returns a chunk for `tokens.js`: one row per token. Control characters are visible already."""
    return {"call": tokens.call_id, "start": tokens.start, "rows": [_row(token) for token in tokens.tokens]}


def _row(token: TokenView) -> list[Any]:
    flags = token.sampled | token.trained << 1 | token.shared << 2
    row: list[Any] = [
        token.id,
        visible(token.text),
        flags,
        None if token.logprob is None else round(token.logprob, 4),
        token.version,
    ]
    trainer_values = _trainer_values(token)
    if token.top or trainer_values:
        row.append([[top.id, visible(top.text), round(top.logprob, 3)] for top in token.top])
    if trainer_values:
        row.append(trainer_values)
    return row


def _trainer_values(token: TokenView) -> list[Any] | None:
    """Returns the trainer's log-prob and entropy, and whether it clipped the token; None if it gave no value."""
    numbers = [None if value is None else round(value, 4) for value in (token.trainer_logprob, token.trainer_entropy)]
    return [*numbers, token.clipped] if (*numbers, token.clipped) != (None, None, None) else None


@dataclass(frozen=True, slots=True)
class Difference:
    """A token of one side of a break, and how it differs from the other side: `same`, `out` or `in`."""

    token: TokenView
    kind: str


@dataclass(frozen=True, slots=True)
class BreakSides:
    """A break's two sides. `replaced`: how many recorded tokens were replaced by how many others; None if the sides
    never meet again."""

    view: BreakView
    recorded: Sequence[Difference]
    resent: Sequence[Difference]
    replaced: tuple[int, int] | None


def sides_of(view: BreakView) -> BreakSides:
    """Returns both sides as far as they differ, and a little more; at most `SIDE` tokens of each."""
    expected, actual = [token.id for token in view.expected], [token.id for token in view.found]
    blocks = [
        block
        for block in SequenceMatcher(None, expected, actual, autojunk=False).get_matching_blocks()
        if block.size >= MEETING
    ]
    recorded_matches = _indices((block.a, block.size) for block in blocks)
    resent_matches = _indices((block.b, block.size) for block in blocks)
    replaced = (blocks[0].a, blocks[0].b) if blocks else None
    ends = [min(SIDE, count + 2 * MEETING) for count in replaced] if replaced else [SIDE, SIDE]
    return BreakSides(
        view,
        [
            Difference(token, "same" if i in recorded_matches else "out")
            for i, token in enumerate(view.expected[: ends[0]])
        ],
        [Difference(token, "same" if i in resent_matches else "in") for i, token in enumerate(view.found[: ends[1]])],
        replaced,
    )


def _indices(blocks: Iterable[tuple[int, int]]) -> set[int]:
    return {index for start, size in blocks for index in range(start, start + size)}
