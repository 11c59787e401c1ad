"""Sessions as the admin plane shows them to runners and scripts: their calls, report and findings."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from rolltap.calllog.base import CallLog, CallRow
from rolltap.contract.admin import HarnessLog
from rolltap.decoding import convert
from rolltap.ledger.base import TrajectoriesOf, answered
from rolltap.log_check import LogCheck
from rolltap.proxy.call.turn_cap import REACHED
from rolltap.reading.log_check import compare, recorded_replies
from rolltap.reconstructor.report import report_of
from rolltap.types import Classification, Outcome, Trajectory


class SessionViews:
    """Every method takes the id of an existing session. `findings`: what is wrong or odd, the worst first."""

    def __init__(self, call_log: CallLog, trajectories: TrajectoriesOf) -> None:
        self._log = call_log
        self._trajectories = trajectories

    async def session_view(self, session_id: str) -> dict[str, Any]:
        """Returns the session's forest (each call's parent, break, tokens, outcome and purpose), and its findings."""
        rows = await self._log.rows(session_id)
        (trajectory,) = await self._trajectories([session_id])
        purposes = {each.call_id: each for each in trajectory.classifications}
        calls = [_call(row, purposes.get(row.intent.id)) for row in rows]
        return {"findings": _findings(trajectory), "calls": calls}

    async def trajectory_report(self, session_id: str) -> dict[str, Any]:
        """Returns the report of the session's reconstruction, with its findings whole."""
        (trajectory,) = await self._trajectories([session_id])
        return {**report_of(trajectory).to_dict(), "findings": _findings(trajectory)}

    async def ended(self, session_id: str, has_cap: bool) -> dict[str, Any]:
        """Returns whether the session's turn cap, if it has one, refused calls; if a model answered; the findings."""
        rows = await self._log.rows(session_id) if has_cap else ()
        capped = any(REACHED in row.completion.error for row in rows if row.completion)
        (trajectory,) = await self._trajectories([session_id])
        return {"capped": capped, "answered": answered(trajectory), "findings": _findings(trajectory)}

    async def compared(self, session_id: str, log: dict[str, Any]) -> LogCheck:
        """Returns whether `log`, the fields of a `HarnessLog`, agrees with the record."""
        rows = await self._log.rows(session_id)
        (trajectory,) = await self._trajectories([session_id])
        harness_log = convert(log, HarnessLog)
        return await asyncio.to_thread(lambda: compare(harness_log, recorded_replies(rows, trajectory)))


def _findings(trajectory: Trajectory) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in trajectory.findings]


def _call(row: CallRow, purpose: Classification | None) -> dict[str, Any]:
    """`purpose` is the reconstruction's classification. A call that began since has none: the proxy's hint is shown."""
    intent, completion = row.intent, row.completion
    prompt_tokens, output_tokens = row.token_counts()
    return {
        "id": intent.id,
        "parent_id": intent.parent_id,
        "created_at": intent.created_at,
        "dialect": intent.dialect,
        "kind": (purpose or intent).kind.value,
        "agent": (purpose or intent).agent,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "shared": intent.shared,
        "break": asdict(intent.break_) if intent.break_ else None,
        "outcome": completion.outcome.value
        if completion
        else Outcome.ABORTED.value
        if row.delivered is False
        else "open",
        "finish": completion.finish.value if completion else None,
        "flaw": completion.flaw.value if completion and completion.flaw else None,
        "error": completion.error if completion else "",
        "versions": [asdict(span) for span in completion.versions] if completion else [],
        "delivered": row.delivered,
    }
