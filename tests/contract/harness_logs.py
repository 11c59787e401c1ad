"""A small log of each harness in its real shape: one tool call, its result, and a last word."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rolltap.harnesses.logs.check import log_reader

CALL = "call_01m82bxckjqjh7d0j05d00g2h3tnb4fyn3"
FIRST, LAST = "call_01m82bxckjqjh7d0j05dzzrhzet2zbfnq2", "call_01m82bxd3jq07qzan0d3zz2p1w17y749mb"


def _lines(objects: Iterable[Any]) -> str:
    return "".join(json.dumps(each) + "\n" for each in objects)


def _codex_item(request: int, **payload: Any) -> dict[str, Any]:
    return {"type": "response_item", "payload": payload, "metadata": {"sampled_through_sequence": request}}


def _codex_usage(reply: str, tokens: int) -> dict[str, Any]:
    payload = {"response_id": f"resp_{reply}", "usage": {"output_tokens": tokens}}
    return {"type": "token_usage_record", "payload": payload}


CODEX = [
    {"type": "session_meta", "payload": {"id": "t", "source": "exec"}},
    _codex_item(0, type="message", role="user", content=[]),
    _codex_item(3, type="reasoning", id=f"rs_{FIRST}"),
    _codex_item(3, type="function_call", id=f"fc_{CALL}", call_id=CALL, name="exec_command", arguments="{}"),
    _codex_item(3, type="function_call_output", call_id=CALL, output="hi"),  # it ran before the reply was whole
    _codex_usage(FIRST, 42),
    {"type": "event_msg", "payload": {"type": "token_count", "info": {}}},
    _codex_item(6, type="message", role="assistant", id=f"msg_{LAST}", content=[]),
    _codex_usage(LAST, 16),
]
CODEX_SUBAGENT = [
    {"type": "session_meta", "payload": {"id": "u", "source": {"subagent": {"thread_spawn": {}}}}},
    _codex_item(1, type="message", role="assistant", id="msg_x", content=[]),
]


def _claude(kind: str, content: Any, reply: str = "", tokens: int = 0, **more: Any) -> dict[str, Any]:
    about = {"id": f"msg_{reply}", "model": "tiny", "usage": {"output_tokens": tokens}} if reply else {"role": "user"}
    return {"type": kind, "isSidechain": False, "message": {**about, "content": content}, **more}


CLAUDE = [
    {"type": "queue-operation", "operation": "enqueue"},
    _claude("user", "Do it."),
    _claude("user", "Caveat: ...", isMeta=True),
    _claude("assistant", [{"type": "thinking", "thinking": "I do."}], FIRST, 42),
    _claude("assistant", [{"type": "tool_use", "id": CALL, "name": "Bash", "input": {}}], FIRST, 42),
    _claude("user", [{"type": "tool_result", "tool_use_id": CALL, "content": "hi"}]),
    _claude("assistant", [{"type": "text", "text": "of a subagent"}], "other", 1, isSidechain=True),
    _claude("assistant", [{"type": "text", "text": "It holds hi."}], LAST, 16),
]


def _numbered(key: str, lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**line, key: f"{key}-{number}"} for number, line in enumerate(lines)]


def _pi(**message: Any) -> dict[str, Any]:
    return {"type": "message", "message": message}


PI = [
    {"type": "session", "version": 3},
    _pi(role="user", content=[]),
    _pi(role="assistant", content=[], stopReason="error", usage={"output": 0}),
    _pi(
        role="assistant", content=[{"type": "thinking"}, {"type": "toolCall", "id": CALL}], stopReason="toolUse",
        usage={"output": 42}, responseId="chatcmpl-01m82bxckjqjh7d0j05d",
    ),
    _pi(role="toolResult", toolCallId=CALL, content=[]),
    _pi(role="assistant", content=[{"type": "text"}], stopReason="stop", usage={"output": 16}),
]  # fmt: skip


def _qwen(kind: str, role: str, tokens: int | None = None, **part: Any) -> dict[str, Any]:
    usage = {"usageMetadata": {"candidatesTokenCount": tokens, "thoughtsTokenCount": 6}} if tokens is not None else {}
    return {"type": kind, "message": {"role": role, "parts": [part]}, **usage}


QWEN = [
    _qwen("user", "user", text="Do it."),
    {"type": "system", "subtype": "ui_telemetry", "systemPayload": {}},
    _qwen("assistant", "model", 42, functionCall={"id": CALL, "name": "run_shell_command", "args": {}}),
    _qwen("tool_result", "user", functionResponse={"id": CALL, "response": {}}),
    _qwen("assistant", "model", 16, text="It holds hi."),
]

_GEMINI_CALL = f"run_shell_command__{CALL}"
_GEMINI_FIRST = {"id": "b", "type": "gemini", "content": "", "tokens": {"output": 36, "thoughts": 6}}
GEMINI = [
    {"sessionId": "s", "kind": "main"},
    {"$set": {"messages": [{"id": "a", "type": "user", "content": [{"text": "Do it."}]}]}},
    _GEMINI_FIRST,
    {"$set": {"lastUpdated": "now"}},
    {**_GEMINI_FIRST, "toolCalls": [{"id": _GEMINI_CALL, "name": "run_shell_command"}]},
    {"id": "c", "type": "user", "content": [{"functionResponse": {"id": _GEMINI_CALL, "response": {}}}]},
    {"id": "d", "type": "gemini", "content": "It holds hi.", "tokens": {"output": 15, "thoughts": 1}},
    {"$set": {"messages": [{"id": "b", "type": "gemini", "content": ""}, {"id": "d", "type": "gemini"}]}},  # resumed
]

MINI = {
    "trajectory_format": "mini-swe-agent-1.1",
    "messages": [
        {"role": "system", "content": "You solve."},
        {"role": "user", "content": "Do it."},
        {
            "role": "assistant",
            "tool_calls": [{"id": CALL, "function": {"name": "bash", "arguments": "{}"}}],
            "extra": {"response": {"id": "chatcmpl-01m82bxckjqjh7d0j05d", "usage": {"completion_tokens": 42}}},
        },
        {"role": "tool", "tool_call_id": CALL, "content": "hi"},
        {"role": "assistant", "content": "Done.", "extra": {"response": {"usage": {"completion_tokens": 16}}}},
        {"role": "exit", "content": ""},
    ],
}

ATIF = {
    "schema_version": "ATIF-v1.5",
    "steps": [
        {"step_id": 1, "source": "user", "message": "Do it."},
        {
            "step_id": 2,
            "source": "agent",
            "tool_calls": [{"tool_call_id": CALL, "function_name": "bash", "arguments": {}}],
            "observation": {"results": [{"source_call_id": CALL, "content": "hi"}]},
            "metrics": {"completion_tokens": 42},
        },
        {"step_id": 3, "source": "agent", "message": "Done.", "metrics": {"completion_tokens": 16}},
    ],
}

_CLAUDE_FILES = {
    ".claude/projects/-work/s.jsonl": _lines(_numbered("uuid", CLAUDE)),
    ".claude/projects/-work/s/subagents/agent-1.jsonl": _lines([_claude("assistant", [], "deeper", 1)]),
}
LOGS: Mapping[str, Mapping[str, str]] = {
    "codex": {
        ".codex/sessions/2026/11/22/rollout-1.jsonl": _lines(CODEX),
        ".codex/sessions/2026/11/22/rollout-2.jsonl": _lines(CODEX_SUBAGENT),
    },
    "claude-code": _CLAUDE_FILES,
    "claude-agent-sdk": _CLAUDE_FILES,
    "pi": {".pi/agent/sessions/--work--/1.jsonl": _lines(_numbered("id", PI))},
    "qwen-code": {
        ".qwen/projects/-work/chats/s.jsonl": _lines(_numbered("uuid", QWEN)),
        ".qwen/projects/-work/x.jsonl": "{}\n",
    },
    "gemini-cli": {".gemini/tmp/work/chats/session-1.jsonl": _lines(GEMINI)},
    "mini-swe-agent": {".config/mini-swe-agent/last_mini_run.traj.json": json.dumps(MINI)},
    "command": {"trajectory.json": json.dumps(ATIF)},
}
"""Harness → path below HOME → text. OpenCode's is a database: `write_opencode`."""


