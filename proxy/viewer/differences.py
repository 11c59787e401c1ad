"""The differences of two sessions: their calls side by side, and the lines in which their texts and tools differ.

Comparing lines takes long for some texts. So all differences of a page are computed in a reader process
(`rolltap.untrusted`) with a time limit; texts that exceed it are shown whole on both sides.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal

from rolltap.errors import Unreadable
from rolltap.proxy.viewer.session import ShownTurn
from rolltap.reading.types import MessageView
from rolltap.untrusted import ReaderServer, ReadLimits

CALLS = 60
"""Calls of each session that are compared."""

LONGEST_LINES = 600
"""Lines of a text that are compared line by line; a longer one is shown whole if it differs."""

CONTEXT = 2
"""Equal lines that are shown before and after a difference."""

BUDGET_S = 1.0
WITHIN = ReadLimits(memory_mb=256, file_mb=1, cpu_s=3, seconds=10.0)
READERS = ReaderServer((__name__,))

Side = Literal["same", "first", "second", "left out"]
DiffLine = tuple[Side, str]


@dataclass(frozen=True, slots=True)
class ComparedMessage:
    """Two messages at one place, or one that only one session has (`role` says whose).

    `lines`: empty if they are equal. `characters`: how long the first of them is.
    """

    role: str
    tool: str
    lines: Sequence[DiffLine]
    characters: int


@dataclass(frozen=True, slots=True)
class ComparedCall:
    """A call of both sessions. A session that has fewer calls has None."""

    number: int
    first: ShownTurn | None
    second: ShownTurn | None
    messages: Sequence[ComparedMessage]

    @property
    def same(self) -> bool:
        return self.first is not None and self.second is not None and not any(each.lines for each in self.messages)


async def compared_calls(first: Sequence[ShownTurn], second: Sequence[ShownTurn]) -> list[ComparedCall]:
    """Compares the calls of two sessions one by one, up to `CALLS` of each."""
    pairs = [
        (_messages(first[at] if at < len(first) else None), _messages(second[at] if at < len(second) else None))
        for at in range(min(CALLS, max(len(first), len(second))))
    ]
    aligned = [_aligned(*pair) for pair in pairs]
    texts = [(_text(one), _text(other)) for rows in aligned for one, other in rows]
    try:
        lines = iter(await READERS.ask_within(WITHIN, differing_lines, texts))
    except Unreadable:
        lines = iter([_whole(*pair) for pair in texts])
    return [
        ComparedCall(
            at + 1,
            first[at] if at < len(first) else None,
            second[at] if at < len(second) else None,
            [_compared(one, other, next(lines)) for one, other in rows],
        )
        for at, rows in enumerate(aligned)
    ]


def _messages(turn: ShownTurn | None) -> list[MessageView]:
    return [*turn.new, *([turn.reply] if turn.reply is not None else [])] if turn is not None else []


def _aligned(
    first: list[MessageView], second: list[MessageView]
) -> list[tuple[MessageView | None, MessageView | None]]:
    """Pairs messages of equal roles in order; the others stand alone."""
    rows: list[tuple[MessageView | None, MessageView | None]] = []
    matcher = SequenceMatcher(None, [each.role for each in first], [each.role for each in second], autojunk=False)
    for kind, start, end, other_start, other_end in matcher.get_opcodes():
        if kind == "equal":
            rows += list(zip(first[start:end], second[other_start:other_end], strict=True))
        else:
            rows += [(each, None) for each in first[start:end]]
            rows += [(None, each) for each in second[other_start:other_end]]
    return rows


def _text(message: MessageView | None) -> str:
    """A message as lines: its texts, and its tool calls by name with their arguments."""
    if message is None:
        return ""
    parts = [
        f"{part.name} {part.text}" if part.kind == "tool_call" else part.text or part.url for part in message.parts
    ]
    return "\n".join(parts)


def _compared(first: MessageView | None, second: MessageView | None, lines: Sequence[DiffLine]) -> ComparedMessage:
    shown = first or second
    assert shown is not None
    role = shown.role if first and second else f"{shown.role}, only of the {'first' if first else 'second'}"
    return ComparedMessage(role, shown.name, lines, len(_text(shown)))


def differing_lines(pairs: list[tuple[str, str]]) -> list[list[DiffLine]]:
    """Returns the lines of each pair of texts with where they are from; none for equal texts."""
    until = time.monotonic() + BUDGET_S
    return [_lines(first, second) if time.monotonic() < until else _whole(first, second) for first, second in pairs]


def _lines(first: str, second: str) -> list[DiffLine]:
    if first == second:
        return []
    ours, theirs = first.splitlines(), second.splitlines()
    if max(len(ours), len(theirs)) > LONGEST_LINES:
        return _whole(first, second)
    found: list[DiffLine] = []
    matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
    groups = list(matcher.get_grouped_opcodes(CONTEXT))
    for at, group in enumerate(groups):
        if at or group[0][1]:
            found.append(("left out", ""))
        for kind, start, end, other_start, other_end in group:
            if kind == "equal":
                found += _marked("same", ours[start:end])
            else:
                found += _marked("first", ours[start:end])
                found += _marked("second", theirs[other_start:other_end])
    return found


def _whole(first: str, second: str) -> list[DiffLine]:
    if first == second:
        return []
    return _marked("first", first.splitlines()) + _marked("second", second.splitlines())


def _marked(side: Side, lines: Sequence[str]) -> list[DiffLine]:
    return [(side, line) for line in lines]
