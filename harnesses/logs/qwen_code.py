"""A log."""

from __future__ import annotations

from collections.abc import Iterator

from rolltap.contract.admin import LogEntry
from rolltap.harnesses.logs.base import RunFolders, count, items, mapping, text

QWEN_CODE_FOLDER = ".qwen/projects"


def read_qwen_code(run_folders: RunFolders) -> Iterator[LogEntry]:
    """Qwen Code: `~/.qwen/projects/FOLDER/chats/SESSION.jsonl`, a line per message.

    `candidatesTokenCount`: all tokens.
    """
    for path in run_folders.home.find(QWEN_CODE_FOLDER, ".jsonl"):
        if path.split("/")[-2] != "chats":
            continue
        for line in run_folders.home.lines(path):
            parts = items(mapping(line.get("message")).get("parts"))
            if line.get("type") == "assistant":
                calls = tuple(text(mapping(part["functionCall"]).get("id")) for part in parts if "functionCall" in part)
                tokens = count(mapping(line.get("usageMetadata")).get("candidatesTokenCount"))
                yield LogEntry("assistant", "", tokens, calls)
            elif line.get("type") == "tool_result":
                for part in parts:
                    yield LogEntry("tool", text(mapping(part.get("functionResponse")).get("id")))
            elif line.get("type") == "user":
                yield LogEntry("user")
