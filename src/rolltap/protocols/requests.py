"""Reads request bodies for all dialects: JSON becomes typed here, and anything that does not fit is an
`InvalidRequest`.

`cut` splits the body once into its fields as raw JSON, so that a history item reaches the call log with its original
bytes. This module raises only `InvalidRequest`. Its `param` is the path of the field, such as
`messages[3].content[0].type`.

Harnesses send fields that ask for nothing in every call, whatever their names. `without` takes such a field out of a
body, so that the rest is read as if the field were absent.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from rolltap.decoding import from_json
from rolltap.errors import InvalidRequest
from rolltap.protocols.conversation import MAX_DEPTH
from rolltap.wording import in_words, reason_and_path

T = TypeVar("T")

MAX_TOOLS = 1024
MAX_ITEMS = 100_000
MAX_LEFT_OUT = 64
LEFT_OUT_BYTES = 16 << 20
"""Maximum number of fields that ask for nothing and would not be read otherwise. Each costs decoding the JSON again, so
long JSON may have fewer: as many as make this number of bytes."""

ABSENT = (b"null", b"false", b"{}")
"""Values of a large field (messages, tools, system text) that count as absent."""

_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*)`$", re.DOTALL)
_IMAGE = re.compile(r"^data:image/(?:png|jpeg|jpg|gif|webp)(?:;[\w-]+=[^;,]*)*;base64,", re.IGNORECASE)


def join(*path: str) -> str:
    """Joins path steps: `join("messages[1]", "content")` is `messages[1].content`."""
    out = ""
    for step in path:
        out += step if not out or not step or step.startswith("[") else f".{step}"
    return out


def within(error: InvalidRequest, *path: str) -> InvalidRequest:
    """Returns the same error for a field that is inside `path`."""
    inner = error.param or ""
    return invalid(join(*path, inner), error.message.removeprefix(f"{inner}: "))


def invalid(param: str, message: str) -> InvalidRequest:
    """Returns an error whose message begins with the field's path."""
    return InvalidRequest(f"{param}: {message}" if param else message, param=param or None)


