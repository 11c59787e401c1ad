"""Checks image URLs against the allowed hosts. The model server fetches them, so a URL can reach into its network."""

from __future__ import annotations

import re
from collections.abc import Collection

from rolltap.proxy.conversation.chat import ChatRequest, Image

_ADDRESS = re.compile(r"https?://([A-Za-z0-9.-]+)(?::\d{1,5})?(?:[/?][A-Za-z0-9\-._~:/?&=%+,;!$'()*]*)?")
"""URLs that all parsers read in the same way: without user part, backslash, fragment, blank or control character."""


def foreign_image(request: ChatRequest, hosts: Collection[str]) -> str:
    """The first image URL that is neither a data URL nor on one of `hosts`; empty if there is none."""
    for message in request.messages:
        for part in message.parts:
            if isinstance(part, Image) and part.url[:5].lower() != "data:":
                match = _ADDRESS.fullmatch(part.url)
                if match is None or match[1].lower() not in hosts:
                    return part.url
    return ""
