"""How the commands reach a running server: its address and keys, from options, environment or the data folder."""

from __future__ import annotations

import json
import os
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rolltap.errors import ConfigError, RolltapError

DEFAULT_URLS = {"admin": "http://127.0.0.1:8712", "trainer": "http://127.0.0.1:8711", "agent": "http://127.0.0.1:8710"}


class PlaneClient:
    """JSON over HTTP to one plane."""

    def __init__(self, plane: str, url: str | None = None, key: str | None = None, data: Path | None = None) -> None:
        self.url = (url or os.environ.get(f"ROLLTAP_{plane.upper()}_URL") or DEFAULT_URLS[plane]).rstrip("/")
        self.key = key or os.environ.get(f"ROLLTAP_{plane.upper()}_KEY") or kept_key(plane, data)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer; the server's own error message if it refuses."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {self.key}", "content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            raise RolltapError(_message(error.read(), error.code)) from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise RolltapError(f"no rolltap server at {self.url} ({reason}); start one with `rolltap serve`") from None


def _message(body: bytes, status: int) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}"


def kept_key(plane: str, data: Path | None) -> str:
    path = (data or Path(os.environ.get("ROLLTAP_DATA", "rolltap-data"))) / "keys.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))[plane]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        raise ConfigError(
            f"no {plane} key: set ROLLTAP_{plane.upper()}_KEY, or run this beside the server's {path}"
        ) from None