def decode(data: bytes | msgspec.Raw, kind: type[T], where: str = "") -> T:
    """Decodes `data` as `kind`. Raises `InvalidRequest`, which names the field; `where` is the path of `data`.

    A field that is unknown, or has an invalid value, is left out if it asks for nothing (`asks_nothing`).
    """
    left_out = 0
    while True:
        try:
            return from_json(data, kind)
        except msgspec.ValidationError as error:
            text = str(error)
        except msgspec.DecodeError as error:
            raise invalid(where, f"not valid JSON: {error}") from None
        except UnicodeDecodeError as error:
            raise invalid(where, f"not valid UTF-8: {error.reason}") from None
        except RecursionError:
            raise invalid(where, "the JSON is nested too deep") from None
        reason, path = reason_and_path(text)
        unknown = _UNKNOWN.match(reason)
        rest = without(data, path, unknown["field"] if unknown else None)
        if rest is None or left_out == min(MAX_LEFT_OUT, LEFT_OUT_BYTES // len(rest) + 1):
            raise _field_error(text, where)
        data, left_out = rest, left_out + 1


def _field_error(text: str, where: str) -> InvalidRequest:
    reason, path = reason_and_path(text)
    if unknown := _UNKNOWN.match(reason):
        return invalid(join(where, path, unknown["field"]), "this field is not supported; leave it out")
    if missing := _MISSING.match(reason):
        return invalid(join(where, path, missing["field"]), "this field is required")
    return invalid(join(where, path), in_words(reason))


@dataclass(frozen=True, slots=True)
class BodyParts:
    """A body in parts: the fields of `head` as one JSON object, the others as raw JSON."""

    head: bytes
    fields: Mapping[str, bytes]

    def array(self, name: str) -> bytes:
        """Returns the field `name`, which must be a list; an empty list if it is absent."""
        return self.fields.get(name, b"[]")

    def fixed(self, *names: str) -> dict[str, bytes]:
        """Returns those of the fields that are present."""
        return {name: self.fields[name] for name in names if name in self.fields}


def entries(array: bytes, where: str, *, before: int = 0) -> list[bytes]:
    """Returns the entries of a list as raw JSON. `before`: how many entries of the list were read earlier."""
    items = decode(array, list[msgspec.Raw], where)
    if before + len(items) > MAX_ITEMS:
        raise invalid(where, f"at most {MAX_ITEMS} entries")
    return list(map(bytes, items))


def check_utf8(data: bytes) -> None:
    """Raises `InvalidRequest` if `data` is not valid UTF-8.

    Types do not check every place, such as the name of an unknown field; readers of the record would fail there.
    """
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise invalid("", f"not valid UTF-8: {error.reason}") from None


def cut(body: bytes, apart: Collection[str]) -> BodyParts:
    """Splits a body into its `apart` fields and the rest. A null field counts as absent, and an `ABSENT` large one."""
    check_utf8(body)
    fields = decode(body, dict[str, msgspec.Raw])
    absent = {name: ABSENT if name in apart else ABSENT[:1] for name in fields}
    present = {name: raw for name, raw in fields.items() if bytes(raw) not in absent[name]}
    head = {name: raw for name, raw in present.items() if name not in apart}
    return BodyParts(msgspec.json.encode(head), {name: bytes(present[name]) for name in apart if name in present})


def rebuild(items_field: str, head: bytes, items: Sequence[bytes], fixed: Mapping[str, bytes]) -> bytes:
    """Builds a body that parses the same from its parts in the call log (`ChatRequest.head`, `items`, `fixed`)."""
    fields = from_json(head, dict[str, msgspec.Raw])
    apart = {name: msgspec.Raw(raw) for name, raw in fixed.items()}
    return msgspec.json.encode({**fields, **apart, items_field: [msgspec.Raw(item) for item in items]})


def check_depth(value: Any, where: str) -> None:
    """Raises `InvalidRequest` if the JSON is nested deeper than `MAX_DEPTH`."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise invalid(where, f"nested deeper than {MAX_DEPTH} levels")


def check_image(url: str, where: str) -> str:
    """Returns `url`.

    Raises `InvalidRequest` if it is neither a data URL of an image with valid base64 nor an http(s) URL (which the
    policy may refuse).
    """
    if url.startswith(("https://", "http://")):
        return url
    prefix = _IMAGE.match(url)
    if prefix is None:
        raise invalid(where, "expected data:image/png|jpeg|gif|webp;base64,... or an http(s) URL")
    check_base64(url[prefix.end() :], where)
    return url


def check_base64(data: str, where: str) -> bytes:
    """Returns the decoded bytes. Raises `InvalidRequest` if `data` is empty or not valid base64."""
    try:
        decoded = binascii.a2b_base64(data.encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        raise invalid(where, "not valid base64") from None
    if not decoded:
        raise invalid(where, "the data is empty")
    return decoded


NOTHING_WORDS = frozenset({"off", "none", "null", "false", "no", "disabled", "default"})
"""Texts that ask for nothing, in any case."""

SWITCHES = ("mode", "type", "enabled", "enable", "status")
"""Members that switch their object: if one of them is off, the object asks for nothing, whatever else is in it."""

ON_BY_DEFAULT = frozenset(
    {"add_generation_prompt", "do_sample", "skip_special_tokens", "spaces_between_special_tokens"}
)
"""Fields of model servers whose `false` asks for something."""

OFF_IS_ASKED = frozenset(
    {"tool_choice", "mode", "effort", "reasoning_effort", "thinking", "reasoning", "enable_thinking", "thinking_level"}
)
"""Known fields that can switch something off: only an empty value asks for nothing."""

ASKED_BY_PRESENCE = frozenset({"web_search_options"})
"""Fields that ask for something even if they are an empty object."""

_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


def asks_nothing(value: Any, depth: int = 0) -> bool:
    """Whether a field with this value asks for nothing: null, false, an empty value, `off`, or only such values."""
    if value is None or value is False:
        return True
    if isinstance(value, str):
        return not value.strip() or value.strip().lower() in NOTHING_WORDS
    if depth == MAX_DEPTH:
        return False
    if isinstance(value, list):
        return all(asks_nothing(item, depth + 1) for item in value)
    if isinstance(value, dict):
        if any(name in value and asks_nothing(value[name], depth + 1) for name in SWITCHES):
            return True
        return all(name not in ON_BY_DEFAULT and asks_nothing(item, depth + 1) for name, item in value.items())
    return False


def without(data: bytes | msgspec.Raw, path: str, member: str | None = None) -> bytes | None:
    """`data` without the field at `path` (such as `a.b[0].c`), or its `member`, if that asks for nothing; else None.

    All other values keep their bytes.
    """
    steps: list[str | int] = [name or int(index) for name, index in _STEP.findall(path)]
    steps += [member] if member is not None else []
    if not steps or not isinstance(steps[-1], str):
        return None
    try:
        return _without(data, steps)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError):
        return None


def _without(data: bytes | msgspec.Raw, steps: Sequence[str | int]) -> bytes | None:
    step, rest = steps[0], steps[1:]
    if isinstance(step, int):
        items = from_json(data, list[msgspec.Raw])
        inner = _without(items[step], rest)
        if inner is not None:
            items[step] = msgspec.Raw(inner)
        return None if inner is None else msgspec.json.encode(items)
    fields = from_json(data, dict[str, msgspec.Raw])
    if rest:
        inner = _without(fields[step], rest)
        if inner is None:
            return None
        fields[step] = msgspec.Raw(inner)
    else:
        value: Any = from_json(fields[step], object)
        is_empty = value is None or value in ("", [], {})
        is_present = step in ASKED_BY_PRESENCE and isinstance(value, dict)
        asks = step in ON_BY_DEFAULT or step in OFF_IS_ASKED or not asks_nothing(value)
        if is_present or (asks and not is_empty):
            return None
        del fields[step]
    return msgspec.json.encode(fields)
