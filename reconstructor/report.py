"""The report of a reconstruction, with kept and omitted tokens: for one trajectory, or summed over a dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolltap.types import Trajectory


@dataclass(frozen=True, slots=True)
class Report:
    """The counts of one or more trajectories, and ratios of them."""

    trajectories: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def kept(self) -> float | None:
        """Share of the sampled and delivered tokens that carry loss. `masked_tokens` has the reasons for the others."""
        return _share(self.counts.get("trained_tokens", 0), self.counts.get("delivered_tokens", 0))

    @property
    def trained(self) -> float | None:
        """Share of all sampled tokens that carry loss. The rules mask the others."""
        return _share(self.counts.get("trained_tokens", 0), self.counts.get("sampled_tokens", 0))

    @property
    def merge_ratio(self) -> float | None:
        """Trained calls per row (a segment with loss). 1.0 means that no calls were merged."""
        return _share(self.counts.get("trained_calls", 0), self.counts.get("rows", 0))

    @property
    def saved(self) -> float | None:
        """Share of tokens that merging saves, compared with one row per call."""
        whole = self.counts.get("call_row_tokens", 0)
        return _share(whole - self.counts.get("row_tokens", 0), whole)

    def breakdown(self, prefix: str) -> dict[str, int]:
        """The counts under `prefix`, the largest first: `breaks`, `masked_calls`, `masked_tokens`; in sessions
        `findings`, `log_checks`."""
        counts = {name.split(".", 1)[1]: n for name, n in self.counts.items() if name.startswith(f"{prefix}.")}
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        flat = {name: count for name, count in self.counts.items() if "." not in name}
        return {
            "trajectories": self.trajectories,
            **flat,
            "kept": self.kept,
            "trained": self.trained,
            "merge_ratio": self.merge_ratio,
            "saved": self.saved,
            "calls_by_kind": self.breakdown("calls"),
            "breaks_by_reason": self.breakdown("breaks"),
            "masked_calls": self.breakdown("masked_calls"),
            "masked_tokens": self.breakdown("masked_tokens"),
            "findings": self.breakdown("findings"),
            "log_checks": self.breakdown("log_checks"),
        }


def report_of(trajectory: Trajectory) -> Report:
    """The report of one trajectory."""
    return Report(1, dict(trajectory.counts))


def report_from(values: Mapping[str, Any]) -> Report:
    """The report from the result of `to_dict`."""
    parts = {"calls_by_kind": "calls", "breaks_by_reason": "breaks"}
    counts = {name: value for name, value in values.items() if isinstance(value, int) and name != "trajectories"}
    for name, value in values.items():
        if isinstance(value, Mapping):
            counts.update({f"{parts.get(name, name)}.{key}": count for key, count in value.items()})
    return Report(values["trajectories"], counts)


def total(reports: Iterable[Report]) -> Report:
    """The sum of reports. Reads them one at a time."""
    counts: Counter[str] = Counter()
    trajectories = 0
    for report in reports:
        counts.update(report.counts)
        trajectories += report.trajectories
    return Report(trajectories, {name: counts[name] for name in sorted(counts)})


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
