"""What the admin plane asks of a session that ends: how it ended, and whether its harness's log agrees."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from rolltap.calllog.facts import CallLog
from rolltap.contract.admin import HarnessLog
from rolltap.decoding import convert
from rolltap.ledger.rebuilding import TrajectoriesOf, answered
from rolltap.proxy.call.budget import REACHED
from rolltap.reading.log_check import compare, recorded_replies
from rolltap.types import LogCheck, Trajectory


class SessionViews:
    """Every method takes the id of an existing session. `findings`: what is wrong or odd, the worst first."""

    def __init__(self, call_log: CallLog, trajectories: TrajectoriesOf) -> None:
        self._log = call_log
        self._trajectories = trajectories

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
