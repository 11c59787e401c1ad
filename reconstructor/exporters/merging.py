"""Merges the manifests of a dataset's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rolltap.reconstructor.report import report_from, total

ADDED = (
    "rows", "splits", "lengths", "files", "sessions", "sessions_selected", "sessions_left_out", "duplicates_left_out",
    "near_duplicates_left_out", "rows_with_secrets_left_out", "secrets_redacted", "secrets_by_kind", "skipped",
    "failed", "rerendered",
)  # fmt: skip


def merged(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One manifest: counts are added, other values are the last part's. A task in two parts counts twice."""
    result = dict(manifests[-1])
    for name in ADDED:
        if name in result:
            values = [manifest[name] for manifest in manifests]
            result[name] = values[0]
            for value in values[1:]:
                result[name] = _sum(result[name], value)
    result["policies"] = _policies([manifest["policies"] for manifest in manifests])
    result["reconstruction"] = total(report_from(manifest["reconstruction"]) for manifest in manifests).to_dict()
    return result


def _sum(first: Any, second: Any) -> Any:
    if isinstance(first, Mapping):
        return {
            name: _sum(first[name], second[name]) if name in first and name in second else {**second, **first}[name]
            for name in [*first, *(name for name in second if name not in first)]
        }
    if isinstance(first, list):
        return [*first, *second]
    return first if second is None else second if first is None else first + second


def _policies(parts: Sequence[Mapping[str, Mapping[str, int | None]]]) -> dict[str, dict[str, int | None]]:
    """The oldest and newest version of each policy."""
    policies: dict[str, dict[str, int | None]] = {}
    for part in parts:
        for name, versions in part.items():
            before = policies.setdefault(name, {"oldest_version": None, "newest_version": None})
            for key, choose in (("oldest_version", min), ("newest_version", max)):
                known = [value for value in (before[key], versions[key]) if value is not None]
                before[key] = choose(known, default=None)
    return dict(sorted(policies.items()))
