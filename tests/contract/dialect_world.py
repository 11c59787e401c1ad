"""Requests of any dialect, and the golden files that hold its words."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from starlette.routing import compile_path

from rolltap.protocols.base import Dialect, WireRequest
from tests.dialects import DIALECTS

OURS = Path(__file__).parents[1] / "golden" / "dialects"


def golden_path(name: str, file: str) -> Path:
    """A golden file: of a dialect of ours in this tree, of another package's in `golden/` beside its module."""
    module = type(DIALECTS[name]).__module__
    if module.startswith("rolltap."):
        return OURS / file
    return Path(str(sys.modules[module].__file__)).parent / "golden" / file


def read_golden(name: str, file: str) -> bytes:
    """The file's bytes. One that is missing fails the test that needs it, with what to do."""
    path = golden_path(name, file)
    if not path.exists():
        pytest.fail(f"write {path}: see the docstring of tests/contract/test_dialects.py")
    return path.read_bytes()


def check_golden(name: str, file: str, data: bytes) -> None:
    """Holds `data` against the file; `UPDATE_GOLDEN=1` writes it."""
    if os.environ.get("UPDATE_GOLDEN"):
        golden_path(name, file).write_bytes(data)
    assert data == read_golden(name, file)


def conversation(name: str) -> bytes:
    """The dialect's request of the one conversation that all dialects say."""
    return read_golden(name, f"conversation.{name}.json")


def conversation_fields(name: str) -> dict[str, Any]:
    return json.loads(conversation(name))


def stream_request(
    name: str, body: bytes, headers: dict[str, str] | None = None, *, model: str = "gardener"
) -> WireRequest:
    """A streamed model call as the agent plane hands it over."""
    dialect = DIALECTS[name]
    url = urlsplit(dialect.stream_url.replace("{model}", model))
    return WireRequest(url.path, path_params(dialect, url.path), dict(parse_qsl(url.query)), headers or {}, body)


def path_params(dialect: Dialect, path: str) -> dict[str, str]:
    """What the dialect's routes read out of the path of a model call."""
    for route in dialect.routes:
        match = compile_path(route.path)[0].match(path)
        if match and (route.method, route.action) == ("POST", "generate"):
            return match.groupdict()
    raise AssertionError(f"{dialect.name} has no route for its own stream_url {path!r}")
