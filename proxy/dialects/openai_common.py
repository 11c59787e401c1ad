"""What OpenAI's protocols share: the model list and the shape of errors.

`GET /v1/models` is one path in three protocols, so its answer holds OpenAI's fields, Anthropic's and Google's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rolltap.errors import ContextOverflow, NotFound, RolltapError
from rolltap.proxy.dialects.base import WireReply
from rolltap.proxy.dialects.writing import bearer, encode, error_reply

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def model_list(names: Sequence[str], only: str | None) -> bytes:
    """`GET /v1/models`, or the one model called `only`."""
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


def openai_key(headers: Mapping[str, str]) -> str | None:
    """The API key, from any of the headers that clients of the shared model list use."""
    named = (headers.get(name) for name in ("api-key", "x-api-key", "x-goog-api-key"))
    return bearer(headers) or next((key for key in named if key), None)


def _overflow(error: ContextOverflow) -> str:
    """In the words of OpenAI and vLLM, which clients search for."""
    if error.tokens is None or error.limit is None:
        return f"This model's maximum context length is exceeded: {error.message}"
    return (
        f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in "
        f"{error.tokens} tokens. Please reduce the length of the messages."
    )


def openai_error(error: RolltapError) -> WireReply:
    """`{"error": {...}}`. A prompt that is too long says so in the words that clients look for."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    message, param, code = error.message, error.param, error.code
    if isinstance(error, ContextOverflow):
        message = _overflow(error)
        param = param or "messages"
    elif isinstance(error, NotFound) and param == "model":
        code = "model_not_found"
    return error_reply(error, {"error": {"message": message, "type": kind, "param": param, "code": code}})
