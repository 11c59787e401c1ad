"""AgenticQwen: two flywheels that make harder tasks of what the record holds.

    errors      failed rollouts are read back; a frozen role writes variants of their tasks, checked by execution
    branches    a task that is always solved grows: one of its steps fails, or the user changes his mind

and the next round of rollouts plays them. Trained by `rolltap train --recipe grpo`; the tags say which round and which
flywheel a task is of, so a curriculum may choose by them.
"""

import re

from home import Home, Outcome, Session, run

from rolltap.types import Task


def reply(prompt):
    """The stand-in: it adds well, forgets to carry, and as a writer changes one number."""
    if "Write a variant" in prompt.text:
        return "Add 27 and 36."
    if "Add a branch" in prompt.text:
        return "Add 2 and 3. Then the user says: add 4 more."
    numbers = [int(digits) for digits in re.findall(r"\d+", prompt.last)]
    return str(sum(numbers) - (10 if any(number > 9 for number in numbers) else 0))


def answer(problem: str) -> str:
    """What is right, by execution and not by a model."""
    return str(sum(int(digits) for digits in re.findall(r"\d+", problem)))


async def play(home: Home, problem: str, *tags: str) -> list[Outcome]:
    async def attempt(session: Session) -> float:
        return float(await session.ask(problem) == answer(problem))

    return await home.group(Task(problem[:24], problem, {"answer": answer(problem)}, tags), attempt, n=2)


async def harder(home: Home, outcomes: list[Outcome]) -> str:
    """A new task of one that was played, by what the record says of it."""
    detail = await home.client.get(f"/read/rollouts/{outcomes[0].rollout}")
    group = await home.client.get(f"/read/groups/{detail['rollout']['group_id']}")
    problem = group["task"]["instruction"]
    failed = any(one.reward < 1 for one in outcomes)
    writer = await home.session(flywheel="errors" if failed else "branches")
    return await writer.ask(f"{'Write a variant of' if failed else 'Add a branch to'}: {problem}")


async def main(home: Home, rounds: int = 2) -> dict[str, float]:
    """Each task that was played, with its mean reward."""
    problems, rewards = {"seed": ["Add 2 and 3.", "Add 17 and 25."]}, {}
    for number in range(rounds):
        following: dict[str, list[str]] = {}
        for flywheel, tasks in problems.items():
            for problem in tasks:
                outcomes = await play(home, problem, f"round:{number}", f"flywheel:{flywheel}")
                rewards[problem] = sum(one.reward for one in outcomes) / len(outcomes)
                kind = "errors" if rewards[problem] < 1 else "branches"
                following.setdefault(kind, []).append(await harder(home, outcomes))
        problems = following
    return rewards


if __name__ == "__main__":
    run(main)
