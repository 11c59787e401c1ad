"""What the process of a Python check runs. It imports little: a check's start takes 0.1 instead of 0.6 CPU seconds."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

Check = Callable[[Path], float | Mapping[str, float]]
"""Gets the working copy; returns a number, or numbers by scope: `{"rollout": 1.0, "role:critic": 0.5}`."""


def run_check(callable_: str, folder: str, result: str) -> None:
    """Writes to `result`, as JSON, the `values` that a check returns, or its `error`; prints its traceback."""
    try:
        answer: dict[str, object] = {"values": values_of(load_check(callable_)(Path(folder)))}
    except Exception as error:  # noqa: BLE001 - the task's own code may raise anything
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    Path(result).write_text(json.dumps(answer), encoding="utf-8")


def load_check(callable_: str) -> Check:
    """The function that `module:function` or `FILE.py:function` names. Raises what its import raises."""
    where, _, function = callable_.rpartition(":")
    if not where.endswith(".py"):
        return getattr(importlib.import_module(where), function)
    path = Path(where)
    name = f"check_{path.stem}_{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by its name
    spec.loader.exec_module(module)
    return getattr(module, function)


def values_of(result: float | Mapping[str, float]) -> dict[str, float]:
    """What a check returned, by scope. A text is none: it may be what a program printed, not what it means."""
    scopes = result if isinstance(result, Mapping) else {"rollout": result}
    for value in scopes.values():
        if isinstance(value, str | bytes | bytearray):
            raise ValueError(f"{value[:80]!r} is a text, not a finite number")
    return {scope: float(value) for scope, value in scopes.items()}
