"""Writers of the logs that harnesses leave, one for each format that is read, as lists of single writes.

A session is a list of runs, each a list of replies. A reply is written as its harness does it, so that a log can end
between any two writes.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Write = Callable[[Path], None]
"""Changes the log below a HOME."""


@dataclass(frozen=True)
class Reply:
    """A reply that a harness received: `calls` are the ids of its tool calls. If it is `cut`, its stream broke off
    after its first item."""

    call_id: str
    tokens: int
    calls: tuple[str, ...]
    cut: bool = False


Writer = Callable[[int, Sequence[Reply]], Iterator[tuple[int, Write]]]
"""A run's number and replies → its writes, each with the index of its reply (-1: the prompt)."""


def _line(path: str, *objects: Any) -> Write:
    def write(home: Path) -> None:
        file = home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as out:
            out.writelines(json.dumps(one) + "\n" for one in objects)

    return write


def _whole(path: str, value: Any) -> Write:
    text = json.dumps(value)

    def write(home: Path) -> None:
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)

    return write


def write_codex(run: int, replies: Sequence[Reply]) -> Iterator[tuple[int, Write]]:
    """It appends to one file over all runs."""
    path, sequence = ".codex/sessions/2026/11/28/rollout-1.jsonl", run * 1000

    def item(**payload: Any) -> Write:
        return _line(
            path, {"type": "response_item", "payload": payload, "metadata": {"sampled_through_sequence": sequence}}
        )

    if run == 0:
        yield -1, _line(path, {"type": "session_meta", "payload": {"id": "t", "source": "exec"}})
    yield -1, item(type="message", role="user", content=[])
    for index, reply in enumerate(replies):
        sequence += 3
        tail = f"_call_{reply.call_id}00000000000000"
        yield index, item(type="reasoning", id=f"rs{tail}")
        if reply.cut:
            continue
        for call in reply.calls:
            yield index, item(type="function_call", id=f"fc_{call}", call_id=call, name="exec_command", arguments="{}")
        if not reply.calls:
            yield index, item(type="message", role="assistant", id=f"msg{tail}", content=[])
        for call in reply.calls:
            yield index, item(type="function_call_output", call_id=call, output="")
        usage = {"response_id": f"resp{tail}", "usage": {"output_tokens": reply.tokens}}
        yield index, _line(path, {"type": "token_usage_record", "payload": usage})


def write_claude_code(run: int, replies: Sequence[Reply]) -> Iterator[tuple[int, Write]]:
    path = ".claude/projects/-work/s.jsonl"

    def user(*content: Any) -> Write:
        return _line(path, {"type": "user", "message": {"role": "user", "content": list(content)}})

    yield -1, user({"type": "text", "text": "Do it."})
    for index, reply in enumerate(replies):
        message = {
            "id": f"msg_call_{reply.call_id}00000000000000",
            "model": "tiny",
            "usage": {"output_tokens": None if reply.cut else reply.tokens},
        }
        blocks = [{"type": "text", "text": "I do."}, *({"type": "tool_use", "id": call} for call in reply.calls)]
        for block in blocks[: 1 if reply.cut else None]:
            yield index, _line(path, {"type": "assistant", "message": {**message, "content": [block]}})
        for call in () if reply.cut else reply.calls:
            yield index, user({"type": "tool_result", "tool_use_id": call, "content": ""})


def write_pi(run: int, replies: Sequence[Reply]) -> Iterator[tuple[int, Write]]:
    path = ".pi/agent/sessions/--work--/1.jsonl"

    def message(**values: Any) -> Write:
        return _line(path, {"type": "message", "message": values})

    yield -1, message(role="user", content=[])
    for index, reply in enumerate(replies):
        calls = [{"type": "toolCall", "id": call} for call in reply.calls]
        if reply.cut:
            yield index, message(role="assistant", content=calls[:1], stopReason="error", usage={"output": 0})
            continue
        yield (
            index,
            message(
                role="assistant",
                content=[{"type": "text"}, *calls],
                stopReason="stop",
                usage={"output": reply.tokens},
                responseId=f"chatcmpl-{reply.call_id}",
            ),
        )
        for call in reply.calls:
            yield index, message(role="toolResult", toolCallId=call, content=[])


def write_qwen_code(run: int, replies: Sequence[Reply]) -> Iterator[tuple[int, Write]]:
    path = ".qwen/projects/-work/chats/s.jsonl"
    yield -1, _line(path, {"type": "user", "message": {"parts": [{"text": "Do it."}]}})
    for index, reply in enumerate(replies):
        if reply.cut:
            continue
        parts = [{"text": "I do."}, *({"functionCall": {"id": call}} for call in reply.calls)]
        usage = {"candidatesTokenCount": reply.tokens}
        yield index, _line(path, {"type": "assistant", "message": {"parts": parts}, "usageMetadata": usage})
        for call in reply.calls:
            answer = {"parts": [{"functionResponse": {"id": call}}]}
            yield index, _line(path, {"type": "tool_result", "message": answer})


