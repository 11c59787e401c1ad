"""Cuts a body of JSON into its fields, and lists into their items, in small steps and without parsing them.

Only the characters between the parts are checked. If all parts are valid JSON, so is the body: the caller must decode
each part strictly.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator
from typing import NamedTuple

STEP_BYTES = 64 << 10
STEP_MARKS = 256
"""After this many bytes of one search, or quotes and brackets of one value, other tasks may run."""

SPACE = re.compile(rb"[ \t\r\n]*+")
SCALAR = re.compile(rb'[^ \t\r\n,:"\[\]{}]*+')
MARK = re.compile(rb'"[^"\\]*+"|["\[\]{}]')
"""Text without an escape is one mark."""
TEXT_MARK = re.compile(rb'["\\]')
QUOTE, BACKSLASH, LIST, OBJECT = b'"\\[{'


class Part(NamedTuple):
    """Position of a field's value or, with `is_item`, of an item of its list. An empty item marks the list's start."""

    name: bytes  # the field's, as JSON
    start: int
    end: int
    is_item: bool = False


class MalformedBody(ValueError):
    """The body is not a JSON object, or is malformed."""


Steps = Generator[Part | None, None, int]
"""Yields parts, and None after each step. Returns the end position."""


def cut(body: bytes, lists: Collection[bytes]) -> Steps:
    """The parts of a body in order. `lists`: the names (as JSON) of the fields that are cut into items."""
    at = yield from _space(body, 0)
    if body[at : at + 1] != b"{":
        raise MalformedBody
    at = yield from _members(body, at + 1, b"}", lists)
    at = yield from _space(body, at)
    if at < len(body):
        raise MalformedBody
    return at


def _members(body: bytes, at: int, closing: bytes, lists: Collection[bytes], name: bytes = b"") -> Steps:
    """The fields of the object that starts before `at` or, with `name`, the items of the list."""
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
            raise MalformedBody
        at = yield from _space(body, at)


def _field(body: bytes, at: int, lists: Collection[bytes]) -> Steps:
    start, at = at, (yield from _value(body, at))
    name = body[start:at]
    at = yield from _space(body, at)
    if not name.startswith(b'"') or body[at : at + 1] != b":":
        raise MalformedBody
    at = yield from _space(body, at + 1)
    if name in lists and body[at : at + 1] == b"[":
        yield Part(name, at, at, is_item=True)
        return (yield from _members(body, at + 1, b"]", lists, name))
    start, at = at, (yield from _value(body, at))
    yield Part(name, start, at)
    return at


def _value(body: bytes, at: int) -> Steps:
    """Skips one value: a string, a scalar, or an object or list up to its closing bracket."""
    first = body[at : at + 1]
    if first not in (b'"', b"[", b"{"):
        match = SCALAR.match(body, at, at + STEP_BYTES)
        if match is None or not 0 < match.end() - at < STEP_BYTES:
            raise MalformedBody
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
    raise MalformedBody


def _space(body: bytes, at: int) -> Steps:
    while True:
        match = SPACE.match(body, at, at + STEP_BYTES)
        end = match.end() if match else at
        if end < at + STEP_BYTES:
            return end
        at = end
        yield None
