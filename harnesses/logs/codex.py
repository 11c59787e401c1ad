"""A log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolltap.contract.admin import LogEntry
from rolltap.harnesses.logs.base import RunFolders, count, mapping, text

CODEX_FOLDER = ".codex/sessions"
CALLS = ("function_call", "custom_tool_call", "local_shell_call", "tool_search_call")
RESULTS = ("function_call_output", "custom_tool_call_output", "tool_search_output")


def read_codex(run_folders: RunFolders) -> Iterator[LogEntry]:
    """Codex: `~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl`, one file per thread; subagents have their own threads.

    All items of a reply have the number of the last item in its request. The reply's token counts come after its items;
    tool results may be logged before them.
    """
    for path in run_folders.home.find(CODEX_FOLDER, ".jsonl"):
        lines = list(run_folders.home.lines(path))
        first = mapping(lines[0].get("payload")) if lines else {}
        if not isinstance(first.get("source"), dict):  # {"subagent": ...}
            yield from _codex_entries(lines)


@dataclass(slots=True)
class _Reply:
    """A reply whose items are being read, and the other entries logged in between."""

    request: Any
    id: str
    calls: list[str] = field(default_factory=list)
    following: list[LogEntry] = field(default_factory=list)

    def entries(self, id: str = "", tokens: int | None = None) -> Iterator[LogEntry]:
        yield LogEntry("assistant", id or self.id, tokens, tuple(self.calls))
        yield from self.following


def _codex_entries(lines: Iterable[Mapping[str, Any]]) -> Iterator[LogEntry]:
    reply: _Reply | None = None
    for line in lines:
        kind, item = line.get("type"), mapping(line.get("payload"))
        if kind == "token_usage_record":
            tokens = count(mapping(item.get("usage")).get("output_tokens"))
            yield from (reply or _Reply(None, "")).entries(text(item.get("response_id")), tokens)
            reply = None
            continue
        if kind != "response_item":
            continue
        if item.get("type") in (*CALLS, "reasoning") or item.get("role") == "assistant":
            request = mapping(line.get("metadata")).get("sampled_through_sequence")
            if reply is not None and reply.request != request:
                yield from reply.entries()
                reply = None
            reply = reply or _Reply(request, text(item.get("id")))
            if item.get("type") in CALLS:
                reply.calls.append(text(item.get("call_id")))
            continue
        entry = _other(item)
        if entry is not None and reply is not None:
            reply.following.append(entry)
        elif entry is not None:
            yield entry
    if reply is not None:
        yield from reply.entries()


def _other(item: Mapping[str, Any]) -> LogEntry | None:
    if item.get("type") in RESULTS:
        return LogEntry("tool", text(item.get("call_id")))
    return LogEntry("user") if item.get("role") == "user" else None