_USER, _LAST = {"role": "user", "content": []}, {"role": "assistant", "content": [], "usage": {"output": 7}}
_CLAUDE_FORK = [_claude("user", "Go on.", uuid="x"), _claude("assistant", [], "other", 7, uuid="y")]
_PI_FORK = [{**_pi(**_USER), "id": "x"}, {**_pi(**_LAST), "id": "y"}]
_QWEN_FORK = [{**_qwen("user", "user"), "uuid": "x"}, {**_qwen("assistant", "model", 7), "uuid": "y"}]
FORKS: Mapping[str, tuple[str, str]] = {
    "claude-code": (".claude/projects/-work/s.jsonl", _lines(_CLAUDE_FORK)),
    "claude-agent-sdk": (".claude/projects/-work/s.jsonl", _lines(_CLAUDE_FORK)),
    "pi": (".pi/agent/sessions/--work--/1.jsonl", _lines(_PI_FORK)),
    "qwen-code": (".qwen/projects/-work/chats/s.jsonl", _lines(_QWEN_FORK)),
}
"""Harness → the log of which a fork's begins with a copy, and what the fork adds. OpenCode's: `OPENCODE_FORK`."""


def logs_of(name: str) -> Mapping[str, str]:
    """The small log of a harness: ours above; that of another package's reader in `golden/` beside its module."""
    module = getattr(log_reader(name), "__module__", "")
    if module.startswith("rolltap."):
        return LOGS.get(name, {})
    golden = Path(str(sys.modules[module].__file__)).parent / "golden"
    return {str(path.relative_to(golden)): path.read_text() for path in golden.rglob("*") if path.is_file()}


