"""Static replies to the requests that harnesses send before their first model call.

None of these needs a key or touches a session. They are served at the root and under a session's prefix.

* Claude Code: `HEAD /api/hello` and `HEAD /`.
* Codex, with its built-in provider: a WebSocket upgrade of `GET /v1/responses`. 426 makes it fall back to HTTP at once;
  404, 405 and 501 cost it seconds; 400 ends the run. The server must pass upgrades on as plain requests (uvicorn:
  `ws="none"`).
* OpenAI's SDK can delete and cancel a response and list its input. The record is append-only, so the reply is 405.
* Load balancers: `GET /health`, as on the other planes. `/ready` is on those only.
* Hermes: Ollama's `POST /api/show`, `GET /api/tags`, `GET /api/v1/models`. There is no Ollama here, so the reply is
  404.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rolltap.proxy.dialects.json_reply import encode


@dataclass(frozen=True, slots=True)
class Probe:
    """A path and its constant reply."""

    methods: Sequence[str]
    path: str
    status: int
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)


def _error(message: str, code: str) -> bytes:
    return encode({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}})


_NO_WEBSOCKET = _error("this server speaks HTTP; POST /v1/responses", "upgrade_required")
_APPEND_ONLY = _error("what is on record can only be read: GET /v1/responses/{id}", "not_supported")
_NO_OLLAMA = _error("this server has no Ollama API; use /v1", "not_found")

PROBES: tuple[Probe, ...] = (
    Probe(("GET", "HEAD"), "/", 200),
    Probe(("GET", "HEAD"), "/api/hello", 200),
    Probe(("GET", "HEAD"), "/health", 200, b'{"status":"ok"}'),
    Probe(("GET",), "/v1/responses", 426, _NO_WEBSOCKET, {"upgrade": "HTTP/1.1"}),
    Probe(("DELETE",), "/v1/responses/{reply}", 405, _APPEND_ONLY, {"allow": "GET"}),
    Probe(("POST",), "/v1/responses/{reply}/cancel", 405, _APPEND_ONLY, {"allow": ""}),
    Probe(("GET",), "/v1/responses/{reply}/input_items", 405, _APPEND_ONLY, {"allow": ""}),
    Probe(("POST",), "/api/show", 404, _NO_OLLAMA),
    Probe(("GET",), "/api/tags", 404, _NO_OLLAMA),
    Probe(("GET",), "/api/v1/models", 404, _NO_OLLAMA),
)
