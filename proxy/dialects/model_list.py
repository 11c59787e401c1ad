"""The list of models. `GET /v1/models` is one path in three protocols: the reply has the fields of all of them.

The context length, where it is known, has the names of several servers, as clients read what theirs says:

| field | whose |
|---|---|
| `max_model_len` | vLLM, SGLang |
| `context_length`, `top_provider.context_length` | OpenRouter, Together, LM Studio |
| `context_window` | Groq |
| `max_context_length` | Mistral |
| `max_input_tokens`, `max_tokens` | Anthropic |
| `inputTokenLimit`, `outputTokenLimit` | Gemini |

A reply may be as long as the context allows, so the limit of a reply is the same number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.json import encode

from rolltap.errors import NotFound

NO_CONTEXTS: Mapping[str, int] = {}

CONTEXT_FIELDS = (
    *("max_model_len", "context_length", "context_window", "max_context_length"),
    *("max_input_tokens", "max_tokens", "inputTokenLimit", "outputTokenLimit"),
)


def model_list(names: Sequence[str], only: str | None, contexts: Mapping[str, int] = NO_CONTEXTS) -> bytes:
    """Returns the body of `GET /v1/models`, or the model `only`. Raises `NotFound` for an unknown one."""
    if only is not None and only not in names:
        raise NotFound(f"the model {only!r} is not served here; served: {', '.join(names)}", param="model")
    if only is not None:
        return encode(_model(only, contexts.get(only)))
    data = [_model(name, contexts.get(name)) for name in names]
    ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
    return encode({"object": "list", "data": data, "has_more": False, **ends, "models": data})


def _model(name: str, context: int | None) -> dict[str, object]:
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "rolltap"}
    anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    gemini = {"name": f"models/{name}", "displayName": name, "version": "1", "supportedGenerationMethods": methods}
    lengths: dict[str, object] = {}
    if context is not None:
        lengths = {**dict.fromkeys(CONTEXT_FIELDS, context), "top_provider": {"context_length": context}}
    return {**openai, **anthropic, **gemini, **lengths}
