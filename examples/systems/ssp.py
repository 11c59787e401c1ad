"""SSP: a proposer writes questions from documents, solvers answer them, and both are trained in one run.

    propose    a group of one: a question and its answer from a document that the proposer has searched
    check      a question is kept if it can be answered from the proposer's document among `NOISE` others (frozen model)
    solve      a group on the question; each right answer pays 1
    pay        the proposer gets `proposer_reward` of the solvers' accuracy; 0 for no question
    reuse      where no question came, one of the pool is played; the pool is cleared every `KEPT` rounds

`rolltap train --recipe ssp` leases both kinds of groups.
"""

import random

from home import Home, Session, run

from rolltap.trainer_client.recipes.papers.ssp import proposer_reward
from rolltap.types import Task

NOISE, KEPT = 2, 10
DOCUMENTS = {
    "river": "The river Lonn is 412 km long.",
    "tower": "The tower of Abel was built in 1874.",
    "moss": "Moss has no roots.",
    "fog": "Fog is a cloud on the ground.",
}
SURE = {"Which year was the tower of Abel built?": "1874", "How long is the river Lonn, in km?": "412"}


def reply(prompt):
    """The stand-in: it proposes two questions, gives up on the others, and as a solver knows the tower only."""
    text = prompt.text
    if "Write a question" in text:
        found = next((question for question, answer in SURE.items() if answer in text), "")
        return f"Q: {found} A: {SURE[found]}" if found else "I can't think of one."
    if "Documents:" in text:
        return next((answer for question, answer in SURE.items() if question in text and answer in text), "unknown")
    return "1874" if "tower" in text else "400"


def read_question(said: str) -> tuple[str, str] | None:
    """`Q: ... A: ...` → question and answer; None for anything else."""
    question, found, answer = said.removeprefix("Q: ").rpartition(" A: ")
    return (question.strip(), answer.strip()) if said.startswith("Q: ") and found and question.strip() else None


async def is_answerable(home: Home, question: str, answer: str, source: str, drawn: random.Random) -> bool:
    """Whether a frozen model answers it from its document, which stands among others: nothing else gives it away."""
    others = drawn.sample([one for one in DOCUMENTS if one != source], NOISE)
    shown = drawn.sample([DOCUMENTS[one] for one in (source, *others)], NOISE + 1)
    checker = await home.session(checks="questions")
    return await checker.ask("Documents:\n" + "\n".join(shown) + f"\n{question}") == answer


async def main(home: Home, rounds: int = 3, seed: int = 0) -> list[dict[str, object]]:
    """Of each round: the question that was played, the solvers' accuracy, and what the proposer got."""
    drawn, pool = random.Random(seed), list[tuple[str, str]]()
    played: list[dict[str, object]] = []
    for number in range(rounds):
        if number % KEPT == 0:
            pool.clear()
        source = list(DOCUMENTS)[number % len(DOCUMENTS)]
        story: dict[str, object] = {"question": None, "accuracy": None}

        async def solve(question: str, answer: str, number: int = number) -> float:
            async def attempt(session: Session) -> float:
                return float(await session.ask(question) == answer)

            outcomes = await home.group(Task(f"solve-{number}", question, tags=("solver",)), attempt)
            return sum(one.reward for one in outcomes) / len(outcomes)

        async def propose(session: Session, source: str = source, story: dict[str, object] = story) -> float:
            found = read_question(await session.ask(f"Write a question and its answer from: {DOCUMENTS[source]}"))
            own = found is not None and await is_answerable(home, *found, source, drawn)
            if found is not None and own:
                pool.append(found)
            played_now = found if own else (drawn.choice(pool) if pool else None)
            accuracy = await solve(*played_now) if played_now is not None else None
            story |= {"question": played_now and played_now[0], "accuracy": accuracy}
            return proposer_reward(accuracy if own else None)

        (outcome,) = await home.group(Task(f"propose-{number}", "Propose.", tags=("proposer",)), propose, n=1)
        played.append({**story, "proposer": outcome.reward})
    return played


if __name__ == "__main__":
    run(main)
