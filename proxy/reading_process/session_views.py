"""Sessions as the admin plane shows them to runners and scripts: their calls, their report, what is odd about them."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import msgspec

from rolltap.calllog.base import CallLog, CallRow
from rolltap.contract.harness_log import HarnessLog
from rolltap.ledger.base import TrajectoriesOf
from rolltap.log_check import LogCheck
from rolltap.proxy.call.turn_cap import REACHED
from rolltap.reading.log_check import compare, recorded_replies
from rolltap.reconstructor.report import report_of
from rolltap.types import Classification, Outcome, Trajectory


class SessionViews:
    """Every method takes the id of a session that exists. `findings` are what is wrong or odd, the worst first."""

    def __init__(self, call_log: CallLog, trajectories: TrajectoriesOf) -> None:
        self._log = call_log
        self._trajectories = trajectories

    async def shown(self, session_id: str) -> dict[str, Any]:
        """Its forest: each call's parent, break, tokens and outcome, and what it was for; and its findings."""
        rows = await self._log.rows(session_id)
        (trajectory,) = await self._trajectories([session_id])
        purposes = {each.call_id: each for each in trajectory.classifications}
        calls = [_call(row, purposes.get(row.intent.id)) for row in rows]
        return {"findings": _findings(trajectory), "calls": calls}

    async def trajectory_report(self, session_id: str) -> dict[str, Any]:
        """The report of its reconstruction, with its findings whole."""
        (trajectory,) = await self._trajectories([session_id])
        return {**report_of(trajectory).to_dict(), "findings": _findings(trajectory)}

    async def ended(self, session_id: str, has_cap: bool) -> dict[str, Any]:
        """Whether its cap of turns, if it has one, refused calls; and its findings."""
        rows = await self._log.rows(session_id) if has_cap else ()
        capped = any(REACHED in row.completion.error for row in rows if row.completion)
        (trajectory,) = await self._trajectories([session_id])
        return {"capped": capped, "findings": _findings(trajectory)}

    async def compared(self, session_id: str, log: dict[str, Any]) -> LogCheck:
        """How `log`, the fields of a `HarnessLog`, agrees with what is on record."""
        rows = await self._log.rows(session_id)
        (trajectory,) = await self._trajectories([session_id])
        harness_log = msgspec.convert(log, HarnessLog)
        return await asyncio.to_thread(lambda: compare(harness_log, recorded_replies(rows, trajectory)))


def _findings(trajectory: Trajectory) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in trajectory.findings]


def _call(row: CallRow, purpose: Classification | None) -> dict[str, Any]:
    """`purpose` is what the reconstruction made of the call; of one that began since, there is the proxy's hint."""
    intent, done = row.intent, row.completion
    return {
        "id": intent.id,
        "parent_id": intent.parent_id,
        "created_at": intent.created_at,
        "dialect": intent.dialect,
        "kind": (purpose or intent).kind.value,
        "agent": (purpose or intent).agent,
        "prompt_tokens": len(row.prompt_ids),
        "output_tokens": len(done.output_ids) if done else 0,
        "shared": intent.shared,
        "break": asdict(intent.break_) if intent.break_ else None,
        "outcome": done.outcome.value if done else Outcome.ABORTED.value if row.delivered is False else "open",
        "finish": done.finish.value if done else None,
        "flaw": done.flaw.value if done and done.flaw else None,
        "error": done.error if done else "",
        "versions": [asdict(span) for span in done.versions] if done else [],
        "delivered": row.delivered,
    }
