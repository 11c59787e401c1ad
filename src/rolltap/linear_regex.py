"""Regular expressions in time linear in the text: for patterns of users on text that a model wrote.

`re` backtracks: `(a+)+$` on thirty letters holds a process for minutes. `LinearPattern` takes Python's syntax without
what needs backtracking (look-around, back-references, possessive and atomic groups), and runs all alternatives side by
side, in the order in which `re` would try them (Pike's machine, with its steps cached like the states of a DFA). So its
matches are those of `re.finditer`, the empty ones left out. Only the search for the next match may read a text again:
`spans` counts its work, and gives up beyond `WORK` for each character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from re import _constants as op  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any, NamedTuple

from rolltap.errors import InvalidRequest

MOST_CHARACTERS = 1000
MOST_STEPS = 1000
WORK = 256
"""Work for each character of a text, and for `SHORT` characters more: about two seconds for 100,000 characters."""
SHORT = 1000
STEP = 16
"""Work of a step, and 1 for each place that it takes its character at."""
CACHED_STEPS = 20_000

_ASSERTIONS = {
    op.AT_BEGINNING: lambda before, after, multiline: not before or (multiline and before == "\n"),
    op.AT_BEGINNING_STRING: lambda before, after, multiline: not before,
    op.AT_END: lambda before, after, multiline: after in ("", "\n") or (multiline and after[0] == "\n"),
    op.AT_END_STRING: lambda before, after, multiline: not after,
    op.AT_BOUNDARY: lambda before, after, multiline: _is_word(before) != _is_word(after[:1]),
    op.AT_NON_BOUNDARY: lambda before, after, multiline: _is_word(before) == _is_word(after[:1]),
}
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    op.CATEGORY_DIGIT: str.isdecimal,
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_WORD: lambda character: _is_word(character),
    op.CATEGORY_NOT_DIGIT: lambda character: not character.isdecimal(),
    op.CATEGORY_NOT_SPACE: lambda character: not character.isspace(),
    op.CATEGORY_NOT_WORD: lambda character: not _is_word(character),
}


class _Take(NamedTuple):
    """Takes a character."""

    takes: Callable[[str], bool]
    then: int


class _Split(NamedTuple):
    """Goes on at several places, the preferred one first."""

    places: tuple[int, ...]


class _Assert(NamedTuple):
    """Goes on where `holds`, of the character before, the two after, and whether each line counts for itself."""

    holds: Callable[[str, str, bool], bool]
    multiline: bool
    then: int


_Step = tuple[tuple[int, ...], tuple[int, ...], int]

MATCH = 0
"""The place of a program at which it has matched."""


class LinearPattern:
    """A compiled pattern. Raises `InvalidRequest` for one that is none, is too long, or needs backtracking."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MOST_CHARACTERS:
            raise InvalidRequest(f"a pattern has at most {MOST_CHARACTERS:,} characters, not {len(pattern):,}")
        self._program: list[_Take | _Split | _Assert | None] = [None]
        self._expanded = 0
        try:
            tree = _parser.parse(pattern)
            self._start = self._sequence(tree, tree.state.flags, MATCH)
        except (re.error, OverflowError) as error:
            raise InvalidRequest(f"{pattern[:80]!r} is no regular expression: {error}") from None
        except RecursionError:
            raise InvalidRequest(f"{pattern[:80]!r} is nested too deeply") from None
        self._looks = any(isinstance(step, _Assert) for step in self._program)
        self._steps: dict[tuple[tuple[int, ...], str, str, bool], _Step] = {}

    def spans(self, text: str) -> tuple[list[tuple[int, int]], bool]:
        """The matches in `text` from left to right, and whether all of it was searched."""
        budget, found, at = [WORK * (len(text) + SHORT)], [], 0
        while at <= len(text):
            match = self._next(text, at, budget)
            if match is None:
                return found, True
            if budget[0] < 0:
                return found, False
            found.append(match)
            at = match[1]
        return found, True

    def _next(self, text: str, at: int, budget: list[int]) -> tuple[int, int] | None:
        """The first match from `at` on. Any result stands for none yet if the budget is used up."""
        places: tuple[int, ...] = ()
        starts: list[int] = []
        best: tuple[int, int] | None = None
        for index in range(at, len(text) + 1):
            if best is None:
                places, starts = (*places, self._start), [*starts, index]
            elif not places:
                break
            budget[0] -= STEP + len(places)
            if budget[0] < 0:
                return at, at
            before = text[index - 1] if self._looks and index else ""
            after = text[index : index + 1 + self._looks]
            places, origins, matched = self._step(places, before, after, fresh=best is None)
            if matched >= 0:
                best = starts[matched], index
            starts = [starts[origin] for origin in origins]
        return best

    def _step(self, places: tuple[int, ...], before: str, after: str, *, fresh: bool) -> _Step:
        """Takes the first character `after` at all places: the next places, the index of the place that each came from,
        and that of the place that has matched before the character, or -1. What would be tried after a match is
        dropped. If `fresh`, the last place begins here: there it has not matched yet.
        """
        key = places, before, after, fresh
        if (known := self._steps.get(key)) is not None:
            return known
        taken: dict[int, int] = {}
        matched, seen = -1, set[int]()
        for origin, place in enumerate(places):
            stack = [place]
            while stack and matched < 0:
                current = stack.pop()
                if current in seen:
                    continue
                seen.add(current)
                step = self._program[current]
                if step is None:
                    matched = -1 if fresh and origin == len(places) - 1 else origin
                elif isinstance(step, _Split):
                    stack += reversed(step.places)
                elif isinstance(step, _Assert):
                    stack += [step.then] if step.holds(before, after, step.multiline) else []
                elif after and step.takes(after[0]):
                    taken.setdefault(step.then, origin)
            if matched >= 0:
                break
        if len(self._steps) >= CACHED_STEPS:
            self._steps.clear()
        self._steps[key] = result = tuple(taken), tuple(taken.values()), matched
        return result

    def _sequence(self, items: Any, flags: int, then: int) -> int:
        for name, value in reversed(list(items)):
            then = self._item(name, value, flags, then)
        return then

    def _item(self, name: Any, value: Any, flags: int, then: int) -> int:
        """Adds an item that goes on at `then`; returns where it begins."""
        if name in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            return self._add(_Take(_takes(name, value, flags), then))
        if name is op.BRANCH:
            return self._add(_Split(tuple([self._sequence(branch, flags, then) for branch in value[1]])))
        if name is op.SUBPATTERN:
            _, added, removed, items = value
            return self._sequence(items, (flags | added) & ~removed, then)
        if name in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, inner = value
            return self._repeat(least, most, inner, flags, then, greedy=name is op.MAX_REPEAT)
        if name is op.AT:
            return self._add(_Assert(_ASSERTIONS[value], bool(flags & re.MULTILINE), then))
        raise InvalidRequest(f"a pattern can't have {str(name).lower()}: it would need backtracking")

    def _repeat(self, least: int, most: Any, items: Any, flags: int, then: int, *, greedy: bool) -> int:
        place = then
        if most is op.MAXREPEAT:
            place = self._add(_Split(()))
            self._program[place] = _split(self._sequence(items, flags, place), then, greedy=greedy)
        else:
            for _ in range(most - least):
                place = self._add(_split(self._sequence(items, flags, place), then, greedy=greedy))
        for _ in range(least):
            self._count()
            place = self._sequence(items, flags, place)
        return place

    def _add(self, step: _Take | _Split | _Assert) -> int:
        self._count()
        self._program.append(step)
        return len(self._program) - 1

    def _count(self) -> None:
        self._expanded += 1
        if self._expanded > MOST_STEPS:
            raise InvalidRequest(f"a pattern has at most {MOST_STEPS:,} steps, its repetitions written out")


def _split(body: int, then: int, *, greedy: bool) -> _Split:
    return _Split((body, then) if greedy else (then, body))


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _takes(name: Any, value: Any, flags: int) -> Callable[[str], bool]:
    """Whether a character is taken by a literal, a set or a dot."""
    if name is op.ANY:
        return (lambda character: True) if flags & re.DOTALL else (lambda character: character != "\n")
    items: Sequence[tuple[Any, Any]] = value if name is op.IN else [(op.LITERAL, value)]
    negated = name is op.NOT_LITERAL or items[0][0] is op.NEGATE
    tests = list(_tests(items))

    def takes(character: str) -> bool:
        forms = {character, character.lower(), character.upper()} if flags & re.IGNORECASE else {character}
        return any(test(form) for test in tests for form in forms if len(form) == 1) != negated

    return takes


def _tests(items: Sequence[tuple[Any, Any]]) -> Iterator[Callable[[str], bool]]:
    for kind, value in items:
        if kind is op.LITERAL:
            yield chr(value).__eq__
        elif kind is op.RANGE:
            yield lambda character, edges=value: edges[0] <= ord(character) <= edges[1]
        elif kind is op.CATEGORY:
            yield _CATEGORIES[value]
