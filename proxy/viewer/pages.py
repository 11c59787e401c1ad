"""The viewer's pages: each method reads its data and renders one template."""

from __future__ import annotations

import asyncio
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np
from cachetools import LRUCache

from rolltap.errors import DatasetError, InvalidRequest, NotFound, RolltapError
from rolltap.proxy.viewer.compare import first_and_last, reach_of, tone
from rolltap.proxy.viewer.group import lanes_of, spread
from rolltap.proxy.viewer.run import EngineLine, run_curves
from rolltap.proxy.viewer.selection import MOST_SESSIONS, query_page, selection_query
from rolltap.proxy.viewer.session import (
    BREAKS,
    MASKS,
    TURNS,
    OutlineEntry,
    ShownTurn,
    entries_of,
    timeline_of,
    turns_of,
)
from rolltap.proxy.viewer.session_news import news_address, state_of
from rolltap.proxy.viewer.templating import render_page
from rolltap.proxy.viewer.tokens import AROUND, CHUNK, call_json, chunk_json, sides_of
from rolltap.reading import RecordReader
from rolltap.reading.comparing import version_range
from rolltap.reading.types import (
    CallTokens,
    CallTurn,
    GroupDetail,
    SessionDetail,
    SessionPage,
    SessionQuery,
)
from rolltap.reconstructor.exporters import EXPORTERS
from rolltap.reconstructor.exporters.consumers import layouts
from rolltap.reconstructor.exporters.select import parse_where

