"""A log."""

from __future__ import annotations

from collections.abc import Iterator

from rolltap.contract.admin import LogEntry
from rolltap.harnesses.logs.base import RunFolders, count, items, mapping, text

ATIF_NAME = "trajectory.json"


def read_atif(run_folders: RunFolders) -> Iterator[LogEntry]:
    """ATIF (Agent Trajectory Interchange Format, Harbor): `trajectory.json`, which the harness `command` may write.

    A step is a message of the user or the agent; the results of an agent's tool calls are in the same step.
    """
    for files in (run_folders.home, run_folders.work):
        if not files.has(ATIF_NAME):
            continue
        log = files.json(ATIF_NAME)
        if not text(log.get("schema_version")).startswith("ATIF"):
            continue  # another file of that name, which belongs to the task
        for step in items(log.get("steps")):
            if step.get("source") == "user":
                yield LogEntry("user")
            elif step.get("source") == "agent":
                calls = tuple(text(call.get("tool_call_id")) for call in items(step.get("tool_calls")))
                yield LogEntry("assistant", "", count(mapping(step.get("metrics")).get("completion_tokens")), calls)
                for result in items(mapping(step.get("observation")).get("results")):
                    if text(result.get("source_call_id")):
                        yield LogEntry("tool", text(result.get("source_call_id")))
        return
