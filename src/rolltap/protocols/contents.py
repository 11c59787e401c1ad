"""The contents of messages that dialects share: tool arguments, images and attachments.

The canonical form of arguments is the text that the model wrote. If a protocol needs a JSON object and the text is not
one, it is wrapped in Claude Code's form, and unwrapped when the client sends it back. So no text is lost.

An image that no model accepts (unknown format, empty, not base64) becomes an `Attachment` if a tool returned it: the
model's own action must not end its run. A user's is refused.
"""

from __future__ import annotations

import mimetypes
import re
from typing import Any, Literal

import msgspec
import pydantic_core

from rolltap.decoding import from_json
from rolltap.errors import InvalidRequest
from rolltap.protocols.conversation import MAX_DEPTH, Attachment, Image
from rolltap.protocols.requests import check_image, invalid

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


def whole_members(text: str) -> dict[str, Any] | None:
    """The complete members of a cut-off object, as Anthropic's client reads them.

    None for any other text, and if a member is not a JSON value (`NaN`), as no reply could contain it.
    """
    try:
        value = pydantic_core.from_json(text, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


_DATA_URL = re.compile(r"data:(?P<type>[^;,]{0,200})", re.IGNORECASE)
_WHOLE_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+", re.ASCII)
IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/jpg", "image/gif", "image/webp"})


def image_part(url: str, where: str, *, detail: Any = None, from_tool: bool) -> Image | Attachment:
    """The image at `url`, the field at `where` of its message. Raises `InvalidRequest` for a user's broken image."""
    media_type = data_type(url)
    if media_type and media_type not in IMAGE_TYPES:
        return attachment(media_type, where)
    try:
        return Image(check_image(url, where), detail)
    except InvalidRequest:
        if from_tool:
            return Attachment("image", media_type, where)
        raise


def attachment(media_type: str, where: str) -> Attachment:
    """The attachment of a media type; one that can't be read makes a document of no type."""
    media_type = media_type.strip().lower()
    if not _WHOLE_TYPE.fullmatch(media_type):
        return Attachment("document", "", where)
    family = media_type.partition("/")[0]
    kind: Literal["image", "document", "audio", "video"]
    kind = family if family in ("image", "audio", "video") else "document"  # type: ignore[assignment]
    return Attachment(kind, media_type, where)


def data_type(url: str) -> str:
    """The media type in a data URL; empty in any other text."""
    match = _DATA_URL.match(url)
    return match["type"].strip().lower() if match is not None else ""


def file_type(name: str | None, data: str | None) -> str:
    """The media type of a file, by its data URL or its name."""
    return data_type(data or "") or mimetypes.guess_type(name or "")[0] or ""