_OPENCODE_CALL = {"role": "assistant", "time": {"created": 2}, "tokens": {"output": 36, "reasoning": 6}}
OPENCODE_PARTS = [
    ("m1", {"role": "user", "time": {"created": 1}}, {"type": "text", "text": "Do it."}),
    ("m2", _OPENCODE_CALL, {"type": "reasoning", "text": "I do."}),
    ("m2", _OPENCODE_CALL, {"type": "tool", "callID": CALL, "state": {"status": "completed"}}),
    (
        "m3",
        {"role": "assistant", "time": {"created": 3}, "tokens": {"output": 15, "reasoning": 1}},
        {"type": "text", "text": "Done."},
    ),
    ("m4", {"role": "assistant", "tokens": {"output": 0, "reasoning": 0}}, None),  # it broke off
]


OPENCODE_FORK = [
    *((f"f{message}", data, part) for message, data, part in OPENCODE_PARTS[:4]),
    ("m5", {"role": "user", "time": {"created": 5}}, {"type": "text", "text": "Go on."}),
    ("m6", {"role": "assistant", "time": {"created": 6}, "tokens": {"output": 7}}, {"type": "text", "text": "On."}),
]


def write_opencode(
    home: Path,
    parts: Iterable[tuple[str, Any, Any]] = OPENCODE_PARTS,
    parent: str | None = None,
    fork: Iterable[tuple[str, Any, Any]] = (),
) -> None:
    """The tables that OpenCode writes, with the columns that are read; the rows are in the write-ahead log only."""
    folder = home / ".local/share/opencode"
    folder.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(folder / "opencode.db")
    database.execute("PRAGMA journal_mode = WAL")
    database.executescript(
        "CREATE TABLE session (id text, parent_id text);"
        "CREATE TABLE message (id text, session_id text, time_created integer, data text);"
        "CREATE TABLE part (id text, message_id text, data text);"
    )
    database.execute("INSERT INTO session VALUES ('s', ?), ('f', NULL)", (parent,))
    written: set[str] = set()
    rows = [*(("s", *each) for each in parts), *(("f", *each) for each in fork)]
    for number, (session, message, data, part) in enumerate(rows):
        if message not in written:
            database.execute("INSERT INTO message VALUES (?, ?, ?, ?)", (message, session, number, json.dumps(data)))
            written.add(message)
        database.execute("INSERT INTO part VALUES (?, ?, ?)", (f"p{number}", message, json.dumps(part)))
    database.commit()
    for suffix in ("", "-wal"):  # closing would empty the log: what is read is a copy of the open database
        path = folder / f"opencode.db{suffix}"
        (folder / f"kept{suffix}").write_bytes(path.read_bytes())
    database.close()
    for suffix in ("", "-wal"):
        (folder / f"kept{suffix}").rename(folder / f"opencode.db{suffix}")
