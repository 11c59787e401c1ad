"""ARPO: forks where the policy is unsure after a tool's answer, and pays a shared beginning by all that came of it.

Each attempt asks, gets a tool's answer, and replies. The rise of the entropy over the reply's first tokens, against the
attempt's first reply, says how likely a fork is: BASE + WEIGHT rise. Over THRESHOLD the rollout is forked before that
reply: the forks continue the very same tokens and sample it anew. The recipe `arpo` gives the shared beginning the mean
advantage of its continuations. (The scripted engine's log-probs say nothing, so here every attempt is forked.)
"""

import asyncio

from home import Home, Outcome, Session, run

from rolltap.types import Task

QUESTION, TOOL = "How many moons has Mars? Search.", "Result: two, says one page; one, says another."
FIRST, FORKS = 8, 2
BASE, WEIGHT, THRESHOLD = 0.5, 0.2, 0.3
ANSWERS = ("Two.", "Perhaps one.", "Perhaps one, or more, who knows.")


def reply(prompt):
    """The stand-in: it knows how to search; of conflicting results it makes something each time it is asked."""
    if "Result:" not in prompt.text:
        return "search: moons of Mars"
    reply.asked += 1
    return ANSWERS[reply.asked % len(ANSWERS)]


reply.asked = 0


async def surprise(home: Home, call: str) -> float:
    """The mean of -log p over the reply's first tokens: an estimate of the entropy, from the tokens that were drawn."""
    tokens = (await home.client.get(f"/read/calls/{call}/tokens"))["tokens"]
    values = [-token["logprob"] for token in tokens if token["sampled"]][:FIRST]
    return sum(values) / len(values)


async def main(home: Home, n: int = 2) -> dict[str, object]:
    group = await home.client.open_group(Task("moons", QUESTION), policy="tiny", n=n)
    paid: list[tuple[Outcome, str]] = []

    async def answer(session: Session) -> float:
        return float((await session.say(TOOL)).startswith("Two"))

    async def first(rollout: str) -> None:
        async def play(session: Session) -> float:
            await session.ask(QUESTION)
            asked, reward = list(session.history), await answer(session)
            before, after = [await surprise(home, call) for call in session.calls]
            if BASE + WEIGHT * (after - before) > THRESHOLD:
                forked = await home.client.fork_rollout(rollout, session.calls[1], at=0, n=FORKS)
                mine = [one for one in forked.rollouts if one.parent and one.parent.rollout_id == rollout]
                await asyncio.gather(*(again(one.id, asked) for one in mine))
            return reward

        paid.append((await home.attempt(rollout, play), ""))

    async def again(rollout: str, asked: list) -> None:
        async def play(session: Session) -> float:
            session.history = asked
            return await answer(session)

        paid.append((await home.attempt(rollout, play), "fork"))

    await asyncio.gather(*(first(rollout) for rollout in group.rollout_ids))
    return {
        "rollouts": len(paid),
        "forks": sum(kind == "fork" for _, kind in paid),
        "rewards": sorted(outcome.reward for outcome, _ in paid),
        "group": group.id,
    }


if __name__ == "__main__":
    run(main)
