"""Facets of the list of sessions: how many of the sessions that a query matches have which value of a field.

One scan of the index counts all fields with few values together; another one counts tags, and one labels.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rolltap.reading.types import Facet, FacetValue

MAX_VALUES = 12
"""Values of a facet, the most frequent ones."""

OWN_TAGS = ("harness", "purpose")
"""Tags that have a facet of their own."""

_REWARDS = {"over 0.5": "reward>0.5", "0 to 0.5": "reward>0 and reward<=0.5", "0 or less": "reward<=0"}
_BUCKET = (
    "CASE WHEN reward > 0.5 THEN 'over 0.5' WHEN reward > 0 THEN '0 to 0.5' "
    "WHEN reward IS NOT NULL THEN '0 or less' END"
)
_MARKS = {"breaks": "breaks", "errors": "errors", "flaws": "flaws", "tampering": "tampering"}
_FIELDS = ("purpose", "status", "harness", "policy")
_PLAIN = re.compile(r"[\w./:@+-]+", re.ASCII)


def facets_of(connection: sqlite3.Connection, where: str, values: Sequence[Any]) -> tuple[Facet, ...]:
    """Returns the facets of the indexed sessions for which the SQL condition holds, those that have values."""
    marks = [f"{column} > 0" for column in _MARKS.values()] + ["log_check = 'mismatch'"]
    columns = ", ".join([*_FIELDS, _BUCKET, *marks])
    places = ", ".join(str(at + 1) for at in range(len(_FIELDS) + 1 + len(marks)))
    rows = connection.execute(
        f"SELECT {columns}, count(*) FROM sessions WHERE {where} GROUP BY {places}", values
    ).fetchall()
    facets = [_of_field(name, [(row[at], row[-1]) for row in rows]) for at, name in enumerate(_FIELDS)]
    rewards = _counted((row[len(_FIELDS)], row[-1]) for row in rows)
    facets.append(
        Facet("reward", tuple(FacetValue(text, rewards[text], _REWARDS[text]) for text in _REWARDS if rewards[text]))
    )
    names = [*_MARKS, "log differs"]
    found = {name: sum(row[-1] for row in rows if row[len(_FIELDS) + 1 + at]) for at, name in enumerate(names)}
    conditions = {name: f"{field}>=1" for name, field in _MARKS.items()} | {"log differs": "log_check=mismatch"}
    facets.append(Facet("worth a look", tuple(FacetValue(n, found[n], conditions[n]) for n in names if found[n])))
    facets += [_labels(connection, where, values), _tags(connection, where, values)]
    return tuple(facet for facet in facets if facet.values)


def condition(field: str, value: str) -> str | None:
    """Returns the condition that a field has the value, as `where` reads it; None for a value that can't be quoted."""
    if _PLAIN.fullmatch(value):
        return f"{field}={value}"
    return f'{field}="{value}"' if '"' not in value and value.isprintable() else None


def _of_field(name: str, rows: list[tuple[str | None, int]]) -> Facet:
    return _facet(name, [(name, text, count) for text, count in _counted(rows).most_common() if text])


def _counted(rows: Any) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    for value, count in rows:
        counter[value] += count
    return counter


def _facet(name: str, rows: Sequence[tuple[str, str, int]], *, named: bool = False) -> Facet:
    """Makes a facet of (field, value, count). `named`: the text has the field's name, as a tag's has."""
    values = [
        FacetValue(f"{field.removeprefix('tag.')}={value}" if named else value, count, where)
        for field, value, count in rows
        if (where := condition(field, value)) is not None
    ]
    return Facet(name, tuple(values[:MAX_VALUES]))


def _labels(connection: sqlite3.Connection, where: str, values: Sequence[Any]) -> Facet:
    query = (
        "SELECT each.value, count(*) "
        f"FROM (SELECT labels FROM sessions WHERE labels != '[]' AND {where}) chosen, json_each(chosen.labels) each "
        f"GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT {MAX_VALUES}"
    )
    return _facet("label", [("label", text, count) for text, count in connection.execute(query, values)])


def _tags(connection: sqlite3.Connection, where: str, values: Sequence[Any]) -> Facet:
    """Tags that several sessions share: of one that names a single session there would be as many as sessions."""
    skipped = ", ".join(f"'{name}'" for name in OWN_TAGS)
    query = (
        "SELECT 'tag.' || each.key, each.value, count(*) "
        f"FROM (SELECT tags FROM sessions WHERE tags != '{{}}' AND {where}) chosen, json_each(chosen.tags) each "
        f"WHERE each.key NOT IN ({skipped}) GROUP BY 1, 2 HAVING count(*) > 1 "
        f"ORDER BY 3 DESC, 1, 2 LIMIT {MAX_VALUES}"
    )
    named = [row for row in connection.execute(query, values) if _PLAIN.fullmatch(row[0])]
    return _facet("tag", named, named=True)
