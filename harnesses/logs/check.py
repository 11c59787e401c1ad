"""After a run: reads the harness's own log and sends it to the server, which compares it with the record."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import msgspec

from rolltap.contract.admin import ID_CHARS, MAX_ENTRIES, PROBLEM_CHARS, TOOL_CALLS, HarnessLog
from rolltap.contract.base import MAX_BODY
from rolltap.errors import BodyTooLarge, InvalidRequest, LogUnreadable, TaskInvalid, Unreadable, capped
from rolltap.extras import known_names, lookup
from rolltap.harnesses.base import Ending, Exit, Harness, Workspace, storable
from rolltap.harnesses.client import AdminClient, OpenedSession
from rolltap.harnesses.left_files import LeftFiles, read_untrusted
from rolltap.harnesses.logs import formats

ENTRY_POINTS = "rolltap.harness_logs"

LOG_READERS: Mapping[str, formats.LogReader] = {
    "codex": formats.read_codex,
    "claude-code": formats.read_claude_code,
    "claude-agent-sdk": formats.read_claude_code,
    "pi": formats.read_pi,
    "qwen-code": formats.read_qwen_code,
    "gemini-cli": formats.read_gemini_cli,
    "opencode": formats.read_opencode,
    "mini-swe-agent": formats.read_mini_swe_agent,
    "command": formats.read_atif,
}


def log_reader(harness: str) -> formats.LogReader | None:
    """The built-in or installed reader of this harness's log; None if there is none."""
    if harness not in known_names(LOG_READERS, ENTRY_POINTS):
        return None
    return lookup("harness log", harness, LOG_READERS, ENTRY_POINTS, TaskInvalid)


async def check_log(
    client: AdminClient, session: OpenedSession, harness: Harness, workspace: Workspace, exit_: Exit
) -> str:
    """Has the log compared with the closed session. Returns the verdict; "" if the harness has no log reader.

    Call it before anything else runs in the workspace: an evaluation clears HOME.
    """
    if log_reader(harness.name) is None:
        return ""
    try:
        log = await read_untrusted(read_log, harness.name, workspace.home_folder, workspace.folder)
    except Unreadable as error:
        log = HarnessLog(problem=capped(storable(f"the log can't be read: {error.message}"), PROBLEM_CHARS))
    if log is None:
        return ""
    complete = exit_.ending in (Ending.DONE, Ending.LIMIT)
    try:
        check = await client.check_log(session.session_id, HarnessLog(log.entries, log.problem, complete))
    except (InvalidRequest, BodyTooLarge) as error:  # an agent wrote what no harness writes
        problem = capped(f"the log has values of another form than known: {error.message}", PROBLEM_CHARS)
        check = await client.check_log(session.session_id, HarnessLog(problem=problem, complete=complete))
    return f"{check.verdict}: {check.text}"


def read_log(harness: str, home: Path, work: Path) -> HarnessLog | None:
    """The log of `harness` in a run's HOME and working copy; None if there is no reader for it.

    A log that can't be read never raises: it has a `problem`.
    """
    reader = log_reader(harness)
    if reader is None:
        return None
    try:
        log_entries = reader(formats.RunFolders(LeftFiles(home), LeftFiles(work)))
        entries = list(islice(log_entries, MAX_ENTRIES + 1))
    except LogUnreadable as error:
        return HarnessLog(problem=capped(storable(error.message), PROBLEM_CHARS))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        # The boundary to a file that an agent may have written: it has not the form of the harness's log.
        return HarnessLog(problem=capped(f"the log has another shape than known: {error!r}", PROBLEM_CHARS))
    if len(entries) > MAX_ENTRIES:
        return HarnessLog(problem=f"the log has more than {MAX_ENTRIES} entries")
    ids = [id for entry in entries for id in (entry.id, *entry.tool_calls)]
    if any(storable(id) != id for id in ids):
        return HarnessLog(problem="the log has ids that no store can hold")
    if any(len(id) > ID_CHARS for id in ids) or any(len(entry.tool_calls) > TOOL_CALLS for entry in entries):
        return HarnessLog(problem=f"the log has ids of more than {ID_CHARS} characters, or too many of them")
    if not entries:
        return HarnessLog(problem="the harness left no log")
    log = HarnessLog(entries)
    if len(msgspec.json.encode(log)) > MAX_BODY:
        return HarnessLog(problem=f"the log's ids have more than {MAX_BODY >> 20} MB")
    return log
