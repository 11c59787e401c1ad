"""SLEA-RL: at every step the agent is shown experiences of like situations, from a library that the same model writes.

    show     the `STRATEGIES` best strategies and `WARNINGS` best warnings whose situation is like the step's
    write    of each rollout the model says what it learned: a strategy where it was right, a warning where it was wrong
    admit    a new experience enters with its rollout's reward as score; one like it stays only if it scores less

What is shown is part of the agent's prompt, so it is recorded as context and carries no loss. `rolltap train --recipe
slea_rl` leases the groups and compares the turns that saw like situations.
"""

from dataclasses import dataclass, field
from difflib import SequenceMatcher

from home import Home, Session, run

from rolltap.types import Task

STRATEGIES, WARNINGS = 2, 1
LIKE = 0.6
"""The least share of characters that two situations have in common, in order (the paper's clusters use .85)."""
DOORS = {"red": "There is a red door with a lock.", "blue": "There is a blue door with a lock."}


def reply(prompt):
    """The stand-in: it kicks, unless an experience says that the key opens; asked what it learned, it says so."""
    if "What did you learn?" in prompt.text:
        return "Use the key." if "It opens." in prompt.text else "Kicking does not open it."
    return "key" if "Use the key." in prompt.text or "Kicking does not" in prompt.text else "kick"


@dataclass(frozen=True)
class Experience:
    situation: str
    lesson: str
    score: float


@dataclass
class Library:
    """Strategies (`score` above 0) and warnings."""

    kept: list[Experience] = field(default_factory=list)

    def shown(self, situation: str) -> list[str]:
        """The best lessons of like situations, strategies first."""
        near = [one for one in self.kept if _like(one.situation, situation) >= LIKE]
        ranked = sorted(near, key=lambda one: (one.score, _like(one.situation, situation)), reverse=True)
        strategies = [one.lesson for one in ranked if one.score > 0][:STRATEGIES]
        return strategies + [one.lesson for one in ranked if one.score <= 0][:WARNINGS]

    def admit(self, new: Experience) -> bool:
        """Takes it, in the place of one that says the same of a like situation and scores less."""
        same = [one for one in self.kept if one.lesson == new.lesson and _like(one.situation, new.situation) >= LIKE]
        if any(one.score >= new.score for one in same):
            return False
        self.kept = [*(one for one in self.kept if one not in same), new]
        return True


def _like(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()


async def main(home: Home, epochs: int = 3) -> dict[str, list[float]]:
    """The mean reward of each epoch, by door, and how many experiences are kept after it."""
    library, means = Library(), {name: [] for name in DOORS} | {"kept": []}
    for epoch in range(epochs):
        learned: list[Experience] = []
        for name, situation in DOORS.items():

            async def play(session: Session, situation: str = situation, learned: list[Experience] = learned) -> float:
                lessons = library.shown(situation)
                hints = "Experiences:\n" + "\n".join(lessons) + "\n" if lessons else ""
                action = await session.ask(f"{hints}{situation} What do you do?")
                opened = float(action == "key")
                lesson = await session.say(f"{'It opens.' if opened else 'Nothing happens.'} What did you learn?")
                learned.append(Experience(situation, lesson, opened))
                return opened

            outcomes = await home.group(Task(f"{name}-{epoch}", situation, tags=(name,)), play, n=2)
            means[name].append(sum(one.reward for one in outcomes) / len(outcomes))
        for one in learned:  # at an epoch's end, so that a group's rollouts are shown the same
            library.admit(one)
        means["kept"].append(float(len(library.kept)))
    return means


if __name__ == "__main__":
    run(main)
