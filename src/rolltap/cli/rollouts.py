"""`rolltap rollout`: how one rollout ended, and what its evaluator saw."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from rolltap.cli.common import ConfigOption, JsonOption, UrlOption, connect, one_line_errors
from rolltap.cli.screen import say
from rolltap.types import UNPROTECTED


@one_line_errors
def rollout(
    id: Annotated[str, typer.Argument(help="a rollout's id")],
    as_json: JsonOption = False,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Shows a rollout's result, its rewards, and the text that its evaluator saw."""
    details = connect("admin", config, url).call("GET", f"/rollouts/{id}")
    say(json.dumps(details) if as_json else describe(details))


def describe(rollout: dict[str, Any]) -> str:
    """The rollout as text."""
    cause = f" ({rollout['cause']})" if rollout["cause"] else ""
    reason = f": {rollout['reason']}" if rollout["reason"] else ""
    lines = [
        f"rollout {rollout['id']} of task {rollout['task_id']}, attempt {rollout['attempt']}",
        f"{rollout['status']}{cause}{reason}",
        f"session {rollout['session_id'] or 'none'}",
        *(f"reward {reward['value']:g} ({reward['scope']}, by {reward['source']})" for reward in rollout["rewards"]),
        *tampering_lines(rollout["tampering"]),
        *unprotected_lines(rollout["rewards"]),
    ]
    tried = [f"  {act['kind']}: {act['detail']}" for act in rollout["tampering_acts"]]
    return "\n".join([*lines, *tried, "", rollout["evaluation"] or "its evaluator saw nothing"])


def unprotected_lines(rewards: list[dict[str, Any]]) -> list[str]:
    """Why code of the agent could have written the rewards, in a line; none if it could not."""
    reasons = [each["detail"][UNPROTECTED] for each in rewards if UNPROTECTED in each["detail"]]
    return [f"unprotected: code of the agent could have written its reward, as {reason}" for reason in reasons[:1]]


def tampering_lines(counts: dict[str, int]) -> list[str]:
    """What the agent tried, in a line; none if it tried nothing."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in counts.items())
    return [f"tampering: {kinds}"] if kinds else []
