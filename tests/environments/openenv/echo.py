"""An OpenEnv environment: say the word backwards (run in an environment that has openenv)."""

from typing import Any

from openenv.core.env_server.interfaces import Environment  # type: ignore[import-not-found]
from openenv.core.env_server.types import Action, Observation, State  # type: ignore[import-not-found]

WORDS = ("drawer", "stressed", "parts")


class Word(Action):  # type: ignore[misc]
    word: str


class Hint(Observation):  # type: ignore[misc]
    text: str


class Backwards(Environment[Word, Hint, State]):  # type: ignore[misc]
    """You say words backwards."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self.word, self.tries = WORDS[(seed or 0) % len(WORDS)], 0
        return Hint(text=f"Say {self.word} backwards.")

    def step(self, action: Word, timeout_s: float | None = None, **_: Any) -> Hint:
        self.tries += 1
        right = action.word == self.word[::-1]
        return Hint(text="Right." if right else "No.", reward=1.0 / self.tries if right else 0.0, done=right)

    @property
    def state(self) -> State:
        return State(step_count=self.tries)
