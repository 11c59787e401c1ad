"""A log."""

from __future__ import annotations

from collections.abc import Iterator

from rolltap.contract.admin import LogEntry
from rolltap.harnesses.logs.base import RunFolders, count, items, mapping, text

MINI_SWE_AGENT_FOLDER = ".config/mini-swe-agent"
MINI_SWE_AGENT_NAME = "last_mini_run.traj.json"


def read_mini_swe_agent(run_folders: RunFolders) -> Iterator[LogEntry]:
    """mini-swe-agent: `~/.config/mini-swe-agent/last_mini_run.traj.json`, its messages as sent and received."""
    if not run_folders.home.has(f"{MINI_SWE_AGENT_FOLDER}/{MINI_SWE_AGENT_NAME}"):
        return
    for message in items(run_folders.home.json(f"{MINI_SWE_AGENT_FOLDER}/{MINI_SWE_AGENT_NAME}").get("messages")):
        match message.get("role"):
            case "assistant":
                response = mapping(mapping(message.get("extra")).get("response"))
                tokens = count(mapping(response.get("usage")).get("completion_tokens"))
                calls = tuple(text(call.get("id")) for call in items(message.get("tool_calls")))
                yield LogEntry("assistant", text(response.get("id")), tokens, calls)
            case "tool":
                yield LogEntry("tool", text(message.get("tool_call_id")))
            case "user":
                yield LogEntry("user")
