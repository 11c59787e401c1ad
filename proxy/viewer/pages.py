"""The viewer's pages: each reads what it shows, and renders one template."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args
from urllib.parse import quote, urlencode

import numpy as np
from cachetools import LRUCache

from rolltap.errors import NotFound, RolltapError
from rolltap.proxy.viewer.group import lanes_of, spread
from rolltap.proxy.viewer.run import EngineLine, run_curves
from rolltap.proxy.viewer.session import BREAKS, TURNS, OutlineEntry, ShownTurn, entries_of, timeline_of, turns_of
from rolltap.proxy.viewer.templating import render
from rolltap.proxy.viewer.tokens import AROUND, CHUNK, call_json, chunk_json, sides_of
from rolltap.reading import RecordReader
from rolltap.reading.types import (
    CallTokens,
    CallTurn,
    GroupDetail,
    SessionDetail,
    SessionOrder,
    SessionPage,
    SessionQuery,
)

PAGE = 50
ORDERS = {
    "created_at": "Newest",
    "last_call_at": "Last active",
    "reward": "Reward",
    "calls": "Calls",
    "prompt_tokens": "Prompt tokens",
    "output_tokens": "Sampled tokens",
    "breaks": "Breaks",
    "errors": "Errors",
}
LONG = 300
"""A session of more calls takes a while to read; it is kept for the next page of it."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "effort", "thinking")
"""What of a call's sampling is shown, where it is set."""

EXAMPLES = ("harness=codex", "reward>=0.5", "breaks>=1", "calls>=10", "policy=default", "errors>=1")


