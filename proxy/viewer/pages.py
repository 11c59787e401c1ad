"""The viewer's pages: each method reads its data and renders one template."""

from __future__ import annotations

import asyncio
import hashlib
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np
from cachetools import LRUCache

from rolltap.errors import DatasetError, InvalidRequest, NotFound, RolltapError
from rolltap.ledger.views import GroupQuery
from rolltap.proxy.viewer.differences import CALLS, compared_calls
from rolltap.proxy.viewer.listing import MOST_SESSIONS, PAGE, ListAddress, facet_links
from rolltap.proxy.viewer.runs import (
    MOST_RUNS,
    EngineLine,
    Run,
    chart_data,
    forks_of,
    groups_by_state,
    lanes_of,
    last_values,
    reach_of,
    spread,
    tone,
)
from rolltap.proxy.viewer.session import (
    BREAKS,
    MASKS,
    TURNS,
    OutlineEntry,
    ShownTurn,
    entries_of,
    news_address,
    state_of,
    timeline_of,
    turns_of,
)
from rolltap.proxy.viewer.templating import render_page
from rolltap.proxy.viewer.tokens import AROUND, CHUNK, call_json, chunk_json, sides_of
from rolltap.reading.reader import RecordReader
from rolltap.reading.runs import version_range
from rolltap.reading.types import (
    CallTokens,
    CallTurn,
    GroupDetail,
    SessionDetail,
    SessionPage,
    SessionQuery,
    VersionRange,
)
from rolltap.reconstructor.exporters import EXPORTERS
from rolltap.reconstructor.exporters.consumers import layouts
from rolltap.reconstructor.exporters.where import parse_where

QUIET_S = 600.0
"""A store by itself in which nothing happened for so long is not asked for news."""

