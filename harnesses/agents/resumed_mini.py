"""mini-swe-agent that goes on from a trajectory, as a part of its own agent classes.

Needs nothing but the standard library: the release's own Python loads this file from HOME.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class ResumedMini:
    """Put before an agent class of the release, whose `output_path` has the trajectory of an earlier run.

    With `message` that is the next user message; without, the next step follows the trajectory. Commands that no
    result answers, as the run ended there, are answered as not executed. Without a trajectory it begins anew.
    """

    message = ""
    messages: list[dict[str, Any]]
    config: Any
    model: Any
    n_calls: int

    def add_messages(self, *messages: dict[str, Any]) -> list[dict[str, Any]]:
        return super().add_messages(*(messages if self.messages else self._resumed(messages)))  # type: ignore[misc]

    def _resumed(self, beginning: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
        path = Path(self.config.output_path)
        if not path.is_file():
            return list(beginning)
        recorded = json.loads(path.read_text(encoding="utf-8"))
        self.n_calls = recorded["info"]["model_stats"]["api_calls"]
        messages = [message for message in recorded["messages"] if message["role"] != "exit"]
        if messages[-1]["role"] == "assistant":
            variables = self.get_template_vars()  # type: ignore[attr-defined]
            messages += self.model.format_observation_messages(messages[-1], [], variables)
        if self.message:
            messages.append(self.model.format_message(role="user", content=self.message))
        return messages
