"""The wire protocols that rolltap speaks, by name. A dialect is one line here."""

from __future__ import annotations

from rolltap.proxy.dialects.anthropic import Anthropic
from rolltap.proxy.dialects.base import Dialect
from rolltap.proxy.dialects.gemini import Gemini
from rolltap.proxy.dialects.openai_chat import OpenAIChat
from rolltap.proxy.dialects.openai_completions import OpenAICompletions
from rolltap.proxy.dialects.openai_responses import OpenAIResponses

DIALECTS: dict[str, Dialect] = {
    OpenAIChat.name: OpenAIChat(),
    OpenAIResponses.name: OpenAIResponses(),
    Anthropic.name: Anthropic(),
    Gemini.name: Gemini(),
    OpenAICompletions.name: OpenAICompletions(),
}