IDS_FILE = "sessions.txt"
DEFAULT_FORMAT = "sft for trl"
ORDER_NAMES = {
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

EXAMPLES = ("harness=codex", "reward>=0.5", "breaks>=1", "calls>=10", "purpose=evaluation", "errors>=1")


@dataclass(eq=False)
class Pages:
    """Renders the pages. `store` is shown in every page's head. `standalone`: there is no server that writes it."""

    reader: RecordReader
    store: str
    standalone: bool = False
    _read: LRUCache[str, bool] = field(default_factory=lambda: LRUCache(4))
    _transcripts: LRUCache[tuple[object, ...], tuple[CallTurn, ...]] = field(default_factory=lambda: LRUCache(4))

    async def _render(self, template: str, section: str, **values: Any) -> str:
        shared = {"store": self.store, "spread": spread, "breaks": BREAKS, "masks": MASKS, "offline": False}
        shared |= {"calls": "/view/calls/", "record": ""}
        return await render_page(template, section=section, **(shared | values))

    async def state(self, texts: bool = False, extra: str = "") -> str:
        """Returns the state of the record that a list, a group or a run shows: their pages ask for news with it.

        Empty if no news can come: the pages are those of a store by itself, in which nothing has happened for a while.
        `texts`: it shows what a search found. `extra`: what else it shows.
        """
        position, changed_at = await self.reader.position(texts=texts)
        if self.standalone and time.time() > changed_at + QUIET_S:
            return ""
        return hashlib.sha256(f"{position} {extra}".encode()).hexdigest()[:16]

    async def sessions(self, address: ListAddress) -> str:
        query, problem = address.query, ""
        state = await self.state(bool(query.search))
        try:
            page = await self.reader.sessions(query)
        except RolltapError as error:
            page, problem = SessionPage((), 0, 1.0), error.message
        rewards = [each.reward for each in page.sessions if each.reward is not None]
        return await self._render(
            "sessions.html",
            "Sessions",
            record=state or ("reading" if page.indexed < 1 else ""),
            page=page,
            a=address,
            orders=ORDER_NAMES.items(),
            examples=EXAMPLES,
            problem=problem,
            reach=(min([0.0, *rewards]), max([1.0, *rewards])),
            previous=address.at(query.offset - PAGE) if query.offset else None,
            following=address.at(query.offset + PAGE) if query.offset + PAGE < page.total else None,
            export=_export_command(query),
            formats=layouts(EXPORTERS),
            format=DEFAULT_FORMAT,
            most=MOST_SESSIONS,
        )

    async def facets(self, address: ListAddress) -> str:
        """Renders the facets beside the list, as a fragment of its page."""
        try:
            facets = await self.reader.facets(address.query)
        except RolltapError:
            facets = ()
        return await self._render("facets.html", "Sessions", a=address, facets=facet_links(address, facets))

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

    async def diff(self, first: str, second: str) -> str:
        """Renders the differences of two sessions. Raises `NotFound` for an unknown one."""
        details = [await self.reader.session(first), await self.reader.session(second)]
        turns = [turns_of(entries_of(each), await self.transcript(each), 0, CALLS) for each in details]
        calls = await compared_calls(*turns)
        summaries = [each.summary for each in details]
        groups = {each.group_id for each in summaries}
        return await self._render(
            "diff.html",
            "Sessions",
            first=summaries[0],
            second=summaries[1],
            calls_compared=calls,
            differing=sum(not call.same for call in calls),
            group=groups.pop() if len(groups) == 1 else None,
            more=any(len(each.calls) > CALLS for each in details),
        )

    async def timeline(self, session_id: str) -> str:
        detail = await self.reader.session(session_id)
        entries, now = entries_of(detail), time.time()
        return await self._session_page(
            "timeline.html", "Timeline", detail, entries=entries, timeline=timeline_of(entries, now), now=now
        )

    async def session_tokens(self, session_id: str) -> str:
        """Returns the address of the tokens to show first: at the first break, else those of the first that sampled."""
        detail = await self.reader.session(session_id)
        broken = next((entry.line for entry in entries_of(detail) if entry.broken), None)
        sampled = next((line for line in detail.calls if line.output_tokens), None)
        line = broken or sampled or next(iter(detail.calls), None)
        if line is None:
            return f"/view/sessions/{quote(session_id, safe='')}"
        return f"/view/calls/{quote(line.id, safe='')}{'#break' if line is broken else ''}"

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

    async def groups(self, query: GroupQuery) -> str:
        state = await self.state()
        groups = await self.reader.find_groups(query, PAGE)
        counts = await self.reader.group_counts(query)
        others = await self.reader.group_counts(replace(query, purpose=""))

        def link(**changes: Any) -> str:
            changed = replace(query, **{"offset": 0, **changes})
            values = {name: value for name, value in asdict(changed).items() if value}
            values.pop("descending", None)
            values |= {} if changed.descending else {"order": "asc"}
            return "/view/groups?" + urlencode(values)

        def number(rows: Sequence[tuple[str, str, bool, int]], **wanted: Any) -> int:
            names = ("policy", "status", "measures")
            return sum(
                row[-1] for row in rows if all(row[names.index(name)] == value for name, value in wanted.items())
            )

        total = number(counts)
        return await self._render(
            "groups.html",
            "Groups",
            record=state,
            groups=groups,
            query=query,
            link=link,
            total=total,
            tabs=[
                ("", "All", number(others)),
                ("training", "Training", number(others, measures=False)),
                ("evaluation", "Evaluation", number(others, measures=True)),
            ],
            policies=sorted({row[0] for row in counts}),
            statuses=sorted({row[1] for row in counts}),
            previous=link(offset=max(0, query.offset - PAGE)) if query.offset else None,
            following=link(offset=query.offset + PAGE) if query.offset + PAGE < total else None,
        )

    async def group(self, group_id: str) -> str:
        group = await self.reader.group(group_id)
        state = await self.state()
        return await self._render("group.html", "Groups", record=state, **(await self.group_values(group)))

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
        return {"g": group, "lanes": lanes, "parting": parting, "tree": forks_of(group)}

    async def runs(self) -> str:
        state = await self.state()
        return await self._render("runs.html", "Runs", record=state, runs=await self.reader.runs())

    async def run(self, policy: str, engines: Sequence[EngineLine], others: Sequence[str] = ()) -> str:
        """Renders a run's page, with the curves of the `others` laid over its own.

        `engines`: those that serve the policy, as a running server knows them.
        """
        state = await self.run_state(policy, engines)
        return await self._render("run.html", "Runs", record=state, **await self.run_values(policy, engines, others))

    async def run_state(self, policy: str, engines: Sequence[EngineLine]) -> str:
        """Returns the state of a run's page: see `state`."""
        now, mismatch, steps_at = await asyncio.gather(
            self.reader.run_state(policy), self.reader.mismatch(policy), self.reader.stepped_at(policy)
        )
        return await self.state(extra=repr((now, mismatch, list(engines), steps_at)))

    async def run_values(
        self, policy: str, engines: Sequence[EngineLine], others: Sequence[str] = (), *, links: bool = True
    ) -> dict[str, Any]:
        """Returns the values of `run_body.html`. Raises `NotFound` if the policy is unknown."""
        read = self.reader
        policies, points, now, mismatch, efforts, counts = await asyncio.gather(  # from the record and its index
            *(read.policies(), read.run(policy), read.run_state(policy), read.mismatch(policy), read.efforts(policy)),
            read.group_counts(GroupQuery(policy=policy)),
        )
        states = {state.name: state for state in policies}
        ranges = await read.comparable(policy)
        if policy not in states and not points:
            raise NotFound(f"no policy {policy!r}", param="policy")
        known = [line.policy for line in await read.runs()]
        laid_over = [name for name in dict.fromkeys(others) if name in known and name != policy][: MOST_RUNS - 1]
        runs = [Run(policy, points, efforts, await read.steps(policy))]
        for name in laid_over:
            runs.append(Run(name, await read.run(name), await read.efforts(name), await read.steps(name)))
        data = chart_data(runs, links=links)
        return {
            "policy": policy,
            "runs": known,
            "others": laid_over,
            "data": data,
            "told": last_values(data),
            "state": states.get(policy),
            "groups": groups_by_state(counts),
            "engines": engines,
            "now": now,
            "mismatch": mismatch,
            "first": ranges and str(ranges[0]),
            "second": ranges and str(ranges[1]),
        }

    async def compare(self, policy: str, first: str, second: str, task: str) -> str:
        """Compares two ranges of weight versions (`0-3`, `10`) on the same tasks. With `task`, lists its rollouts."""
        problem, comparison, sides = "", None, []
        ranges: Sequence[VersionRange] = ()
        offered = await self.reader.comparable(policy)
        if not (first and second) and offered is not None:
            first, second = map(str, offered)
        try:
            if not (first or second):
                raise InvalidRequest("no two weight versions of this run share a task: evaluate both on the same tasks")
            ranges = version_range(first, "first"), version_range(second, "second")
            comparison = await self.reader.compare(policy, first, second)
            if task:
                sides = [
                    (f"{task} under {versions.named}", await self.reader.rollouts_of(policy, versions, task))
                    for versions in ranges
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
            ranges=ranges,
            problem=problem,
            offered=offered and tuple(map(str, offered)),
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
    share = math.exp(min(0.0, logprobs.min()))  # no engine's rounding, and no record of others, is over 1
    percent = f"{share * 100:.1f} %" if share >= 0.001 else f"{share * 100:.1e} %"
    return {
        "mean": float(logprobs.mean()),
        "perplexity": math.exp(min(700.0, -logprobs.mean())),
        "least": f"{least_likely.text!r} {percent}",
    }
