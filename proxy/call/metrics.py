"""What this process has done since it started, as Prometheus reads it (text format 0.0.4).

Counted by the recorder as calls are written, never from the store: a scrape costs no query. Several proxies are summed
by whoever scrapes them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the buckets that calls' durations fall into."""

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CallCounts:
    """When a call began, and its tokens: of the prompt, of it those that continue a recorded context, and sampled."""

    started_at: float
    prompt: int
    cached: int
    output: int


@dataclass(eq=False)
class Metrics:
    """Counters of a proxy process."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)  # policy, outcome; or unrecorded
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)  # policy, prompt | cached | output
    breaks: Counter[tuple[str, str]] = field(default_factory=Counter)  # policy, reason
    flaws: Counter[tuple[str, str]] = field(default_factory=Counter)  # policy, flaw
    undelivered: int = 0
    in_flight: int = 0
    _buckets: Counter[int] = field(default_factory=Counter)
    _seconds: float = 0.0

    def began(self, policy: str, break_reason: str | None) -> None:
        """A call's intent was written."""
        self.in_flight += 1
        if break_reason is not None:
            self.breaks[policy, break_reason] += 1

    def ended(self, policy: str, outcome: str, flaw: str | None, counts: CallCounts) -> None:
        """A call that had begun was completed."""
        seconds = time.time() - counts.started_at
        self.in_flight -= 1
        self.calls[policy, outcome] += 1
        if flaw is not None:
            self.flaws[policy, flaw] += 1
        self.tokens[policy, "prompt"] += counts.prompt
        self.tokens[policy, "cached"] += counts.cached
        self.tokens[policy, "output"] += counts.output
        self._buckets[bisect_left(SECONDS, seconds)] += 1
        self._seconds += seconds

    def text(self, *, forged: int, versions: Mapping[str, int], engines: Mapping[str, bool]) -> str:
        """All of it. `engines` says which replicas serve, `versions` which weights the policies sample from."""
        families = [
            _counter("rolltap_calls_total", "Model calls that ended.", self.calls, "policy", "outcome"),
            _counter("rolltap_tokens_total", "Tokens of calls that ended.", self.tokens, "policy", "kind"),
            _counter("rolltap_breaks_total", "Calls that do not extend a parent.", self.breaks, "policy", "reason"),
            _counter("rolltap_flaws_total", "Calls whose tokens can't be trained.", self.flaws, "policy", "flaw"),
            _single("rolltap_undelivered_total", "counter", "Replies that missed their client.", self.undelivered),
            _single("rolltap_forged_handles_total", "counter", "Handles that another secret signed.", forged),
            _single("rolltap_calls_in_flight", "gauge", "Calls between intent and completion.", self.in_flight),
            self._histogram(),
            _gauge("rolltap_policy_version", "Weights that are sampled from.", "policy", versions),
            _gauge("rolltap_engine_up", "1 where the engine or replica serves.", "engine", engines),
        ]
        return "".join(f"{line}\n" for family in families for line in family)

    def _histogram(self) -> Iterator[str]:
        name = "rolltap_call_seconds"
        yield from _head(name, "histogram", "From a call's intent to its durable completion.")
        total = 0
        for at, bound in enumerate(SECONDS):
            total += self._buckets[at]
            yield _line(f"{name}_bucket", (("le", f"{bound:g}"),), total)
        total += self._buckets[len(SECONDS)]
        yield _line(f"{name}_bucket", (("le", "+Inf"),), total)
        yield _line(f"{name}_sum", (), self._seconds)
        yield _line(f"{name}_count", (), total)


def _counter(name: str, told: str, values: Mapping[tuple[str, str], int], first: str, second: str) -> Iterator[str]:
    yield from _head(name, "counter", told)
    for (one, two), value in sorted(values.items()):
        yield _line(name, ((first, one), (second, two)), value)


def _gauge(name: str, told: str, label: str, values: Mapping[str, int]) -> Iterator[str]:
    yield from _head(name, "gauge", told)
    for key, value in values.items():
        yield _line(name, ((label, key),), int(value))


def _single(name: str, kind: str, told: str, value: int) -> Iterator[str]:
    yield from _head(name, kind, told)
    yield _line(name, (), value)


def _head(name: str, kind: str, told: str) -> Iterator[str]:
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} {kind}"


def _line(name: str, labels: Labels, value: float) -> str:
    inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
    return f"{name}{{{inner}}} {value}" if labels else f"{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
