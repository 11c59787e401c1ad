"""INSPO: a population of instructions that evolves beside the policy; one is drawn a group.

    p(I_j) = softmax(w_j / tau)        w_j follows the mean reward of its groups; the lowest is pruned
    a reflector (frozen) rewrites the best one after the worst replies; the new one stays if a group with it does better

The instruction is context, so nothing of it is trained, and its id stands in the group's tags. How the reward moves w
is a running mean here; the paper's own rule isn't known to us. `rolltap train --recipe grpo` leases the groups.
"""

import math
import random

from home import Home, Session, run

from rolltap.types import Task

QUESTION = "What is 6 times 7?"
FAILURES: list[str] = []
"""Replies without a reward, for the reflector."""


def probabilities(weights: list[float], tau: float = 0.5) -> list[float]:
    """w .5, .3, .1 with tau .5 → .472, .316, .212."""
    shares = [math.exp(weight / tau) for weight in weights]
    return [share / sum(shares) for share in shares]


def reply(prompt):
    """The stand-in for both models: it is right where it is told to answer with digits."""
    if "Improve this instruction" in prompt.text:
        return "Answer with digits only."
    return "42" if "digits" in prompt.text else "forty-two"


async def group(home: Home, name: str, instruction: str) -> float:
    async def play(session: Session) -> float:
        answer = await session.ask([{"role": "system", "content": instruction}, {"role": "user", "content": QUESTION}])
        if answer != "42":
            FAILURES.append(answer)
        return float(answer == "42")

    task = Task(f"sum-{name}", QUESTION, tags=(f"instruction:{name}",))
    outcomes = await home.group(task, play, n=2)
    return sum(one.reward for one in outcomes) / len(outcomes)


async def main(home: Home, rounds: int = 4, seed: int = 0) -> dict[str, float]:
    """The instructions that are left, with their weights."""
    population = {"0": "Answer the question.", "1": "Answer in words.", "2": "Think, then answer."}
    weights, drawn = dict.fromkeys(population, 0.0), random.Random(seed)
    for number in range(rounds):
        (name,) = drawn.choices(list(population), probabilities(list(weights.values())))
        weights[name] += 0.5 * (await group(home, name, population[name]) - weights[name])
        best, worst = max(weights, key=weights.__getitem__), min(weights, key=weights.__getitem__)
        reflector = await home.session(reflects="instructions")
        better = await reflector.ask(f"Improve this instruction: {population[best]} It led to: {FAILURES[-2:]}")
        if better in population.values():
            continue
        fresh = str(len(population) + number)
        reward = await group(home, fresh, better)
        if reward > weights[best]:  # verified before it joins
            population[fresh], weights[fresh] = better, reward
            del population[worst], weights[worst]
    return {population[name]: round(weight, 3) for name, weight in weights.items()}


if __name__ == "__main__":
    run(main)
