"""TRACE: attempts go where the outcome is least certain: to prompts, and to the beginnings of attempts under way.

    p        a predictor's probability that an attempt succeeds, at a prompt or behind some of its turns
    roots    each round the ROOTS tasks with the largest p (1 - p) get a group
    forks    when all of a round's attempts have had a turn, FORKS more go on from where p (1 - p) is largest
    learn    each outcome teaches the predictor about the prompt and the beginning that led to it

The recipe `arpo` gives the tokens of a shared beginning the mean advantage of its continuations. From the paper's
abstract: two stages and one predictor for both, by the chance of mixed outcomes. The predictor (here a logistic
regression over tag, turn, what the tool found and the tag's earlier outcomes) is ours, and so is the credit: the
paper's equations for both are not known to us.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from home import Home, Session, run

from rolltap.types import Task

TASKS = tuple(
    Task(f"{tag}-{at}", f"A {tag} riddle, number {at}. Search.", tags=(tag,))
    for tag in ("easy", "hard", "fair")
    for at in (1, 2)
)
ROUNDS, ROOTS, ATTEMPTS, FORKS = 4, 2, 2, 2
RATE, PASSES = 0.5, 20
Features = Mapping[str, float]


def reply(prompt):
    """The stand-in: it solves easy riddles, no hard ones, and each second time a fair one with a clue."""
    if "Found:" not in prompt.text:
        return "search"
    if "fair" not in prompt.text or "clue" not in prompt.text:
        return "right" if "easy" in prompt.text else "wrong"
    reply.asked += 1
    return ("right", "wrong")[reply.asked % 2]


reply.asked = 0


@dataclass
class Predictor:
    """A logistic regression that learns from all outcomes so far."""

    seen: list[tuple[Features, float]] = field(default_factory=list)
    weights: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __call__(self, features: Features) -> float:
        return 1 / (1 + math.exp(-sum(self.weights[name] * value for name, value in features.items())))

    def uncertainty(self, features: Features) -> float:
        p = self(features)
        return p * (1 - p)

    def learn(self, outcomes: Sequence[tuple[Features, float]]) -> None:
        self.seen.extend(outcomes)
        for features, outcome in self.seen * PASSES:
            error = outcome - self(features)
            for name, value in features.items():
                self.weights[name] += RATE * error * value


@dataclass
class Beginning:
    """An attempt that has had its first turn, what its tool had found, and the outcomes of those that went on."""

    task: Task
    rollout: str
    call: str
    history: list[dict[str, Any]]
    found: str
    outcomes: list[float] = field(default_factory=list)


class Riddles:
    """The stand-in's game. Another has the same two turns (`tiny.py`)."""

    tasks = TASKS

    async def begin(self, session: Session, task: Task, at: int) -> str:
        """The first turn of a group's attempt `at`, and what its tool found."""
        await session.ask(task.instruction)
        return "nothing" if at else "a clue"

    async def end(self, session: Session, one: Beginning) -> float:
        """What a beginning came to, 0 or 1."""
        return float(await session.say(f"Found: {one.found}.") == "right")


@dataclass
class Rounds:
    home: Home
    game: Riddles
    predictor: Predictor = field(default_factory=Predictor)
    earlier: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    forked: list[str] = field(default_factory=list)
    """Of each fork, its task's tag and what the tool had found."""

    def features(self, task: Task, found: str | None = None) -> Features:
        """What is known at a prompt, or behind the first turn, by which the tool had `found` something."""
        outcomes = self.earlier[task.tags[0]]
        known = {f"tag {task.tags[0]}": 1.0, "earlier": sum(outcomes) / len(outcomes) if outcomes else 0.5}
        return known if found is None else {**known, "turn 1": 1.0, f"{task.tags[0]} found {found}": 1.0}

    async def play(self, tasks: Sequence[Task]) -> list[str]:
        """A round: the groups of these tasks."""
        begun: list[Beginning] = []
        everyone = asyncio.Barrier(len(tasks) * ATTEMPTS)
        groups = [await self.home.client.open_group(task, policy="tiny", n=ATTEMPTS, tags=task.tags) for task in tasks]

        async def attempt(task: Task, rollout: str, at: int) -> None:
            async def plays(session: Session) -> float:
                found = await self.game.begin(session, task, at)
                begun.append(mine := Beginning(task, rollout, session.calls[0], session.history, found))
                chosen = self.spread(begun) if await everyone.wait() == 0 else ()
                forks = [(one, await self.fork(one)) for one in chosen]
                await everyone.wait()  # no attempt ends before the forks are there: a complete group takes none
                await asyncio.gather(*(self.again(one, fork) for one, fork in forks))
                return await self.ends(mine, session)

            await self.home.attempt(rollout, plays)

        await asyncio.gather(
            *(
                attempt(task, rollout, at)
                for task, group in zip(tasks, groups, strict=True)
                for at, rollout in enumerate(group.rollout_ids)
            )
        )
        self.learn(begun)
        return [group.id for group in groups]

    def spread(self, begun: Sequence[Beginning]) -> list[Beginning]:
        """The beginnings that the round's forks go on from; each fork makes its beginning less worth another one."""
        chosen: list[Beginning] = []
        for _ in range(FORKS):
            chosen.append(max(begun, key=lambda one: self.worth(one) / (1 + chosen.count(one))))
        return chosen

    def worth(self, one: Beginning) -> float:
        return self.predictor.uncertainty(self.features(one.task, one.found))

    async def fork(self, one: Beginning) -> str:
        """A rollout that goes on from a beginning."""
        mark = f"{one.rollout}:{len(self.forked)}"
        self.forked.append(f"{one.task.tags[0]}, {one.found}")
        group = await self.home.client.fork_rollout(one.rollout, one.call, id=mark)
        return next(each.id for each in group.rollouts if each.parent and each.parent.fork == mark)

    async def again(self, one: Beginning, rollout: str) -> None:
        async def plays(session: Session) -> float:
            session.history = list(one.history)
            return await self.ends(one, session)

        await self.home.attempt(rollout, plays)

    async def ends(self, one: Beginning, session: Session) -> float:
        one.outcomes.append(await self.game.end(session, one))
        return one.outcomes[-1]

    def learn(self, begun: Sequence[Beginning]) -> None:
        outcomes = [
            (features, outcome)
            for one in begun
            for features in (self.features(one.task), self.features(one.task, one.found))
            for outcome in one.outcomes
        ]
        for one in begun:
            self.earlier[one.task.tags[0]].extend(one.outcomes)
        self.predictor.learn(outcomes)


async def main(home: Home, game: Riddles | None = None) -> dict[str, object]:
    rounds, played, groups = Rounds(home, game or Riddles()), [], []
    every = rounds.game.tasks
    await rounds.play(every)  # the predictor's first data
    forked = len(rounds.forked)
    for _ in range(ROUNDS):
        tasks = sorted(every, key=lambda task: -rounds.predictor.uncertainty(rounds.features(task)))[:ROOTS]
        played.append([task.id for task in tasks])
        groups += await rounds.play(tasks)
    return {
        "roots": played,
        "forks": rounds.forked[forked:],
        "predicted": {tag: rounds.predictor(rounds.features(task)) for task in every for tag in task.tags},
        "groups": groups,
    }


if __name__ == "__main__":
    run(main)
