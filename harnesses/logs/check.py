"""After a run: the harness's own log is read and sent to be compared with the record."""

from __future__ import annotations

import asyncio
from itertools import islice

from rolltap.contract.harness_log import ID_CHARS, MAX_ENTRIES, PROBLEM_CHARS, TOOL_CALLS, HarnessLog
from rolltap.errors import LogUnreadable, capped
from rolltap.harnesses.base import Ending, Exit, Harness, Workspace
from rolltap.harnesses.client import AdminClient, OpenedSession
from rolltap.harnesses.logs.base import Remains
from rolltap.harnesses.logs.files import LeftFiles
from rolltap.harnesses.logs.registry import log_reader

MAX_ID_CHARS = 4 << 20
"""Of all ids of a log: what is sent stays far below the server's bound of a request."""


async def check_log(
    client: AdminClient, session: OpenedSession, harness: Harness, workspace: Workspace, exit_: Exit
) -> str:
    """Has the log compared with the closed session; returns the verdict, "" for a harness whose log nobody reads.

    To be called before anything else runs in the workspace: an evaluation clears HOME.
    """
    log = await asyncio.to_thread(read_log, harness.name, workspace)
    if log is None:
        return ""
    complete = exit_.ending in (Ending.DONE, Ending.LIMIT)
    check = await client.check_log(session.session_id, HarnessLog(log.entries, log.problem, complete))
    return f"{check['verdict']}: {check['text']}"


def read_log(harness: str, workspace: Workspace) -> HarnessLog | None:
    """The log that `harness` left in the workspace; None where there is no reader for it.

    What the agent wrote there can't raise: a log that can't be read has a `problem`.
    """
    read = log_reader(harness)
    if read is None:
        return None
    try:
        logged = read(Remains(LeftFiles(workspace.home_folder), LeftFiles(workspace.folder)))
        entries = list(islice(logged, MAX_ENTRIES + 1))
    except LogUnreadable as error:
        return HarnessLog(problem=capped(error.message, PROBLEM_CHARS))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        # The boundary to a file that an agent may have written: it has not the shape of its harness's log.
        return HarnessLog(problem=capped(f"the log has another shape than known: {error!r}", PROBLEM_CHARS))
    if len(entries) > MAX_ENTRIES:
        return HarnessLog(problem=f"the log has more than {MAX_ENTRIES} entries")
    ids = [id for entry in entries for id in (entry.id, *entry.tool_calls)]
    if any(len(id) > ID_CHARS for id in ids) or any(len(entry.tool_calls) > TOOL_CALLS for entry in entries):
        return HarnessLog(problem=f"the log has ids of more than {ID_CHARS} characters, or too many of them")
    if sum(map(len, ids)) > MAX_ID_CHARS:
        return HarnessLog(problem=f"the log's ids have more than {MAX_ID_CHARS >> 20} MB")
    return HarnessLog(entries) if entries else HarnessLog(problem="the harness left no log")
