"""A log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rolltap.contract.admin import LogEntry
from rolltap.harnesses.logs.base import RunFolders, count, items, mapping, text

CLAUDE_CODE_FOLDER = ".claude/projects"
SYNTHETIC = "<synthetic>"
"""The `model` of messages that no model wrote: errors shown to the user."""


def read_claude_code(run_folders: RunFolders) -> Iterator[LogEntry]:
    """Claude Code: `~/.claude/projects/FOLDER/SESSION.jsonl`; subagents' files are in subfolders.

    The same for the agent SDK.

    A reply has one line per block, each with the reply's id and the usage of the whole reply. A tool's results may be
    between the lines of the reply that calls it.
    """
    for path in run_folders.home.find(CLAUDE_CODE_FOLDER, ".jsonl"):
        if path.count("/") == CLAUDE_CODE_FOLDER.count("/") + 2:
            yield from _claude_code_entries(run_folders.home.lines(path))


def _claude_code_entries(lines: Iterable[Mapping[str, Any]]) -> Iterator[LogEntry]:
    reply: LogEntry | None = None
    following: list[LogEntry] = []
    for line in lines:
        message = mapping(line.get("message"))
        if line.get("isSidechain") or line.get("isMeta") or message.get("model") == SYNTHETIC:
            continue
        if line.get("type") == "assistant":
            if reply is None or reply.id != text(message.get("id")):
                yield from ([reply] if reply is not None else [])
                yield from following
                reply, following = LogEntry("assistant", text(message.get("id"))), []
            calls = [
                text(block.get("id")) for block in items(message.get("content")) if block.get("type") == "tool_use"
            ]
            tokens = count(mapping(message.get("usage")).get("output_tokens"))
            reply = LogEntry("assistant", reply.id, tokens, (*reply.tool_calls, *calls))
        elif line.get("type") == "user":
            following += _results(message.get("content"))
    yield from ([reply] if reply is not None else [])
    yield from following


def _results(content: Any) -> list[LogEntry]:
    blocks = items(content)
    results = [LogEntry("tool", text(one.get("tool_use_id"))) for one in blocks if one.get("type") == "tool_result"]
    return results or [LogEntry("user")]
