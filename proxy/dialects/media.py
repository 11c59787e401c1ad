"""Images and attachments in clients' messages.

An image that no model could take (another format, empty, not base64) is an `Attachment` if a tool returned it: the
model's own action must not end its run. From a user it is refused.
"""

from __future__ import annotations

import mimetypes
import re
from typing import Any, Literal

from rolltap.errors import InvalidRequest
from rolltap.proxy.conversation.chat import Attachment, Image
from rolltap.proxy.dialects.json_request import check_image

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
