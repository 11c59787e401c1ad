"""A log."""

from __future__ import annotations

from collections.abc import Iterator

from rolltap.contract.admin import LogEntry
from rolltap.harnesses.logs.base import RunFolders, count, items, mapping, text

PI_FOLDER = ".pi/agent/sessions"
FAILED = ("error", "aborted")
"""Stop reasons of an interrupted reply. Pi removes the reply from its history and sends the request again."""


def read_pi(run_folders: RunFolders) -> Iterator[LogEntry]:
    """Pi: `~/.pi/agent/sessions/FOLDER/*.jsonl`, one line per message."""
    for path in run_folders.home.find(PI_FOLDER, ".jsonl"):
        for line in run_folders.home.lines(path):
            message = mapping(line.get("message"))
            role = message.get("role")
            if line.get("type") != "message" or message.get("stopReason") in FAILED:
                continue
            if role == "assistant":
                blocks = items(message.get("content"))
                calls = tuple(text(block.get("id")) for block in blocks if block.get("type") == "toolCall")
                tokens = count(mapping(message.get("usage")).get("output"))
                yield LogEntry("assistant", text(message.get("responseId")), tokens, calls)
            elif role == "toolResult":
                yield LogEntry("tool", text(message.get("toolCallId")))
            elif role == "user":
                yield LogEntry("user")
