"""Passthrough: a harness's own calls to its vendor, relayed byte for byte and recorded beside it.

`access` says whose requests are relayed and under which session, `relay` carries and records them, and a reader for
each dialect (`READERS`) reads what the vendor answers. Reading is for the record only: what can't be read reaches the
client all the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from rolltap.proxy.vendors.anthropic import MessagesReader
from rolltap.proxy.vendors.gemini import GeminiReader
from rolltap.proxy.vendors.openai_chat import ChatReader
from rolltap.proxy.vendors.openai_responses import ResponsesReader
from rolltap.proxy.vendors.reading import MakeReader

READERS: Mapping[str, MakeReader] = {
    "openai_chat": ChatReader,
    "openai_responses": ResponsesReader,
    "anthropic": MessagesReader,
    "gemini": GeminiReader,
    "openai_completions": ChatReader,
}