def write_gemini_cli(run: int, replies: Sequence[Reply]) -> Iterator[tuple[int, Write]]:
    """A resumed run may write into the same file or a new one; ids of messages are its own."""
    path = f".gemini/tmp/work/chats/session-{run // 2}.jsonl"
    yield -1, _line(path, {"id": f"{run}-prompt", "type": "user", "content": [{"text": "Do it."}]})
    for index, reply in enumerate(replies):
        id = f"{run}-{index}"
        if reply.cut:
            yield index, _line(path, {"id": id, "type": "gemini", "content": "I"})
            continue
        tokens = {"output": reply.tokens - 1, "thoughts": 1}
        yield index, _line(path, {"id": id, "type": "gemini", "content": "I do.", "tokens": tokens})
        calls = [{"id": f"run_shell_command__{call}"} for call in reply.calls]
        if calls:
            yield index, _line(path, {"id": id, "type": "gemini", "toolCalls": calls})
            results = [{"functionResponse": {"id": call["id"]}} for call in calls]
            yield index, _line(path, {"id": f"{id}-results", "type": "user", "content": results})


def write_opencode(run: int, replies: Sequence[Reply]) -> Iterator[tuple[int, Write]]:
    """The counts are 0 until the tools have run."""

    def rows(*statements: tuple[str, tuple[Any, ...]]) -> Write:
        def write(home: Path) -> None:
            folder = home / ".local/share/opencode"
            folder.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(folder / "opencode.db")
            database.executescript(
                "CREATE TABLE IF NOT EXISTS session (id text, parent_id text);"
                "CREATE TABLE IF NOT EXISTS message (id text, session_id text, time_created integer, data text);"
                "CREATE TABLE IF NOT EXISTS part (id text, message_id text, data text);"
                "DELETE FROM session; INSERT INTO session VALUES ('s', NULL);"
            )
            for statement, values in statements:
                database.execute(statement, values)
            database.commit()
            database.close()

        return write

    add_message = "INSERT INTO message VALUES (?, 's', ?, ?)"
    add_part = "INSERT OR REPLACE INTO part VALUES (?, ?, ?)"
    start = run * 1000
    yield -1, rows((add_message, (f"m{start}", start, json.dumps({"role": "user"}))))
    for index, reply in enumerate(replies):
        number = start + index + 1
        id = f"m{number:06d}"

        def part(at: int, id: str = id, **data: Any) -> tuple[str, tuple[Any, ...]]:
            return add_part, (f"{id}-{at}", id, json.dumps(data))

        empty = {"role": "assistant", "tokens": {"output": 0, "reasoning": 0}}
        yield index, rows((add_message, (id, number, json.dumps(empty))))
        yield index, rows(part(0, type="text", text="I do."))
        if reply.cut:
            continue
        for at, call in enumerate(reply.calls, 1):
            yield index, rows(part(at, type="tool", callID=call, state={"status": "running"}))
        for at, call in enumerate(reply.calls, 1):
            gone = "DELETE FROM part WHERE id = ?", (f"{id}-{at}",)
            yield index, rows(gone, part(at, type="tool", callID=call, state={"status": "completed"}))
        whole = {"role": "assistant", "tokens": {"output": reply.tokens - 1, "reasoning": 1}}
        yield index, rows(("UPDATE message SET data = ? WHERE id = ?", (json.dumps(whole), id)))


def write_mini_swe_agent(run: int, replies: Sequence[Reply]) -> Iterator[tuple[int, Write]]:
    """It writes the whole file after each step."""
    path = ".config/mini-swe-agent/last_mini_run.traj.json"
    messages: list[Any] = [{"role": "user", "content": "Do it."}]
    for index, reply in enumerate(replies):
        if reply.cut:
            continue
        response = {"id": f"chatcmpl-{reply.call_id}", "usage": {"completion_tokens": reply.tokens}}
        calls = [{"id": call} for call in reply.calls]
        messages.append({"role": "assistant", "tool_calls": calls, "extra": {"response": response}})
        yield index, _whole(path, {"messages": messages})
        messages += [{"role": "tool", "tool_call_id": call} for call in reply.calls]
        yield index, _whole(path, {"messages": messages})


def write_atif(run: int, replies: Sequence[Reply]) -> Iterator[tuple[int, Write]]:
    """A program that writes after each step."""
    steps: list[Any] = [{"source": "user"}]
    for index, reply in enumerate(replies):
        if reply.cut:
            continue
        step = {
            "source": "agent",
            "tool_calls": [{"tool_call_id": call} for call in reply.calls],
            "metrics": {"completion_tokens": reply.tokens},
        }
        yield index, _whole("trajectory.json", {"schema_version": "ATIF-v1.5", "steps": [*steps, step]})
        step = {**step, "observation": {"results": [{"source_call_id": call} for call in reply.calls]}}
        steps.append(step)
        yield index, _whole("trajectory.json", {"schema_version": "ATIF-v1.5", "steps": steps})


WRITERS: dict[str, Writer] = {
    "codex": write_codex,
    "claude-code": write_claude_code,
    "claude-agent-sdk": write_claude_code,
    "pi": write_pi,
    "qwen-code": write_qwen_code,
    "gemini-cli": write_gemini_cli,
    "opencode": write_opencode,
    "mini-swe-agent": write_mini_swe_agent,
    "command": write_atif,
}
RESUMED = ("codex", "claude-code", "claude-agent-sdk", "pi", "qwen-code", "gemini-cli", "opencode")
"""Those that go on with an earlier run's conversation, in its log."""
