"""Shared by OpenAI's protocols: the place of the API key, and the shape of errors."""

from __future__ import annotations

from collections.abc import Mapping

from rolltap.errors import ContextOverflow, NotFound, RolltapError
from rolltap.proxy.dialects.base import ClientEnvironment, WireReply
from rolltap.proxy.dialects.json_reply import error_reply

OPENAI_ENVIRONMENT = ClientEnvironment("OPENAI_BASE_URL", "/v1", "OPENAI_API_KEY")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def bearer(headers: Mapping[str, str]) -> str | None:
    """Returns the token of `Authorization: Bearer`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def openai_key(headers: Mapping[str, str]) -> str | None:
    """Returns the API key from any of the headers that clients of the shared model list use."""
    keys = (headers.get(name) for name in ("api-key", "x-api-key", "x-goog-api-key"))
    return bearer(headers) or next((key for key in keys if key), None)


def _overflow(error: ContextOverflow) -> str:
    """OpenAI's and vLLM's wording, which clients search for."""
    if error.tokens is None or error.limit is None:
        return f"This model's maximum context length is exceeded: {error.message}"
    return (
        f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in "
        f"{error.tokens} tokens. Please reduce the length of the messages."
    )


def openai_error(error: RolltapError) -> WireReply:
    """`{"error": {...}}`. For a prompt that is too long, the message has the wording that clients search for."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    message, param, code = error.message, error.param, error.code
    if isinstance(error, ContextOverflow):
        message = _overflow(error)
        param = param or "messages"
    elif isinstance(error, NotFound) and param == "model":
        code = "model_not_found"
    return error_reply(error, {"error": {"message": message, "type": kind, "param": param, "code": code}})
