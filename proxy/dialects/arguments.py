"""Converts tool arguments between dialects that carry them as text and dialects that carry a JSON object.

The canonical form is the text that the model wrote. If a protocol needs an object and the text is not one, it is
wrapped as Claude Code does it, and unwrapped when the client sends it back. Nothing is lost on the way.
"""

from __future__ import annotations

import re

import msgspec

from rolltap.decoding import from_json
from rolltap.proxy.conversation.chat import MAX_DEPTH
from rolltap.proxy.dialects.json_request import invalid

_STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
"""A string, or one that was cut off."""

_WRAPPER = b'"__unparsedToolInput"'


class UnparsedInput(msgspec.Struct):
    raw: str
    len: int | None = None


class UnparsedWrapper(msgspec.Struct, forbid_unknown_fields=True):
    """Claude Code's form for arguments that are not a JSON object. Rolltap writes the same form."""

    input: UnparsedInput = msgspec.field(name="__unparsedToolInput")


def check_arguments(text: str, where: str) -> str:
    """Returns `text`. Raises `InvalidRequest` if JSON in it is nested deeper than `MAX_DEPTH`."""
    if text.count("[") + text.count("{") > MAX_DEPTH:
        depth = deepest = 0
        for character in _STRING.sub("", text):
            if character in "[{":
                depth += 1
                deepest = max(deepest, depth)
            elif character in "]}":
                depth -= 1
        if deepest > MAX_DEPTH:
            raise invalid(where, f"nested deeper than {MAX_DEPTH} levels")
    return text


def text_of(raw: msgspec.Raw, where: str) -> str:
    """Returns the arguments' text from a client's JSON object: the object as written, or the wrapper's content."""
    data = bytes(raw)
    if not data.startswith(b"{"):
        raise invalid(where, "expected an object")
    wrapped = _unwrap(data) if _WRAPPER in data else None
    try:
        return check_arguments(data.decode() if wrapped is None else wrapped, where)
    except UnicodeDecodeError:
        raise invalid(where, "not valid UTF-8") from None


def _unwrap(data: bytes) -> str | None:
    """Returns the wrapper's content; None if the object is not exactly the wrapper."""
    try:
        return from_json(data, UnparsedWrapper).input.raw
    except msgspec.MsgspecError:
        return None


def object_of(text: str) -> msgspec.Raw | UnparsedWrapper:
    """Returns the JSON object for the arguments `text`, on one line, as a server-sent event ends with its line."""
    if not text.strip():
        return msgspec.Raw(b"{}")
    if not is_object(text):
        return UnparsedWrapper(UnparsedInput(text, len(text)))
    return msgspec.Raw(text.encode().replace(b"\n", b" ").replace(b"\r", b" "))


def is_object(text: str) -> bool:
    """True if `text` is a complete JSON object."""
    try:
        from_json(text.encode(), dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return True
