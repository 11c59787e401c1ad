"""How every dialect reads a body: JSON becomes typed here, and whatever does not fit is an `InvalidRequest`.

The body is cut once into its fields as raw JSON (`cut`), so that a history item reaches the call log as the bytes
that came. Nothing in this module raises anything but `InvalidRequest`, whose `param` is the path of the field, as in
`messages[3].content[0].type`.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from rolltap.errors import InvalidRequest

T = TypeVar("T")

MAX_DEPTH = 64
"""How deep client-given JSON (tool schemas, arguments) may be nested; what reads it later recurses."""

MAX_TOOLS = 1024
MAX_ITEMS = 100_000

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*)`$", re.DOTALL)
_IMAGE = re.compile(r"^data:image/(?:png|jpeg|jpg|gif|webp)(?:;[\w-]+=[^;,]*)*;base64,", re.IGNORECASE)


def join(*path: str) -> str:
    """Path steps as one path: `join("messages[1]", "content")` is `messages[1].content`."""
    out = ""
    for step in path:
        out += step if not out or not step or step.startswith("[") else f".{step}"
    return out


def within(error: InvalidRequest, *path: str) -> InvalidRequest:
    """The same refusal, of a field that lies inside `path`."""
    inner = error.param or ""
    return invalid(join(*path, inner), error.message.removeprefix(f"{inner}: "))


def invalid(param: str, message: str) -> InvalidRequest:
    """A refusal whose message begins with the field that it is about."""
    return InvalidRequest(f"{param}: {message}" if param else message, param=param or None)


def decode(data: bytes | msgspec.Raw, kind: type[T], where: str = "") -> T:
    """`data` as `kind`; the refusal names the field, `where` being the path of the whole."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), where) from None
    except msgspec.DecodeError as error:
        raise invalid(where, f"not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise invalid(where, f"not valid UTF-8: {error.reason}") from None
    except RecursionError:
        raise invalid(where, "the JSON is nested too deep") from None


def _named(text: str, where: str) -> InvalidRequest:
    match = _AT.match(text)
    assert match is not None
    what, path = match["what"], match["path"] or ""
    if unknown := _UNKNOWN.match(what):
        return invalid(join(where, path, unknown["field"]), "this field is not supported; leave it out")
    if missing := _MISSING.match(what):
        return invalid(join(where, path, missing["field"]), "this field is required")
    return invalid(join(where, path), what[0].lower() + what[1:])


@dataclass(frozen=True, slots=True)
class BodyParts:
    """A body in its parts: the fields of `head` as one JSON object, the others as they came."""

    head: bytes
    fields: Mapping[str, bytes]

    def array(self, name: str) -> bytes:
        """The field `name`, which is to be a list; an empty one if it is not there."""
        return self.fields.get(name, b"[]")

    def fixed(self, *names: str) -> dict[str, bytes]:
        """Those of the fields that are there."""
        return {name: self.fields[name] for name in names if name in self.fields}


def entries(array: bytes, where: str, *, before: int = 0) -> list[bytes]:
    """The entries of a list, as they came; `before` others have been read of it."""
    items = decode(array, list[msgspec.Raw], where)
    if before + len(items) > MAX_ITEMS:
        raise invalid(where, f"at most {MAX_ITEMS} entries")
    return list(map(bytes, items))


def check_utf8(data: bytes) -> None:
    """Refuses what is no UTF-8 in a place that no type reads, as the name of an unknown field: the record's readers
    would fail there."""
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise invalid("", f"not valid UTF-8: {error.reason}") from None


def cut(body: bytes, apart: Collection[str]) -> BodyParts:
    """A body as its `apart` fields and the rest. A field that is null counts as absent."""
    check_utf8(body)
    fields = decode(body, dict[str, msgspec.Raw])
    present = {name: raw for name, raw in fields.items() if bytes(raw) != b"null"}
    head = {name: raw for name, raw in present.items() if name not in apart}
    return BodyParts(msgspec.json.encode(head), {name: bytes(present[name]) for name in apart if name in present})


def rebuild(items_field: str, head: bytes, items: Sequence[bytes], fixed: Mapping[str, bytes]) -> bytes:
    """A body out of what the call log keeps of a request (`ChatRequest.head`, `items`, `fixed`): it parses the same."""
    fields = msgspec.json.decode(head, type=dict[str, msgspec.Raw])
    apart = {name: msgspec.Raw(raw) for name, raw in fixed.items()}
    return msgspec.json.encode({**fields, **apart, items_field: [msgspec.Raw(item) for item in items]})


def check_depth(value: Any, where: str) -> None:
    """Refuses JSON nested deeper than `MAX_DEPTH`."""
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
    """`url` if it is a data URL of an image with sound base64, or an http(s) URL (which the policy may refuse)."""
    if url.startswith(("https://", "http://")):
        return url
    prefix = _IMAGE.match(url)
    if prefix is None:
        raise invalid(where, "want data:image/png|jpeg|gif|webp;base64,... or an http(s) URL")
    check_base64(url[prefix.end() :], where)
    return url


def check_base64(data: str, where: str) -> bytes:
    """The bytes that `data` encodes."""
    try:
        decoded = binascii.a2b_base64(data.encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        raise invalid(where, "not valid base64") from None
    if not decoded:
        raise invalid(where, "the data is empty")
    return decoded
