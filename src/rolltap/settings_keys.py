"""Refuses keys that no section of the settings has, in files and variables, and suggests the right key."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from rolltap.errors import ConfigError

NESTED = "__"
"""Separates section and key in a variable's name."""

KeyPath = tuple[str, ...]


def check_file(model: type[BaseModel], values: Mapping[str, Any], head: str, page: str) -> None:
    """`ConfigError` names, after `head`, the first key of `values` that `model` lacks and a suggestion, or
    else the `page` that lists them."""
    for path in _paths(values):
        if (valid_depth := _valid_depth(model, path)) is not None:
            suggestion = _suggestion(model, path, valid_depth)
            hint = f"did you mean {'.'.join(suggestion)}?" if suggestion else f"the known ones are in {page}"
            raise ConfigError(f"{head}{'.'.join(path[: valid_depth + 1])}: no such key; {hint}")


def check_environment(model: type[BaseModel], prefix: str, page: str, *, other_sections: Sequence[str] = ()) -> None:
    """The same for variables, `<prefix><SECTION>__<KEY>`. `other_sections`: sections that something else reads.

    With a prefix that ends in two underscores every variable is a setting. With another one, commands read some too:
    those without a section are refused only where they spell a section's key with one underscore.
    """
    for name in sorted(os.environ):
        path = tuple(name.upper().removeprefix(prefix).lower().split(NESTED))
        if not name.upper().startswith(prefix) or path[0] in other_sections:
            continue
        if len(path) == 1 and not prefix.endswith(NESTED):
            if not (suggestion := _in_a_section(model, path[0])):
                continue
        elif (valid_depth := _valid_depth(model, path)) is None:
            continue
        else:
            suggestion = _suggestion(model, path, valid_depth)
        spelled = prefix + NESTED.join(suggestion).upper()
        hint = f"did you mean {spelled}?" if suggestion else f"the known ones are in {page}"
        raise ConfigError(f"{name}: no such setting; {hint}")


def _paths(values: Mapping[str, Any]) -> Iterator[KeyPath]:
    """The keys of nested tables, those of the innermost ones whole."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from ((name, *path) for path in _paths(value))
        else:
            yield (name,)


def _fields(kind: Any) -> Mapping[str, Any] | None:
    """The keys of a section with what they take; None of anything else."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    return None


def _valid_depth(model: type[BaseModel], path: KeyPath) -> int | None:
    """The position of the first part of `path` that its section lacks."""
    kind: Any = model
    for position, part in enumerate(path):
        fields = _fields(kind)
        if fields is not None:
            if part not in fields:
                return position
            kind = fields[part]
        elif get_origin(kind) is dict:  # engines and policies, by their names
            kind = get_args(kind)[1]
        else:
            return None  # within a value, of which its type says what is wrong
    return None


def _suggestion(model: type[BaseModel], path: KeyPath, at: int) -> KeyPath:
    """The key of another section that has the name of `path[at]`, else the nearest one of the section that lacks it."""
    for name, kind in (_fields(model) or {}).items():
        if path[at] in (_fields(kind) or ()):
            return (name, path[at])
    kind: Any = model
    for part in path[:at]:
        fields = _fields(kind)
        kind = fields[part] if fields is not None else get_args(kind)[1]
    near = difflib.get_close_matches(path[at], _fields(kind) or (), n=1)
    return (*path[:at], *near) if near else ()


def _in_a_section(model: type[BaseModel], name: str) -> KeyPath:
    """`listen_agent_port` as a section and its key; nothing where no section has it."""
    for section, kind in (_fields(model) or {}).items():
        key = name.removeprefix(f"{section}_")
        if key != name and key in (_fields(kind) or ()):
            return (section, key)
    return ()
