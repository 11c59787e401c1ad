"""Saves a session, a group or a run as one HTML file, which contains its styles and scripts and loads nothing.

The file's content security policy names the hashes of its own style and scripts, so no recorded text can run there.
"""

from __future__ import annotations

import base64
import hashlib
import time
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from rolltap.errors import NotFound
from rolltap.proxy.viewer.pages import Pages
from rolltap.proxy.viewer.runs import spread
from rolltap.proxy.viewer.session import BREAKS, MASKS, entries_of, turns_of
from rolltap.proxy.viewer.templating import ASSETS, render_page
from rolltap.proxy.viewer.tokens import CHUNK, FACTS, call_json, chunk_json
from rolltap.reading.reader import RecordReader
from rolltap.reading.types import SessionDetail

MOST_SAVED = 500_000
"""Tokens of a saved page, and `RUN` for each run of its calls. A call has runs of all calls before it, so that the runs
of a session grow with the square of its calls."""
RUN = 4


@dataclass(frozen=True)
class SavedPages:
    """Answers questions for whole sessions, groups and runs as files."""

    reader: RecordReader

    async def saved(self, what: str) -> str:
        return await one_file(self.reader, what)


async def one_file(reader: RecordReader, what: str) -> str:
    """Returns the file of a session or a group, by its id, or of a run, by its policy. Raises `NotFound`."""
    pages = Pages(reader, reader.log.database.name)
    try:
        detail = await reader.session(what)
    except NotFound:
        return await _group(pages, what)
    entries = entries_of(detail)
    turns = turns_of(entries, await pages.transcript(detail), 0, len(entries))
    return await _file(
        f"Session {what}",
        pages.store,
        "session",
        await _tokens(reader, [detail]),
        s=detail.summary,
        detail=detail,
        tab="Transcript",
        entries=entries,
        turns=turns,
        following=None,
        current=None,
        link=lambda entry: f"#call-{entry.number}",
    )


async def _group(pages: Pages, group_id: str) -> str:
    try:
        group = await pages.reader.group(group_id)
    except NotFound:
        return await _run(pages, group_id)
    details = [await pages.reader.session(each.session.id) for each in group.rollouts if each.session is not None]
    values = await pages.group_values(group)
    return await _file(f"Group {group_id}", pages.store, "group", await _tokens(pages.reader, details), **values)


async def _run(pages: Pages, policy: str) -> str:
    try:
        values = await pages.run_values(policy, (), links=False)
    except NotFound:
        raise NotFound(f"no session, no group and no policy {policy!r}") from None
    return await _file(f"Run of {policy}", pages.store, "run", None, **values)


async def _tokens(reader: RecordReader, details: list[SessionDetail]) -> dict[str, Any]:
    """Returns every call's runs, and each token once: with the call that rendered or sampled it. Calls after the first
    `MOST_SAVED` tokens and runs are left out, and counted."""
    left, left_out = MOST_SAVED, 0
    calls: dict[str, Any] = {}
    chunks: list[Any] = []
    vocabulary = True
    for detail in details:
        lines = {line.id: line for line in detail.calls}
        numbers = {line.id: number for number, line in enumerate(detail.calls, 1)}
        for line in detail.calls:
            if left <= 0:
                left_out += 1
                continue
            view = await reader.break_of(line.id) if line.break_ else None
            calls[line.id] = call_json(line.id, lines, numbers, view)
            parent = lines.get(line.parent_id or "")
            new_tokens = await reader.tokens(line.id, line.shared if parent is not None else 0)
            vocabulary = vocabulary and (new_tokens.vocabulary or not line.token_ids)
            chunks.append(chunk_json(new_tokens))
            left -= len(new_tokens.tokens) + RUN * len(calls[line.id]["runs"])
    shown = {"vocabulary": vocabulary, "left_out": left_out}
    return {"chunk": CHUNK, **shown, "first": None, "calls": calls, "chunks": chunks}


async def _file(heading: str, store: str, shows: str, tokens: dict[str, Any] | None, **values: Any) -> str:
    style = ASSETS["viewer.css"].decode()
    scripts = [ASSETS["viewer.js"].decode(), ASSETS["tokens.js"].decode()]
    if shows == "run":
        style += ASSETS["uplot.css"].decode()
        scripts[1] = f"{ASSETS['uplot.js'].decode()}\n{ASSETS['charts.js'].decode()}"
    hashes = " ".join(map(_hash, scripts))
    return await render_page(
        "file.html",
        heading=heading,
        store=store,
        saved_at=time.time(),
        policy_line=f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {hashes}",
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
        shows=shows,
        spread=spread,
        breaks=BREAKS,
        masks=MASKS,
        calls="#tokens-",
        offline=True,
        left_out=tokens["left_out"] if tokens is not None else 0,
        news="",
        **_token_values(tokens),
        **values,
    )


def _token_values(tokens: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the values of `token_panel.html`; empty for a page without it."""
    if tokens is None:
        return {}
    annotated = any(len(row) > FACTS for chunk in tokens["chunks"] for row in chunk["rows"])
    return {"data": tokens, "vocabulary": tokens["vocabulary"], "annotated": annotated, "policy": ""}


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
