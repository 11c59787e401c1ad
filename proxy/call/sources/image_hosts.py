"""Checks image URLs against the allowed hosts. The model server fetches them, so a URL can reach into its network."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from rolltap.protocols.conversation import IMAGE_LINE, TOOL_MEDIA, ChatRequest, Image, Part, Text

_ADDRESS = re.compile(r"https?://([A-Za-z0-9.-]+)(?::\d{1,5})?(?:[/?][A-Za-z0-9\-._~:/?&=%+,;!$'()*]*)?")
"""URLs that all parsers read in the same way: without user part, backslash, fragment, blank or control character."""


def foreign_image(request: ChatRequest, hosts: Collection[str]) -> str:
    """The first image URL of a user that is neither a data URL nor on one of `hosts`; empty if there is none."""
    for message in request.messages:
        if TOOL_MEDIA in message.marks:
            continue
        for part in message.parts:
            if isinstance(part, Image) and _is_foreign(part, hosts):
                return part.url
    return ""


def without_foreign(request: ChatRequest, hosts: Collection[str]) -> ChatRequest:
    """The request with a line of text in the place of each image of a tool that is on another host."""
    messages = tuple(
        msgspec.structs.replace(message, parts=tuple(_or_line(part, hosts) for part in message.parts))
        if TOOL_MEDIA in message.marks
        else message
        for message in request.messages
    )
    return msgspec.structs.replace(request, messages=messages)


def has_foreign(request: ChatRequest, hosts: Collection[str]) -> bool:
    """Whether a tool returned an image that is on another host."""
    return any(
        isinstance(part, Image) and _is_foreign(part, hosts)
        for message in request.messages
        if TOOL_MEDIA in message.marks
        for part in message.parts
    )


def _or_line(part: Part, hosts: Collection[str]) -> Part:
    return Text(IMAGE_LINE) if isinstance(part, Image) and _is_foreign(part, hosts) else part


def _is_foreign(image: Image, hosts: Collection[str]) -> bool:
    if image.url[:5].lower() == "data:":
        return False
    match = _ADDRESS.fullmatch(image.url)
    return match is None or match[1].lower() not in hosts
