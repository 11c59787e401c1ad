"""The list of models. `GET /v1/models` is one path in three protocols: the reply has the fields of all of them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.json import encode

from rolltap.errors import NotFound


def model_list(names: Sequence[str], only: str | None) -> bytes:
    """Returns the body of `GET /v1/models`, or the model `only`. Raises `NotFound` for an unknown one."""
    if only is not None and only not in names:
        raise NotFound(f"the model {only!r} is not served here; served: {', '.join(names)}", param="model")
    if only is not None:
        return encode(_model(only))
    data = [_model(name) for name in names]
    ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
    return encode({"object": "list", "data": data, "has_more": False, **ends, "models": data})


def _model(name: str) -> dict[str, object]:
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "rolltap"}
    anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
    methods = ["generateContent", "streamGenerateContent", "countTokens"]
    gemini = {"name": f"models/{name}", "displayName": name, "version": "1", "supportedGenerationMethods": methods}
    return {**openai, **anthropic, **gemini}
