"""How the commands reach a running server: its address and keys, from options, environment or the data folder.

A running server writes its addresses to a private file in its data folder, for commands with the same settings. It
holds a lock on the file: a file without a lock was left by a killed server.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rolltap.contract.operations import Request, read_as
from rolltap.errors import ConfigError, Unauthenticated
from rolltap.http_client import HttpClient
from rolltap.settings import PlaneName

T = TypeVar("T")

DEFAULT_URLS = {"admin": "http://127.0.0.1:8712", "trainer": "http://127.0.0.1:8711", "agent": "http://127.0.0.1:8710"}


class PlaneClient(HttpClient):
    """A client of one plane, JSON over HTTP. It does not repeat a call: the user can."""

    def __init__(self, plane: str, url: str | None = None, key: str | None = None, origin: str = "") -> None:
        """`origin` says where the key is from, for a server that refuses it."""
        url = url or os.environ.get(f"ROLLTAP_{plane.upper()}_URL") or DEFAULT_URLS[plane]
        super().__init__(url, key or os.environ.get(f"ROLLTAP_{plane.upper()}_KEY") or kept_key(plane, None))
        self._origin = origin

    def send(self, request: Request[T]) -> T:
        try:
            return super().send(replace(request, once=True))
        except Unauthenticated as error:
            if not self._origin:
                raise
            raise Unauthenticated(f"{self.url}: {error.message}; it is {self._origin}") from None

    def view_link(self, page: str = "") -> str:
        """A link that opens the viewer once, at `page`."""
        query = {"page": page} if page else {}
        return self.url + self.send(Request("POST", "/view/links", query=query, parse=read_as(dict[str, str])))["path"]


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


FILE = "listening.json"
PROBES, BETWEEN_PROBES_S = 20, 0.05
"""How often, and how many seconds apart, a starting server tries the lock: a command that reads holds it briefly."""


class Listening:
    """The file of addresses in a data folder, locked by this process."""

    def __init__(self, file: int) -> None:
        self._file = file

    def write(self, urls: Mapping[PlaneName, str]) -> None:
        """Writes the planes' URLs, as reached from this machine."""
        self._replace(json.dumps({"process": os.getpid(), "planes": urls}).encode())

    def clear(self) -> None:
        self._replace(b"")

    def _replace(self, content: bytes) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, content, 0)


@contextmanager
def claimed(data: Path) -> Iterator[Listening]:
    """The folder's file of addresses, locked inside the block. `ConfigError` if a running server holds it, or if `data`
    is a file.

    At the end, a folder that was created here is removed if it holds nothing else.
    """
    is_new = not data.exists()
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"data: {data} is a file, but a folder is wanted; name another with --data") from None
    file = os.open(data / FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not _locked(file):
            server = _read(file)
            where = f" on {server['planes']['admin']} (process {server['process']})" if server else ""
            raise ConfigError(
                f"a server with the data folder {data} already runs{where}: stop it, or give this one a folder of its "
                "own with --data"
            )
        listening = Listening(file)
        try:
            yield listening
        finally:
            listening.clear()
            if is_new and os.listdir(data) == [FILE]:
                shutil.rmtree(data)
    finally:
        os.close(file)


def listening_url(data: Path, plane: PlaneName) -> str | None:
    """The plane's URL on the server of this data folder; None if no server runs, after a normal end or before a start.

    `ConfigError` if the last server was killed.
    """
    try:
        file = os.open(data / FILE, os.O_RDONLY)
    except OSError:
        return None
    try:
        is_free = _try_lock(file, fcntl.LOCK_SH)
        server = _read(file)
    finally:
        os.close(file)
    if server is None:
        return None
    if is_free:
        raise ConfigError(
            f"the server that listened on {server['planes'][plane]} was killed, and none runs now with the data folder "
            f"{data}: start `rolltap serve` again, or name another server with --url"
        )
    return server["planes"][plane]


def _locked(file: int) -> bool:
    for probe in range(PROBES):
        if _try_lock(file, fcntl.LOCK_EX):
            return True
        time.sleep(BETWEEN_PROBES_S if probe < PROBES - 1 else 0)
    return False


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(file: int) -> dict[str, Any] | None:
    """The file's content; None if it is empty or being written."""
    try:
        return json.loads(os.pread(file, 65_536, 0))
    except ValueError:
        return None
