"""Trainers that no package index has: their source, where a folder has it, or stand-ins made of their schema alone.

`schemas/` holds the fields of the classes that an adapter fills, in order, with their types, at a commit. The folder
`ROLLTAP_SOURCES` holds check-outs of that commit, each named like its repository (`make test-sources`).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NotRequired, Optional
from unittest.mock import MagicMock

import pydantic

FOLDER = os.environ.get("ROLLTAP_SOURCES", "")
if FOLDER:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # they compile parts of their losses, which takes longer than the suite

SCHEMAS = Path(__file__).parent / "schemas"
Field = tuple[str, str, str | None]
"""Name, type and default; None has no default."""


@dataclasses.dataclass(frozen=True, slots=True)
class Schema:
    """What an adapter fills. `classes` are named `FILE:CLASS`."""

    repository: str
    commit: str
    package: str
    version: str
    classes: Mapping[str, Sequence[Field]]

    @property
    def checkout(self) -> Path:
        return Path(FOLDER) / self.repository.partition("/")[2]

    def fields(self, name: str) -> Sequence[Field]:
        """The fields of the class `name`."""
        (of,) = [fields for key, fields in self.classes.items() if key.partition(":")[2] == name]
        return of


def schema(name: str) -> Schema:
    """That of the adapter `name`."""
    text = json.loads((SCHEMAS / f"{name}.json").read_text(encoding="utf-8"))
    return Schema(**{**text, "classes": {key: [tuple(one) for one in of] for key, of in text["classes"].items()}})


def provide(name: str, *paths: str, stand_in: Callable[[Schema], None]) -> None:
    """Makes the trainer of adapter `name` importable, as installed: from `paths` of its source, or as a stand-in."""
    of = schema(name)
    site = Path(tempfile.mkdtemp(prefix="rolltap-sources-"))
    about = site / f"{of.package.replace('-', '_')}-{of.version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {of.package}\nVersion: {of.version}\n")
    sys.path.append(str(site))
    if FOLDER:
        assert of.checkout.is_dir(), f"no {of.checkout}: git clone https://github.com/{of.repository}, at {of.commit}"
        sys.path[:0] = [str(of.checkout / path) for path in paths]
    else:
        stand_in(of)


def module(name: str, **values: Any) -> ModuleType:
    """A stand-in for the module `name`, in its packages."""
    made = ModuleType(name)
    vars(made).update(values)
    parent, _, last = name.rpartition(".")
    sys.modules[name] = made
    if parent:
        setattr(sys.modules.get(parent) or module(parent, __path__=[]), last, made)
    return made


def absent(*names: str) -> None:
    """Modules that the source imports and that what is run of it never calls."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            missing = module(name, __getattr__=lambda attribute: MagicMock(name=attribute), __path__=[])
            missing.__spec__ = ModuleSpec(name, None)


def strict_dataclass(name: str, fields: Sequence[Field], **types: Any) -> Any:
    """A dataclass that takes the schema's fields only, and values of their types only."""
    known = {"Any": Any, "Optional": Optional, "NotRequired": NotRequired, "torch": SimpleNamespace(Tensor=Any)}
    known |= {"field": dataclasses.field, **types}
    made = []
    for field, annotation, default in fields:
        kind = eval(annotation, known)
        if default is None:
            made.append((field, kind))
        else:
            value = eval(default, known)
            made.append(
                (field, kind, value if isinstance(value, dataclasses.Field) else dataclasses.field(default=value))
            )
    return pydantic.dataclasses.dataclass(dataclasses.make_dataclass(name, made), config={"strict": True})


class Status(Enum):
    """slime's `Sample.Status`."""

    PENDING = "pending"
    COMPLETED = "completed"
