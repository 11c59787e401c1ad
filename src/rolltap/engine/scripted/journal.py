"""What a scripted engine was asked, and whether each prompt continues what it served before.

The check is the engine's own: it compares token ids, knows nothing of messages, and trusts nobody's word. A prompt
*extends* an earlier request of its session if it begins with that request's prompt and all that was sampled for it.
Replies are counted along these lineages.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH = array("i").itemsize
NEAREST = 64
"""How many of a session's last requests are looked through for the one that a broken prompt shares most with."""


@dataclass(eq=False, slots=True)
class Entry:
    """One request. `shared` counts the leading prompt tokens that its parent's prompt and output have.

    `extends` is None for the first request of a session: there was nothing to extend. `outcome` is "running",
    "finished", "cancelled" (the client went away), "aborted" (it was told to), or the kind of the fault.
    """

    index: int
    id: str
    session: str
    prompt: bytes
    parent: int | None = None
    extends: bool | None = None
    shared: int = 0
    rule: int | None = None
    turn: int = 0
    output: list[int] = field(default_factory=list)
    outcome: str = "running"
    text: str | None = None
    counts: dict[int, int] = field(default_factory=dict)

    @property
    def prompt_ids(self) -> list[int]:
        return array("i", self.prompt).tolist()

    @property
    def context(self) -> bytes:
        return self.prompt + array("i", self.output).tobytes()

    def as_json(self) -> dict[str, Any]:
        names = ("index", "id", "session", "parent", "extends", "shared", "rule", "turn", "outcome")
        return {name: getattr(self, name) for name in names} | {
            "prompt_ids": self.prompt_ids,
            "output_ids": self.output,
        }


class Journal:
    """The last `keep` requests, oldest first. Tests wait on it for what they expect."""

    def __init__(self, keep: int = 20_000) -> None:
        self.entries: deque[Entry] = deque(maxlen=max(keep, 1))
        self._keep = keep
        self.count = 0
        """How many requests there were, kept or not."""
        self._by_session: dict[str, list[Entry]] = defaultdict(list)
        self._changed = asyncio.Event()

    def begin(self, id: str, session: str, prompt_ids: Sequence[int]) -> Entry:
        """Notes a request and finds what it continues."""
        prompt = array("i", prompt_ids).tobytes()
        entry = Entry(self.count, id, session, prompt)
        self.count += 1
        if self._keep:
            self._place(entry)
            self._add(entry)
        self.entry_changed()
        return entry

    def end(self, entry: Entry, outcome: str) -> None:
        if entry.outcome == "running":
            entry.outcome = outcome
            self.entry_changed()

    def parent_of(self, entry: Entry) -> Entry | None:
        """The entry that `entry` extends."""
        if not entry.extends:
            return None
        return next((earlier for earlier in self._by_session[entry.session] if earlier.index == entry.parent), None)

    def replies(self, session: str, rule: int) -> int:
        """How many different replies of a rule a session has got."""
        replies = [entry.turn + 1 for entry in self._by_session[session] if entry.rule == rule and entry.output]
        return max(replies, default=0)

    def tries(self, entry: Entry) -> int:
        """How often the same prompt was sent in this session before `entry`."""
        same = [other for other in self._by_session[entry.session] if other.prompt == entry.prompt]
        return sum(other.index < entry.index for other in same)

    async def until(self, met: Callable[[Sequence[Entry]], bool]) -> list[Entry]:
        """The entries, once `met` holds of them."""
        while not met(entries := list(self.entries)):
            self._changed.clear()
            await self._changed.wait()
        return entries

    async def requests(self, count: int) -> list[Entry]:
        """The entries, once there are `count`."""
        return await self.until(lambda entries: len(entries) >= count)

    async def over(self, count: int) -> list[Entry]:
        """The entries, once `count` requests have ended, however they did."""
        return await self.until(lambda entries: sum(entry.outcome != "running" for entry in entries) >= count)

    def entry_changed(self) -> None:
        """Wakes waiters."""
        self._changed.set()

    def as_json(self, *, first: int = 0) -> list[dict[str, Any]]:
        """The entries from index `first` on."""
        return [entry.as_json() for entry in self.entries if entry.index >= first]

    def _add(self, entry: Entry) -> None:
        if len(self.entries) == self.entries.maxlen:
            oldest = self.entries[0]
            entries = self._by_session[oldest.session]
            entries.remove(oldest)
            if not entries:
                del self._by_session[oldest.session]
        self.entries.append(entry)
        self._by_session[entry.session].append(entry)

    def _place(self, entry: Entry) -> None:
        """Finds the longest context that the prompt begins with, else the one it shares most with."""
        best: Entry | None = None
        entries = self._by_session[entry.session]
        for other in entries:
            size = len(other.prompt) + WIDTH * len(other.output)
            longer = best is None or size > entry.shared
            if longer and other.output and size <= len(entry.prompt) and entry.prompt.startswith(other.context):
                best, entry.shared = other, size
        if best is not None:
            entry.parent, entry.extends, entry.shared = best.index, True, entry.shared // WIDTH
            entry.counts = {**best.counts}
        elif entries:
            nearest = max(entries[-NEAREST:], key=lambda other: _common(entry.prompt, other.context))
            entry.parent, entry.extends = nearest.index, False
            entry.shared = _common(entry.prompt, nearest.context) // WIDTH


def _common(left: bytes, right: bytes) -> int:
    """Length of the common prefix, by halving."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
