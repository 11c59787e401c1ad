"""Readers of the logs that harnesses write. An agent may have written a log, so its content is not trusted."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rolltap.contract.admin import LogEntry
from rolltap.errors import LogUnreadable
from rolltap.harnesses.left_files import LeftFiles


@dataclass(frozen=True, slots=True)
class RunFolders:
    """The folders of an ended run: its HOME and its working copy."""

    home: LeftFiles
    work: LeftFiles


LogReader = Callable[[RunFolders], Iterable[LogEntry]]
"""Returns the entries of the main conversation in a harness's log, in order; nothing if there is no log.

Raises `LogUnreadable` if it can't parse the log. Wrong types and missing fields may also raise `LookupError`,
`TypeError`, `ValueError` or `AttributeError`: an agent may have written the log.
"""


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def items(value: Any) -> list[Mapping[str, Any]]:
    """The JSON objects of a JSON list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def text(value: Any) -> str:
    """The value if it is a text, else ""."""
    return value if isinstance(value, str) else ""


def count(value: Any) -> int | None:
    """The value if it is a count, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None


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


def unseen(lines: Iterable[Mapping[str, Any]], key: str, seen: set[str]) -> Iterator[Mapping[str, Any]]:
    """The lines whose id, under `key`, no earlier file has; `seen` are the ids of those files, and then of this one.

    A fork's file begins with a copy of the conversation that it leaves, with the same ids.
    """
    own: set[str] = set()
    for line in lines:
        id = text(line.get(key))
        if id not in seen:
            own.update((id,) if id else ())
            yield line
    seen |= own


CLAUDE_CODE_FOLDER = ".claude/projects"
SYNTHETIC = "<synthetic>"
"""The `model` of messages that no model wrote: errors shown to the user."""


def read_claude_code(run_folders: RunFolders) -> Iterator[LogEntry]:
    """Claude Code: `~/.claude/projects/FOLDER/SESSION.jsonl`; subagents' files are in subfolders.

    The same for the agent SDK.

    A reply has one line per block, each with the reply's id and the usage of the whole reply. A tool's results may be
    between the lines of the reply that calls it.
    """
    seen: set[str] = set()
    for path in run_folders.home.find(CLAUDE_CODE_FOLDER, ".jsonl"):
        if path.count("/") == CLAUDE_CODE_FOLDER.count("/") + 2:
            yield from _claude_code_entries(unseen(run_folders.home.lines(path), "uuid", seen))


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
            results = [each for each in items(message.get("content")) if each.get("type") == "tool_result"]
            found = [LogEntry("tool", text(each.get("tool_use_id"))) for each in results]
            following += found or [LogEntry("user")]
    yield from ([reply] if reply is not None else [])
    yield from following


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
        entry = LogEntry("user") if item.get("role") == "user" else None
        if item.get("type") in RESULTS:
            entry = LogEntry("tool", text(item.get("call_id")))
        if entry is not None and reply is not None:
            reply.following.append(entry)
        elif entry is not None:
            yield entry
    if reply is not None:
        yield from reply.entries()


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


DATABASE_FOLDER = ".local/share/opencode"
DATABASE = "opencode.db"
BESIDE = "-wal"
"""The write-ahead log: data that is not in the database's own file yet."""

STEPS = 20_000_000
"""The most steps of SQLite's machine per query: an agent may have made the database."""

TABLES = ("session", "message", "part")
STORED = "SELECT name FROM sqlite_schema WHERE type = 'table' AND rootpage > 0"
"""The ordinary tables; a virtual table has no page of its own."""
VALUE_BYTES = 16 << 20
ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
"""What the query does."""

MESSAGES = """
    SELECT session.id, message.id, message.data, part.data FROM message JOIN session ON session.id = message.session_id
    LEFT JOIN part ON part.message_id = message.id
    WHERE session.parent_id IS NULL ORDER BY message.time_created, message.id, part.id LIMIT 200000
"""
ENDED = ("completed", "error")


def read_opencode(run_folders: RunFolders) -> list[LogEntry]:
    """OpenCode: the tables `session`, `message` and `part` of `~/.local/share/opencode/opencode.db` (SQLite).

    A tool's result is in the part of its call. The answer's tokens and its reasoning's tokens are counted
    separately; they are 0 until the reply and its tools have ended.
    """
    if not run_folders.home.has(f"{DATABASE_FOLDER}/{DATABASE}"):
        return []
    try:
        return list(_opencode_entries(_rows(run_folders.home)))
    except (sqlite3.Error, msgspec.DecodeError) as error:
        raise LogUnreadable(f"{DATABASE_FOLDER}/{DATABASE}: {error}") from error


