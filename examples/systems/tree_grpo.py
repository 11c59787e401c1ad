"""Tree-GRPO: attempts grow into trees, whose branches are paid by their group and by their tree.

    roots    a task's first TREES attempts play all turns
    grow     ROUNDS times, every tree is forked BRANCHES times at a turn of one of its attempts, both drawn at random
    paid     the recipe `tree_grpo`: within the group and within the tree; a beginning by all that came of it

A fork samples the drawn turn anew (`at = 0`), so its reward says what that turn was worth. Places are drawn as in the
paper, among turns; a branch of a branch is in the same tree.
"""

import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from home import Home, Session, run

from rolltap.types import Task

TREES, BRANCHES, ROUNDS = 2, 2, 2
SUMS = {"1 + 1": "2", "2 + 3": "5", "4 + 4": "8"}


def reply(prompt):
    """The stand-in: it errs in each third sum."""
    reply.asked += 1
    first, second = re.findall(r"(\d+) \+ (\d+) =", prompt.last)[-1]
    return str(int(first) + int(second) + (reply.asked % 3 == 0))


reply.asked = 0


class Sums:
    """The stand-in's game. Another has other turns (`tiny.py`)."""

    task = Task("sums", "Three sums.")
    turns = len(SUMS)

    async def turn(self, session: Session, number: int) -> float:
        """1 if the turn with this number is done well."""
        asked, answer = list(SUMS.items())[number]
        return float(await session.say(f"{asked} =") == answer)


@dataclass
class Attempt:
    """An attempt, by turn: the history before it, its rollout and call, what it earned. Those before a fork are the
    origin's."""

    tree: int
    histories: list[list[dict]] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    earned: list[float] = field(default_factory=list)

    def until(self, turn: int) -> "Attempt":
        return Attempt(self.tree, self.histories[:turn], self.calls[:turn], self.earned[:turn])


async def main(home: Home, game: Sums | None = None, seed: int = 0) -> dict[str, object]:
    game, chance = game or Sums(), random.Random(seed)
    group = await home.client.open_group(game.task, policy="tiny", n=TREES)
    grown, played = asyncio.Event(), asyncio.Barrier(TREES + 1)
    attempts: list[Attempt] = []
    depths: list[int] = []

    async def play(attempt: Attempt, rollout: str, session: Session, history: Sequence[dict]) -> float:
        session.history = list(history)
        for number in range(len(attempt.calls), game.turns):
            attempt.histories.append(list(session.history))
            attempt.earned.append(await game.turn(session, number))
            attempt.calls.append((rollout, session.calls[-1]))
        attempts.append(attempt)
        return sum(attempt.earned) / game.turns

    async def root(rollout: str, tree: int) -> None:
        async def plays(session: Session) -> float:
            earned = await play(Attempt(tree), rollout, session, ())
            await played.wait()
            await grown.wait()  # the group takes forks as long as an attempt is under way
            return earned

        await home.attempt(rollout, plays)

    async def branch(origin: Attempt, turn: int, mark: str) -> None:
        of, call = origin.calls[turn]
        forked = await home.client.fork_rollout(of, call, at=0, id=mark)
        rollout = next(one.id for one in forked.rollouts if one.parent and one.parent.fork == mark)
        attempt = origin.until(turn)
        await home.attempt(rollout, lambda session: play(attempt, rollout, session, origin.histories[turn]))

    async def grow() -> None:
        try:
            await played.wait()
            for number in range(ROUNDS):
                places = [
                    (chance.choice([one for one in attempts if one.tree == tree]), chance.randrange(game.turns))
                    for tree in range(TREES)
                    for _ in range(BRANCHES)
                ]
                depths.extend(turn for _, turn in places)
                marks = [f"{number}-{at}" for at in range(len(places))]
                await asyncio.gather(*(branch(*place, mark) for place, mark in zip(places, marks, strict=True)))
        finally:
            grown.set()

    await asyncio.gather(grow(), *(root(each, tree) for tree, each in enumerate(group.rollout_ids)))
    return {
        "rollouts": len(attempts),
        "trees": [[sum(one.earned) / game.turns for one in attempts if one.tree == tree] for tree in range(TREES)],
        "turns": depths,
        "group": group.id,
    }


if __name__ == "__main__":
    run(main)
