"""`docs/dialects.md` says what becomes of every field: ours, and those that the vendors' own types have."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from anthropic.types import message_create_params as messages
from anthropic.types.beta import message_create_params as beta_messages
from google.genai import types as genai_types
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from rolltap.protocols import openai_completions
from rolltap.protocols.anthropic import wire as anthropic_wire
from rolltap.protocols.gemini import wire as gemini_wire
from rolltap.protocols.openai_chat import wire as openai_chat_wire
from rolltap.protocols.openai_responses import wire as openai_responses_wire
from tests.dialects import DIALECTS

PAGE = Path(__file__).parents[3] / "docs" / "dialects.md"

OURS = {
    "openai_chat": [openai_chat_wire.Head],
    "openai_responses": [openai_responses_wire.Head],
    "anthropic": [anthropic_wire.Head],
    "gemini": [gemini_wire.Head, gemini_wire.GenerationConfig],
    "openai_completions": [openai_completions.Head],
}
IN_THE_URL_OR_THE_CLIENT = {
    "model",  # of Gemini: the URL's
    "generationConfig",
    "httpOptions",
    "automaticFunctionCalling",
    "automaticContinuation",
    "shouldReturnHttpResponse",
    "generationOutputConfig",
}
THEIRS = {
    "openai_chat": {*chat.CompletionCreateParamsBase.__annotations__},
    "openai_responses": {*responses.ResponseCreateParamsBase.__annotations__},
    "anthropic": {
        *messages.MessageCreateParamsBase.__annotations__,
        *beta_messages.MessageCreateParamsBase.__annotations__,
    },
    "gemini": {
        field.alias or name
        for kind in (genai_types.GenerationConfig, genai_types.GenerateContentConfig)
        for name, field in kind.model_fields.items()
    }
    - IN_THE_URL_OR_THE_CLIENT,
    "openai_completions": {*completions.CompletionCreateParamsBase.__annotations__},
}


def described(name: str) -> set[str]:
    """The names in code spans of the dialect's table."""
    section = PAGE.read_text("utf-8").split(f"## Fields: `{name}`\n")[1].split("\n## ")[0]
    return set(re.findall(r"`([^`]+)`", section))


@pytest.mark.parametrize("name", list(DIALECTS))
def test_every_field_is_described(name: str) -> None:
    ours = {field.encode_name for kind in OURS[name] for field in msgspec.structs.fields(kind)}
    missing = (ours | THEIRS[name]) - described(name) - (IN_THE_URL_OR_THE_CLIENT if name == "gemini" else set())
    assert not missing