Row = tuple[str, str, str, str | None]
"""A session's id, a message's, and the data of the message and of a part."""


def _rows(home: LeftFiles) -> list[Row]:
    """Each message with each of its parts. SQLite opens a copy in a folder with nothing else but its own log.

    Views, virtual tables and computed columns are refused: they would run SQL that an agent wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / DATABASE
        for suffix in ("", BESIDE):
            if home.has(f"{DATABASE_FOLDER}/{DATABASE}{suffix}"):
                copy.with_name(DATABASE + suffix).write_bytes(home.read(f"{DATABASE_FOLDER}/{DATABASE}{suffix}"))
        with closing(sqlite3.connect(copy)) as database:
            database.execute("PRAGMA trusted_schema = OFF")
            budget = iter(range(STEPS // 10_000))
            database.set_progress_handler(lambda: next(budget, None) is None, 10_000)
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
            columns = [column for table in TABLES for column in database.execute(f"PRAGMA table_xinfo({table})")]
            stored = {name for (name,) in database.execute(STORED)}
            if not stored.issuperset(TABLES) or any(column[6] for column in columns):
                raise LogUnreadable(
                    f"{DATABASE_FOLDER}/{DATABASE}: one of {', '.join(TABLES)} is no table of stored values"
                )
            database.set_authorizer(_authorize)
            return database.execute(MESSAGES).fetchall()


def _authorize(action: int, table: str | None, _column: str | None, _base: str | None, view: str | None) -> int:
    plain = action in ALLOWED and view is None and (action == sqlite3.SQLITE_SELECT or table in TABLES)
    return sqlite3.SQLITE_OK if plain else sqlite3.SQLITE_DENY


def _opencode_entries(rows: list[Row]) -> Iterator[LogEntry]:
    """A fork has copies of its first messages, with ids of their own, and the times and calls of the originals."""
    by_message: dict[str, tuple[str, str, list[str]]] = {}
    first: dict[tuple[str, ...], str] = {}
    for session, id, packed, part in rows:
        by_message.setdefault(id, (session, packed, []))[2].extend([part] if part is not None else [])
    for session, packed, parts in by_message.values():
        message = mapping(msgspec.json.decode(packed))
        decoded = [mapping(msgspec.json.decode(one)) for one in parts]
        tools = [part for part in decoded if part.get("type") == "tool"]
        time = mapping(message.get("time"))
        key = (str(time), *(text(tool.get("callID")) for tool in tools))
        if time and first.setdefault(key, session) != session:
            continue
        if message.get("role") == "user":
            yield LogEntry("user")
        if message.get("role") != "assistant":
            continue
        tokens = mapping(message.get("tokens"))
        output, reasoning = count(tokens.get("output")), count(tokens.get("reasoning"))
        total = (output or 0) + (reasoning or 0)
        said = any(text(part.get("text")) for part in decoded if part.get("type") in ("text", "reasoning"))
        if not total and not tools and not said:  # a call that failed
            continue
        yield LogEntry("assistant", "", total or None, tuple(text(tool.get("callID")) for tool in tools))
        for tool in tools:
            if mapping(tool.get("state")).get("status") in ENDED:
                yield LogEntry("tool", text(tool.get("callID")))


PI_FOLDER = ".pi/agent/sessions"
FAILED = ("error", "aborted")
"""Stop reasons of an interrupted reply. Pi removes the reply from its history and sends the request again."""


def read_pi(run_folders: RunFolders) -> Iterator[LogEntry]:
    """Pi: `~/.pi/agent/sessions/FOLDER/*.jsonl`, one line per message."""
    seen: set[str] = set()
    for path in run_folders.home.find(PI_FOLDER, ".jsonl"):
        for line in unseen(run_folders.home.lines(path), "id", seen):
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


QWEN_CODE_FOLDER = ".qwen/projects"


def read_qwen_code(run_folders: RunFolders) -> Iterator[LogEntry]:
    """Qwen Code: `~/.qwen/projects/FOLDER/chats/SESSION.jsonl`, a line per message.

    `candidatesTokenCount`: all tokens.
    """
    seen: set[str] = set()
    for path in run_folders.home.find(QWEN_CODE_FOLDER, ".jsonl"):
        if path.split("/")[-2] != "chats":
            continue
        for line in unseen(run_folders.home.lines(path), "uuid", seen):
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
