"""Cuts a body of JSON into its fields, and lists into their items, in small steps and without parsing them.

Nothing is checked but what stands between the parts. A body whose parts are all sound JSON is sound itself: whoever
takes the parts decodes each of them, strictly.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator
from typing import NamedTuple

STEP_BYTES = 64 << 10
STEP_MARKS = 256
"""The bytes of one search, and the quotes and brackets of one value, after which others may run."""

SPACE = re.compile(rb"[ \t\r\n]*+")
SCALAR = re.compile(rb'[^ \t\r\n,:"\[\]{}]*+')
MARK = re.compile(rb'"[^"\\]*+"|["\[\]{}]')
"""Text without an escape is one mark."""
TEXT_MARK = re.compile(rb'["\\]')
QUOTE, BACKSLASH, LIST, OBJECT = b'"\\[{'


class Part(NamedTuple):
    """Where a field's value lies, or with `is_item` an item of its list; an empty item stands for the list's begin."""

    name: bytes  # the field's, as JSON
    start: int
    end: int
    is_item: bool = False


class NotCut(ValueError):
    """The body is no JSON object, or not sound."""


Steps = Generator[Part | None, None, int]
"""Gives parts, and None after each step; returns where it came to."""


def cut(body: bytes, lists: Collection[bytes]) -> Steps:
    """The parts of a body in their order; `lists` are the names, as JSON, of the fields that are cut into items."""
    at = yield from _space(body, 0)
    if body[at : at + 1] != b"{":
        raise NotCut
    at = yield from _members(body, at + 1, b"}", lists)
    at = yield from _space(body, at)
    if at < len(body):
        raise NotCut
    return at


def _members(body: bytes, at: int, closing: bytes, lists: Collection[bytes], name: bytes = b"") -> Steps:
    """The fields of the object, or with `name` the items of the list, that has begun before `at`."""
    at = yield from _space(body, at)
    if body[at : at + 1] == closing:
        return at + 1
    while True:
        if name:
            start, at = at, (yield from _value(body, at))
            yield Part(name, start, at, is_item=True)
        else:
            at = yield from _field(body, at, lists)
        at = yield from _space(body, at)
        after, at = body[at : at + 1], at + 1
        if after == closing:
            return at
        if after != b",":
            raise NotCut
        at = yield from _space(body, at)


def _field(body: bytes, at: int, lists: Collection[bytes]) -> Steps:
    start, at = at, (yield from _value(body, at))
    name = body[start:at]
    at = yield from _space(body, at)
    if not name.startswith(b'"') or body[at : at + 1] != b":":
        raise NotCut
    at = yield from _space(body, at + 1)
    if name in lists and body[at : at + 1] == b"[":
        yield Part(name, at, at, is_item=True)
        return (yield from _members(body, at + 1, b"]", lists, name))
    start, at = at, (yield from _value(body, at))
    yield Part(name, start, at)
    return at


def _value(body: bytes, at: int) -> Steps:
    """Passes by one value: a text, a scalar, or from a bracket to the one that closes it."""
    first = body[at : at + 1]
    if first not in (b'"', b"[", b"{"):
        match = SCALAR.match(body, at, at + STEP_BYTES)
        if match is None or not 0 < match.end() - at < STEP_BYTES:
            raise NotCut
        return match.end()
    depth, marks, in_text = 0, 0, False
    while at < len(body):
        match = (TEXT_MARK if in_text else MARK).search(body, at, at + STEP_BYTES)
        marks += 1
        if match is None:
            at, marks = at + STEP_BYTES, STEP_MARKS
        else:
            mark, at = body[match.start()], match.end()
            if mark == BACKSLASH:
                at += 1
            elif mark == QUOTE:
                in_text = not in_text and match.end() == match.start() + 1
            else:
                depth += 1 if mark in (LIST, OBJECT) else -1
            if not depth and not in_text:
                return at
        if marks >= STEP_MARKS:
            marks = 0
            yield None
    raise NotCut


def _space(body: bytes, at: int) -> Steps:
    while True:
        match = SPACE.match(body, at, at + STEP_BYTES)
        end = match.end() if match else at
        if end < at + STEP_BYTES:
            return end
        at = end
        yield None
