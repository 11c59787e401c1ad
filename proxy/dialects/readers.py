"""Passthrough: a harness's own calls to its vendor, relayed byte for byte and recorded beside it.

`access` says whose requests are relayed and under which session, `relay` carries and records them, and a reader for
each dialect (`READERS`) reads what the vendor answers. Reading is for the record only: what can't be read reaches the
client all the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from rolltap.proxy.dialects.anthropic_reader import MessagesReader
from rolltap.proxy.dialects.gemini_reader import GeminiReader
from rolltap.proxy.dialects.openai_chat_reader import ChatReader
from rolltap.proxy.dialects.openai_responses_reader import ResponsesReader
from rolltap.proxy.dialects.reply_reader import MakeReader

READERS: Mapping[str, MakeReader] = {
    "openai_chat": ChatReader,
    "openai_responses": ResponsesReader,
    "anthropic": MessagesReader,
    "gemini": GeminiReader,
    "openai_completions": ChatReader,
}
