"""REVES: wrong attempts that were mended become tasks: to repair them, and to tell right from wrong.

Of tasks that were wrong at first and solved within `RETRIES` retries, each retry gives two:

    repair    the problem, the last wrong answer and "incorrect"; the first checker pays
    verify    the problem and the new answer; "True" or "False" pays

GRPO on the mix (`rolltap train --recipe grpo`), then the same with the policy that came of it.
"""

from dataclasses import dataclass
from itertools import pairwise

from home import Home, Session, run

from rolltap.types import Task

RETRIES = 8
PROBLEMS = {"largest": ("Which is larger, 9.9 or 9.11?", "9.9"), "hopeless": ("Name the last prime.", "none at all")}


def reply(prompt):
    """The stand-in: right about 9.9 at its third try, and a verifier that always says True."""
    if "Is it right?" in prompt.text:
        return "True"
    if "last prime" in prompt.text:
        return "7"
    return "9.9" if prompt.text.count("incorrect") >= 2 or "Your last answer" in prompt.text else "9.11"


@dataclass(frozen=True)
class Mined:
    """A task that a retry gave: its prompt, and the answer that pays."""

    kind: str
    prompt: str
    answer: str


def mine(problem: str, answer: str, attempts: list[str]) -> list[Mined]:
    """Attempts wrong, wrong, right → two repairs, and two verifications whose answers are False and True."""
    if attempts[0] == answer or attempts[-1] != answer:
        return []
    mined = []
    for last, new in pairwise(attempts):
        mined.append(Mined("repair", f"{problem}\nYour last answer, {last}, is incorrect. Answer again.", answer))
        mined.append(Mined("verify", f"{problem}\nAnswer: {new}. Is it right? True or False.", str(new == answer)))
    return mined


async def main(home: Home) -> dict[str, list[str]]:
    """The mined tasks by kind, each with the mean reward of its group."""
    tried: dict[str, list[str]] = {}

    async def solve(session: Session) -> float:
        problem, answer = PROBLEMS[name]
        attempts = [await session.ask(problem)]
        while attempts[-1] != answer and len(attempts) <= RETRIES:
            attempts.append(await session.say("That is incorrect. Try again."))
        tried[name] = attempts
        return float(attempts[-1] == answer)

    for name in PROBLEMS:
        await home.group(Task(name, PROBLEMS[name][0], tags=("solve",)), solve, n=1)
    found: dict[str, list[str]] = {"repair": [], "verify": []}
    for name, attempts in tried.items():
        for number, one in enumerate(mine(*PROBLEMS[name], attempts)):

            async def answer(session: Session, one: Mined = one) -> float:
                return float(await session.ask(one.prompt) == one.answer)

            task = Task(f"{name}-{one.kind}-{number}", one.prompt, {"checker": name}, (one.kind,))
            rewards = [outcome.reward for outcome in await home.group(task, answer, n=2)]
            found[one.kind].append(f"{one.answer}: {sum(rewards) / len(rewards):g}")
    return found


if __name__ == "__main__":
    run(main)