PAGE = 50
IDS_FILE = "sessions.txt"
DEFAULT_FORMAT = "sft for trl"
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
"""A session with more calls takes a while to read. It is cached for its next page."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "effort", "thinking")
"""Sampling parameters of a call that are shown if set."""

EXAMPLES = ("harness=codex", "reward>=0.5", "breaks>=1", "calls>=10", "policy=default", "errors>=1")


@dataclass(eq=False)
class Pages:
    """Renders the pages. `store` is shown in every page's head."""

    reader: RecordReader
    store: str
    _read: LRUCache[str, bool] = field(default_factory=lambda: LRUCache(4))
    _transcripts: LRUCache[tuple[object, ...], tuple[CallTurn, ...]] = field(default_factory=lambda: LRUCache(4))

    async def _render(self, template: str, section: str, **values: Any) -> str:
        shared = {"store": self.store, "spread": spread, "breaks": BREAKS, "masks": MASKS, "offline": False}
        shared["calls"] = "/view/calls/"
        return await render_page(template, section=section, **shared, **values)

    async def sessions(self, search: str, where: str, sort: str, offset: int) -> str:
        selected = selection_query(search, where, sort)
        query = query_page(selected, max(0, offset), PAGE)
        problem = ""
        try:
            page = await self.reader.sessions(query)
        except RolltapError as error:
            page, problem = SessionPage((), 0, 1.0), error.message

        def at(position: int) -> str:
            query = {"q": search, "where": where, "sort": sort, "offset": position}
            return "/view/?" + urlencode({name: value for name, value in query.items() if value})

        return await self._render(
            "sessions.html",
            "Sessions",
            page=page,
            query=query,
            where=where,
            sort=query.sort,
            orders=ORDERS.items(),
            examples=EXAMPLES,
            problem=problem,
            filtered=bool(query.search or query.where),
            previous=at(max(0, query.offset - PAGE)) if query.offset else None,
            following=at(query.offset + PAGE) if query.offset + PAGE < page.total else None,
            export=_export_command(selected),
            selection=urlencode({"q": search, "where": where, "sort": query.sort}),
            formats=layouts(EXPORTERS),
            format=DEFAULT_FORMAT,
            most=MOST_SESSIONS,
        )

    async def session(self, session_id: str, start: int) -> str:
        """Renders the transcript; for a long session a page that loads it, so that something shows at once."""
        summary = (await self.reader.summaries([session_id])).get(session_id)
        if summary is not None and summary.calls > LONG and session_id not in self._read:
            whole = f"/view/sessions/{quote(session_id, safe='')}/whole?from={start}"
            return await self._render("session_shell.html", "Sessions", s=summary, whole=whole)
        return await self.whole_session(session_id, start, "session.html")

    async def whole_session(self, session_id: str, start: int, template: str = "session_whole.html") -> str:
        detail = await self.reader.session(session_id)
        values = await self._turns(detail, max(0, min(start, len(detail.calls) - 1)))
        self._read[session_id] = True
        return await self._session_page(
            template, "Transcript", detail, current=None, news=news_address(detail), **values
        )

    async def news(self, session_id: str, seen: str, start: int) -> str:
        """Renders what is new since the page of the state `seen`: its head, its outline and the turns from `start` on.

        Empty if nothing is new.
        """
        summary = (await self.reader.summaries([session_id])).get(session_id)
        if summary is not None and state_of(summary) == seen:
            return ""
        detail = await self.reader.session(session_id)
        values = await self._turns(detail, start)
        return await self._session_page(
            "news.html", "Transcript", detail, current=None, news=news_address(detail), **values
        )

    async def turns(self, session_id: str, start: int) -> str:
        """Renders the turns from `start` on, as a fragment of the page."""
        detail = await self.reader.session(session_id)
        values = await self._turns(detail, start)
        return await self._render("turns.html", "Sessions", s=detail.summary, detail=detail, **values)

    async def _turns(self, detail: SessionDetail, start: int) -> dict[str, Any]:
        entries = entries_of(detail)
        turns = turns_of(entries, await self.transcript(detail), start)
        shown = start + len(turns)
        base_url = f"/view/sessions/{quote(detail.summary.id, safe='')}"
        return {
            "entries": entries,
            "turns": turns,
            "start": start,
            "shown": shown,
            "following": f"{base_url}/turns?from={shown}" if shown < len(entries) else None,
            "link": lambda entry: _turn_link(base_url, entry, start, shown),
        }

    async def transcript(self, detail: SessionDetail) -> tuple[CallTurn, ...]:
        """Returns the session's text. The last few are cached, as a page asks for its turns in pieces."""
        summary = detail.summary
        state = (summary.id, summary.calls, summary.open_calls, summary.last_call_at)
        if state not in self._transcripts:
            self._transcripts[state] = await self.reader.transcript(summary.id)
        return self._transcripts[state]

    async def timeline(self, session_id: str) -> str:
        detail = await self.reader.session(session_id)
        entries, now = entries_of(detail), time.time()
        return await self._session_page(
            "timeline.html", "Timeline", detail, entries=entries, timeline=timeline_of(entries, now), now=now
        )

    async def session_tokens(self, session_id: str) -> str:
        """Returns the address of the tokens to show first: those of the first call that sampled any."""
        detail = await self.reader.session(session_id)
        line = next((line for line in detail.calls if line.output_tokens), None) or next(iter(detail.calls), None)
        return f"/view/calls/{quote(line.id, safe='')}" if line else f"/view/sessions/{quote(session_id, safe='')}"

    async def call(self, call_id: str) -> str:
        session_id, requested = await self.reader.sampling(call_id)
        detail = await self.reader.session(session_id)
        values = await self._call_values(detail, call_id)
        sampling = {name.replace("_", " "): value for name, value in requested.items() if value and name in SAMPLING}
        return await self._session_page("call.html", "Tokens", detail, sampling=sampling, **values)

    async def _call_values(self, detail: SessionDetail, call_id: str) -> dict[str, Any]:
        entries = entries_of(detail)
        numbers = {entry.line.id: entry.number for entry in entries}
        lines = {line.id: line for line in detail.calls}
        if call_id not in numbers:
            raise NotFound(f"no call {call_id!r}", param="call_id")
        entry = entries[numbers[call_id] - 1]
        line = entry.line
        bounds = (line.shared, line.prompt_tokens, line.length) if line.token_ids else ()
        chunks = [
            await self.reader.tokens(call_id, start, min(end, start + CHUNK))
            for start, end in pairwise(bounds)
            if start < end
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
            "figures": _logprob_statistics(chunks),
            "vocabulary": all(chunk.vocabulary for chunk in chunks),
            "annotated": any(each.trainer for each in detail.calls),
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

    async def _session_page(self, template: str, tab: str, detail: SessionDetail, **values: Any) -> str:
        shared = {"tab": tab, "detail": detail, "s": detail.summary, "news": ""}
        return await self._render(template, "Sessions", **(shared | values))

    async def groups(self, policy: str, before: str) -> str:
        groups = await self.reader.groups(policy=policy or None, limit=PAGE, before=before or None)
        following = ""
        if len(groups) == PAGE:
            query = {"policy": policy, "before": groups[-1].id}
            following = "/view/groups?" + urlencode({name: value for name, value in query.items() if value})
        return await self._render("groups.html", "Groups", groups=groups, policy=policy, following=following)

    async def group(self, group_id: str) -> str:
        group = await self.reader.group(group_id)
        return await self._render("group.html", "Groups", **(await self.group_values(group)))

    async def group_values(self, group: GroupDetail) -> dict[str, Any]:
        """Returns the values of a group's template."""
        turns: list[Sequence[ShownTurn]] = []
        for rollout in group.rollouts:
            if rollout.session is None:
                turns.append([])
                continue
            detail = await self.reader.session(rollout.session.id)
            turns.append(turns_of(entries_of(detail), await self.transcript(detail), 0, len(detail.calls)))
        lanes = lanes_of(group, turns)
        at = next((lane.parts_at for lane in lanes), -1)
        parting = "" if at < 0 else f"They part in call {at + 1}." if at else "They part in their first reply."
        return {"g": group, "lanes": lanes, "parting": parting}

    async def runs(self) -> str:
        return await self._render("runs.html", "Runs", runs=await self.reader.runs())

    async def run(self, policy: str, engines: Sequence[EngineLine]) -> str:
        """Renders a run's page. `engines`: those that serve the policy, as a running server knows them."""
        return await self._render("run.html", "Runs", **await self.run_values(policy, engines))

    async def run_values(self, policy: str, engines: Sequence[EngineLine]) -> dict[str, Any]:
        """Returns the values of `run_body.html`. Raises `NotFound` if the policy is unknown."""
        read = self.reader
        policies, points, now, mismatch, efforts = await asyncio.gather(  # reads the record and its index concurrently
            read.policies(), read.run(policy), read.run_state(policy), read.mismatch(policy), read.efforts(policy)
        )
        states = {state.name: state for state in policies}
        first, second = first_and_last(points)
        if policy not in states and not points:
            raise NotFound(f"no policy {policy!r}", param="policy")
        return {
            "policy": policy,
            "state": states.get(policy),
            "engines": engines,
            "now": now,
            "mismatch": mismatch,
            "first": first,
            "second": second,
            "curves": run_curves(points, efforts),
        }

    async def compare(self, policy: str, first: str, second: str, task: str) -> str:
        """Compares two ranges of weight versions (`0-3`, `10`) on the same tasks. With `task`, lists its rollouts."""
        problem, comparison, sides = "", None, []
        if not (first and second):
            first, second = first_and_last(await self.reader.run(policy))
        try:
            ranges = version_range(first, "first"), version_range(second, "second")
            comparison = await self.reader.compare(policy, *ranges)
            if task:
                sides = [
                    (f"{task} under versions {text}", await self.reader.rollouts_of(policy, versions, task))
                    for text, versions in zip((first, second), ranges, strict=True)
                ]
        except InvalidRequest as error:
            problem = error.message
        query = urlencode({"first": first, "second": second})
        return await self._render(
            "compare.html",
            "Runs",
            policy=policy,
            first=first,
            second=second,
            problem=problem,
            c=comparison,
            sides=sides,
            here=f"/view/runs/{quote(policy, safe='')}/compare?{query}",
            reach=reach_of(comparison) if comparison else 1.0,
            tone=tone,
        )


def _export_command(query: SessionQuery) -> str:
    """The command that exports the selection: by its conditions if `rolltap export` knows all, else by its ids."""
    command = ["rolltap", "export", "dataset"]
    try:
        parse_where(query.where)
    except DatasetError:
        return shlex.join([*command, "--sessions", IDS_FILE])
    if query.search:
        return shlex.join([*command, "--sessions", IDS_FILE])
    return shlex.join([*command, *(word for part in query.where for word in ("--where", part))])


def _turn_link(base_url: str, entry: OutlineEntry, start: int, shown: int) -> str:
    position = entry.number - 1
    if start <= position < shown:
        return f"#call-{entry.number}"
    return f"{base_url}?from={position // TURNS * TURNS}#call-{entry.number}"


def _logprob_statistics(chunks: Sequence[CallTokens]) -> Mapping[str, Any]:
    """Returns statistics of the call's own sampled tokens that are shown at once."""
    own = [
        token
        for chunk in chunks
        for token in chunk.tokens
        if token.index >= chunk.prompt_tokens and token.logprob is not None and math.isfinite(token.logprob)
    ]
    if not own:
        return {"mean": None, "perplexity": None, "least": ""}
    logprobs = np.array([token.logprob for token in own], np.float64)
    least_likely = own[int(logprobs.argmin())]
    return {
        "mean": float(logprobs.mean()),
        "perplexity": math.exp(min(700.0, -logprobs.mean())),
        "least": f"{least_likely.text!r} {_percent(math.exp(logprobs.min()))}",
    }


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share >= 0.001 else f"{share * 100:.1e} %"
