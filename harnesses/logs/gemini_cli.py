"""A log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rolltap.contract.admin import LogEntry
from rolltap.harnesses.logs.base import RunFolders, count, items, mapping, text

GEMINI_CLI_FOLDER = ".gemini/tmp"


def read_gemini_cli(run_folders: RunFolders) -> Iterator[LogEntry]:
    """Gemini CLI: `~/.gemini/tmp/FOLDER/chats/session-*.jsonl`. A later line with a message's id updates its fields.

    A resumed run writes the earlier messages again, without their tokens and tool calls; into the same file if it
    begins in the same minute. The answer's tokens and its thoughts' tokens are counted separately.
    """
    messages: dict[str, Mapping[str, Any]] = {}
    for path in run_folders.home.find(GEMINI_CLI_FOLDER, ".jsonl"):
        if path.split("/")[-2] != "chats":
            continue
        for line in run_folders.home.lines(path):
            for message in [*items(mapping(line.get("$set")).get("messages")), line]:
                if id := text(message.get("id")):
                    messages[id] = {**messages.get(id, {}), **message}
    for message in messages.values():
        yield from _gemini_cli_entries(message)


def _gemini_cli_entries(message: Mapping[str, Any]) -> Iterator[LogEntry]:
    if message.get("type") == "gemini":
        tokens = mapping(message.get("tokens"))
        output, thoughts = count(tokens.get("output")), count(tokens.get("thoughts"))
        calls = tuple(text(call.get("id")) for call in items(message.get("toolCalls")))
        yield LogEntry("assistant", "", None if output is None else output + (thoughts or 0), calls)
    elif message.get("type") == "user":
        results = [mapping(part.get("functionResponse")) for part in items(message.get("content"))]
        tool_results = [LogEntry("tool", text(result.get("id"))) for result in results if result]
        yield from tool_results or [LogEntry("user")]
