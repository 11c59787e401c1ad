"""Lookup by name: our own registry first, then what installed packages register by entry point.

An entry point names the same thing that the literal registry holds, so a package of somebody else adds an exporter or
a harness without a change here. Our own names win over theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TypeVar

from rolltap.errors import RolltapError

T = TypeVar("T")


def known_names(registry: Mapping[str, object], group: str) -> list[str]:
    """Every name that `lookup` finds, sorted. Nothing is imported for it."""
    return sorted({*registry, *entry_points(group=group).names})


def lookup(what: str, name: str, registry: Mapping[str, T], group: str, error: type[RolltapError]) -> T:
    """`registry[name]`, else the object that an installed package registers as `name` under entry point `group`.

    Raises `error` for an unknown name, with the known ones, and for a package that cannot be imported.
    """
    if name in registry:
        return registry[name]
    point = next(iter(entry_points(group=group, name=name)), None)
    if point is None:
        known = ", ".join(known_names(registry, group))
        raise error(f"no {what} {name!r}; known: {known}", param=what.split()[0])
    try:
        return point.load()
    except Exception as failure:  # foreign code: whatever its import raises
        raise error(f"the {what} {name!r} of {point.value} can't be loaded: {failure}") from failure