@dataclass(eq=False)
class Pages:
    """`store` is shown in every page's head; `engines` says what a running server knows of a policy's engines."""

    reader: RecordReader
    store: str
    engines: Callable[[str], Sequence[EngineLine]] = lambda policy: ()
    _read: LRUCache[str, bool] = field(default_factory=lambda: LRUCache(4))
    _transcripts: LRUCache[tuple[object, ...], tuple[CallTurn, ...]] = field(default_factory=lambda: LRUCache(4))

    def _render(self, template: str, section: str, **values: Any) -> str:
        shared = {"store": self.store, "spread": spread, "breaks": BREAKS, "calls": "/view/calls/", "offline": False}
        return render(template, section=section, **shared, **values)

    async def sessions(self, search: str, where: str, sort: str, offset: int) -> str:
        order: SessionOrder = next((name for name in get_args(SessionOrder) if name == sort), "created_at")
        conditions = tuple(part.strip() for part in where.split(" and ") if part.strip())
        query = SessionQuery(search=search.strip(), where=conditions, sort=order, limit=PAGE, offset=max(0, offset))
        narrowed = [word for part in conditions for word in ("--where", part)]
        problem = ""
        try:
            page = await self.reader.sessions(query)
        except RolltapError as error:
            page, problem = SessionPage((), 0, 1.0), error.message

        def at(position: int) -> str:
            asked = {"q": search, "where": where, "sort": sort, "offset": position}
            return "/view/?" + urlencode({name: value for name, value in asked.items() if value})

        return self._render(
            "sessions.html",
            "Sessions",
            page=page,
            query=query,
            where=where,
            sort=order,
            orders=ORDERS.items(),
            examples=EXAMPLES,
            problem=problem,
            filtered=bool(query.search or conditions),
            previous=at(max(0, query.offset - PAGE)) if query.offset else None,
            following=at(query.offset + PAGE) if query.offset + PAGE < page.total else None,
            export=shlex.join(["rolltap", "export", "dataset", *narrowed]),
        )

    async def session(self, session_id: str, start: int) -> str:
        """The transcript; of a long session a page that asks for it, so that something is seen at once."""
        summary = (await self.reader.summaries([session_id])).get(session_id)
        if summary is not None and summary.calls > LONG and session_id not in self._read:
            whole = f"/view/sessions/{quote(session_id, safe='')}/whole?from={start}"
            return self._render("session_shell.html", "Sessions", s=summary, whole=whole)
        return await self.whole_session(session_id, start, "session.html")

    async def whole_session(self, session_id: str, start: int, template: str = "session_whole.html") -> str:
        detail = await self.reader.session(session_id)
        values = await self._turns(detail, start)
        self._read[session_id] = True
        return self._session_page(template, "Transcript", detail, current=None, **values)

    async def turns(self, session_id: str, start: int) -> str:
        """The turns from `start` on, as a fragment of the page."""
        detail = await self.reader.session(session_id)
        return self._render("turns.html", "Sessions", s=detail.summary, **await self._turns(detail, start))

    async def _turns(self, detail: SessionDetail, start: int) -> dict[str, Any]:
        entries = entries_of(detail)
        start = max(0, min(start, len(entries) - 1))
        turns = turns_of(entries, await self.transcript(detail), start)
        shown = start + len(turns)
        here = f"/view/sessions/{quote(detail.summary.id, safe='')}"
        return {
            "entries": entries,
            "turns": turns,
            "start": start,
            "shown": shown,
            "following": f"{here}/turns?from={shown}" if shown < len(entries) else None,
            "link": lambda entry: _turn_link(here, entry, start, shown),
        }

    async def transcript(self, detail: SessionDetail) -> tuple[CallTurn, ...]:
        """The session's text; the last ones are kept, as a page asks for its turns piece by piece."""
        summary = detail.summary
        state = (summary.id, summary.calls, summary.open_calls, summary.last_call_at)
        if state not in self._transcripts:
            self._transcripts[state] = await self.reader.transcript(summary.id)
        return self._transcripts[state]

    async def timeline(self, session_id: str) -> str:
        detail = await self.reader.session(session_id)
        entries, now = entries_of(detail), time.time()
        return self._session_page(
            "timeline.html", "Timeline", detail, entries=entries, timeline=timeline_of(entries, now), now=now
        )

    async def session_tokens(self, session_id: str) -> str:
        """The address of the tokens to show first: those of the first call that sampled something."""
        detail = await self.reader.session(session_id)
        line = next((line for line in detail.calls if line.output_tokens), None) or next(iter(detail.calls), None)
        return f"/view/calls/{quote(line.id, safe='')}" if line else f"/view/sessions/{quote(session_id, safe='')}"

    async def call(self, call_id: str) -> str:
        session_id, asked = await self.reader.sampling(call_id)
        detail = await self.reader.session(session_id)
        values = await self._call_values(detail, call_id)
        sampling = {name.replace("_", " "): value for name, value in asked.items() if value and name in SAMPLING}
        return self._session_page("call.html", "Tokens", detail, sampling=sampling, **values)

    async def _call_values(self, detail: SessionDetail, call_id: str) -> dict[str, Any]:
        entries = entries_of(detail)
        numbers = {entry.line.id: entry.number for entry in entries}
        lines = {line.id: line for line in detail.calls}
        if call_id not in numbers:
            raise NotFound(f"no call {call_id!r}", param="call_id")
        entry = entries[numbers[call_id] - 1]
        line = entry.line
        total = line.prompt_tokens + line.output_tokens
        first = ((line.shared, line.prompt_tokens), (line.prompt_tokens, total))
        chunks = [
            await self.reader.tokens(call_id, start, min(end, start + CHUNK)) for start, end in first if start < end
        ]
        view = await self.reader.break_of(call_id, AROUND) if line.break_ else None
        return {
            "entries": entries,
            "entry": entry,
            "current": call_id,
            "before": entries[entry.number - 2] if entry.number > 1 else None,
            "after": entries[entry.number] if entry.number < len(entries) else None,
            "numbers": numbers,
            "link": lambda other: f"/view/calls/{quote(other.line.id, safe='')}",
            "sides": sides_of(view) if view else None,
            "figures": _figures(chunks),
            "vocabulary": all(chunk.vocabulary for chunk in chunks),
            "data": {
                "chunk": CHUNK,
                "vocabulary": all(chunk.vocabulary for chunk in chunks),
                "first": call_id,
                "calls": {call_id: call_json(call_id, lines, numbers, view)},
                "chunks": [chunk_json(chunk) for chunk in chunks],
            },
        }

    async def tokens(self, call_id: str, start: int, end: int) -> dict[str, Any]:
        return chunk_json(await self.reader.tokens(call_id, max(0, start), min(end, max(0, start) + CHUNK)))

    def _session_page(self, template: str, tab: str, detail: SessionDetail, **values: Any) -> str:
        return self._render(template, "Sessions", tab=tab, detail=detail, s=detail.summary, **values)

    async def groups(self, policy: str, before: str) -> str:
        groups = await self.reader.groups(policy=policy or None, limit=PAGE, before=before or None)
        following = ""
        if len(groups) == PAGE:
            asked = {"policy": policy, "before": groups[-1].id}
            following = "/view/groups?" + urlencode({name: value for name, value in asked.items() if value})
        return self._render("groups.html", "Groups", groups=groups, policy=policy, following=following)

    async def group(self, group_id: str) -> str:
        group = await self.reader.group(group_id)
        return self._render("group.html", "Groups", **(await self.group_values(group)))

    async def group_values(self, group: GroupDetail) -> dict[str, Any]:
        """What the template of a group takes."""
        turns: list[Sequence[ShownTurn]] = []
        for rollout in group.rollouts:
            if rollout.session is None:
                turns.append([])
                continue
            detail = await self.reader.session(rollout.session.id)
            turns.append(turns_of(entries_of(detail), await self.transcript(detail), 0, len(detail.calls)))
        lanes = lanes_of(group, turns)
        part = next((lane.parts_at for lane in lanes), -1)
        parting = "" if part < 0 else f"They part in call {part + 1}." if part else "They part in their first reply."
        return {"g": group, "lanes": lanes, "parting": parting}

    async def runs(self) -> str:
        return self._render("runs.html", "Runs", runs=await self.reader.runs())

    async def run(self, policy: str) -> str:
        states = {state.name: state for state in await self.reader.policies()}
        points = await self.reader.run(policy)
        if policy not in states and not points:
            raise NotFound(f"no policy {policy!r}", param="policy")
        return self._render(
            "run.html",
            "Runs",
            policy=policy,
            state=states.get(policy),
            engines=self.engines(policy),
            now=await self.reader.run_state(policy),
            curves=run_curves(points, await self.reader.efforts(policy)),
        )


def _turn_link(here: str, entry: OutlineEntry, start: int, shown: int) -> str:
    position = entry.number - 1
    if start <= position < shown:
        return f"#call-{entry.number}"
    return f"{here}?from={position // TURNS * TURNS}#call-{entry.number}"


def _figures(chunks: Sequence[CallTokens]) -> Mapping[str, Any]:
    """Of the call's own sampled tokens that are shown at once."""
    own = [
        token
        for chunk in chunks
        for token in chunk.tokens
        if token.index >= chunk.prompt_tokens and token.logprob is not None and math.isfinite(token.logprob)
    ]
    if not own:
        return {"mean": None, "perplexity": None, "least": ""}
    logprobs = np.array([token.logprob for token in own], np.float64)
    least = own[int(logprobs.argmin())]
    return {
        "mean": float(logprobs.mean()),
        "perplexity": math.exp(min(700.0, -logprobs.mean())),
        "least": f"{least.text!r} {_percent(math.exp(logprobs.min()))}",
    }


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share >= 0.001 else f"{share * 100:.1e} %"
