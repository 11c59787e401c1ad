"""`rolltap rollout`: how one rollout ended, and what its evaluator saw."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from rolltap.cli.client import PlaneClient
from rolltap.cli.common import one_line_errors


@one_line_errors
def rollout(
    id: Annotated[str, typer.Argument(help="a rollout")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Shows how a rollout ended, its rewards, and all that its evaluator saw."""
    found = PlaneClient("admin").call("GET", f"/rollouts/{id}")
    typer.echo(json.dumps(found) if as_json else told(found))


def told(rollout: dict[str, Any]) -> str:
    """The rollout as text."""
    cause = f" ({rollout['cause']})" if rollout["cause"] else ""
    reason = f": {rollout['reason']}" if rollout["reason"] else ""
    lines = [
        f"rollout {rollout['id']} of task {rollout['task_id']}, attempt {rollout['attempt']}",
        f"{rollout['status']}{cause}{reason}",
        f"session {rollout['session_id'] or 'none'}",
        *(f"reward {one['value']:g} ({one['scope']}, by {one['source']})" for one in rollout["rewards"]),
    ]
    return "\n".join([*lines, "", rollout["evaluation"] or "its evaluator saw nothing"])
