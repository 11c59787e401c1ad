"""ASTRA: trajectories from walks over a tool graph for SFT, then arenas with rules as checkers for RL.

1. Tools are the nodes, and an edge says that one's result is another's argument. A walk is a task whose answer is
   known; the model plays it, and what it solved leaves as an `sft` export.
2. An arena is a question split into sub-questions, each with a rule that checks its answer by code. Rewards are by turn
   (`call:<id>`) and their mean for the rollout: `rolltap train --recipe turn_grpo`.
"""

import random
from collections.abc import Mapping
from pathlib import Path

from home import Home, Session, run

from rolltap.types import Task

TOOLS = {"capital": {"France": "Paris", "Italy": "Rome"}, "river": {"Paris": "Seine", "Rome": "Tiber"}}
EDGES = {"capital": ["river"], "river": []}


def reply(prompt):
    """The stand-in: it looks things up, but doesn't know the Tiber unless it was told Rome."""
    question = prompt.last.rsplit("What is the ", 1)[1]
    tool, _, of = question.split("?")[0].partition(" of ")
    if of.startswith("the capital of "):
        of = TOOLS["capital"][of.removeprefix("the capital of ")]
    return TOOLS[tool][of] if of != "Rome" or "Rome" in prompt.text else "unknown"


def walk(drawn: random.Random) -> list[tuple[str, str, str]]:
    """Tool, argument and result of each step along the graph."""
    tool = "capital"
    argument = drawn.choice(sorted(TOOLS[tool]))
    steps = []
    while tool:
        steps.append((tool, argument, TOOLS[tool][argument]))
        argument, tool = steps[-1][2], next(iter(EDGES[tool]), "")
    return steps


async def main(home: Home, out: Path = Path("out-astra"), count: int = 4) -> dict[str, float]:
    walks = [walk(random.Random(seed)) for seed in range(count)]

    async def arena(session: Session) -> Mapping[str, float]:
        """A sub-question a turn; a rule checks each."""
        rewards: dict[str, float] = {}
        for tool, argument, result in steps:
            said = await session.say(f"What is the {tool} of {argument}?")
            rewards[f"call:{session.calls[-1]}"] = float(said == result)
        return {"rollout": sum(rewards.values()) / len(rewards), **rewards}

    async def taught(session: Session) -> float:
        said = await session.ask(f"What is the river of the capital of {steps[0][1]}?")
        return float(said == steps[-1][2])

    means: dict[str, float] = {}
    for stage, play in (("taught", taught), ("arena", arena)):
        rewards = []
        for number, steps in enumerate(walks):
            task = Task(f"{stage}-{number}", f"The river of {steps[0][1]}", {"walk": steps}, (stage,))
            rewards += [one.reward for one in await home.group(task, play, n=2)]
        means[stage] = sum(rewards) / len(rewards)
    await home.export(out, "sft", "tag=taught and reward>=1")
    return means


if __name__ == "__main__":
    run(main)
