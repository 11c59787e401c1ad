"""Lookup by name: our own registry first, then what installed packages register by entry point.

An entry point names the same thing that the literal registry holds, so a package of somebody else adds an exporter or
a harness without a change here. Our own names win over theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoints, entry_points
from typing import TypeVar

from rolltap.errors import RolltapError

T = TypeVar("T")


@lru_cache(maxsize=64)
def _entry_points(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Those that are installed on `path`. Reading them takes 20 ms, and a start asks for some groups several times."""
    return entry_points(group=group)


def _of_group(group: str) -> EntryPoints:
    return _entry_points(group, tuple(sys.path))


def known_names(registry: Mapping[str, object], group: str) -> list[str]:
    """Every name that `lookup` finds, sorted. Nothing is imported for it."""
    return sorted({*registry, *_of_group(group).names})


def lookup(what: str, name: str, registry: Mapping[str, T], group: str, error: type[RolltapError]) -> T:
    """`registry[name]`, else the object that an installed package registers as `name` under entry point `group`.

    Raises `error` for an unknown name, with the known ones, and for a package that cannot be imported.
    """
    if name in registry:
        return registry[name]
    point = next(iter(_of_group(group).select(name=name)), None)
    if point is None:
        known = ", ".join(known_names(registry, group))
        raise error(f"no {what} {name!r}; known: {known}", param=what.split()[0])
    try:
        return point.load()
    except Exception as failure:  # foreign code: whatever its import raises
        raise error(f"the {what} {name!r} of {point.value} can't be loaded: {failure}") from failure
