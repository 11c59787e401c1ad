"""How the commands reach a running server: its address and keys, from options, environment or the data folder."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from rolltap.errors import ConfigError
from rolltap.http_client import HttpClient, Request

DEFAULT_URLS = {"admin": "http://127.0.0.1:8712", "trainer": "http://127.0.0.1:8711", "agent": "http://127.0.0.1:8710"}


class PlaneClient(HttpClient):
    """JSON over HTTP to one plane. A call is made once: the user is there to repeat it."""

    def __init__(self, plane: str, url: str | None = None, key: str | None = None) -> None:
        url = url or os.environ.get(f"ROLLTAP_{plane.upper()}_URL") or DEFAULT_URLS[plane]
        super().__init__(url, key or os.environ.get(f"ROLLTAP_{plane.upper()}_KEY") or kept_key(plane, None))

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded reply."""
        return self.send(Request(method, path, body, once=True))


def kept_key(role: str, data: Path | None) -> str:
    path = (data or Path(os.environ.get("ROLLTAP_DATA", "rolltap-data"))) / "keys.toml"
    if not path.exists():
        plane = (role if role in DEFAULT_URLS else "admin").upper()
        raise ConfigError(
            f"no server was started with the data folder {path.parent.absolute()}: run `rolltap serve` first, in this "
            f"folder; if it runs elsewhere, set ROLLTAP_DATA to the absolute path of its data folder, or "
            f"ROLLTAP_{plane}_URL and ROLLTAP_{role.upper()}_KEY (`rolltap keys mint {role} --name NAME` beside the "
            "server makes one)"
        )
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))[role]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        raise ConfigError(
            f"no {role} key in {path.absolute()}: set ROLLTAP_DATA to the absolute path of the server's data folder, "
            f"name a settings file whose `data` is that path with --config, or set ROLLTAP_{role.upper()}_KEY "
            f"(`rolltap keys mint {role} --name NAME` makes one)"
        ) from None
