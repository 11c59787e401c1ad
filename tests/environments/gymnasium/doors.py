"""A Gymnasium environment in text: a corridor with numbered doors (run in an environment that has gymnasium)."""

from __future__ import annotations

from typing import Any

from gymnasium import Env, spaces  # type: ignore


class Doors(Env):  # type: ignore[misc]
    """One of three doors leads out; each wrong one costs a tenth."""

    observation_space = spaces.Text(100)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.way_out = int(seed or 0) % 3
        return "You stand before three doors.", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == self.way_out:
            return "You are out.", 1.0, True, False, {}
        return "A wall is behind it.", -0.1, False, False, {}
