"""A model server's key. Who reaches its port can pause it and load weights, so off loopback it needs one."""

from __future__ import annotations

import hmac
from typing import Any

from starlette.responses import JSONResponse

from rolltap.errors import ConfigError
from rolltap.network import is_loopback

MIN_KEY = 16


def keyed(app: Any, host: str, key: str) -> Any:
    """`app` behind `key`, sent as a bearer key; `app` itself where there is none. `ConfigError` if one is needed."""
    if key and len(key) < MIN_KEY:
        raise ConfigError(f"the engine's key has {len(key)} characters; it needs {MIN_KEY} or more")
    if not key:
        if not is_loopback(host):
            raise ConfigError(
                f"listening on {host} needs a key: set ROLLTAP_ENGINE_KEY or --key, and api_key in the "
                "engine's section of the proxy's settings"
            )
        return app
    expected = f"Bearer {key}".encode()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(sent, expected):
                error = {"message": "send the engine's key as `Authorization: Bearer KEY`", "type": "Unauthorized"}
                await JSONResponse({"error": {**error, "code": 401}}, 401)(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded
