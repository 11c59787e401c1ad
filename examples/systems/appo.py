"""APPO: forks inside replies, where the policy is unsure and has come to favour what followed.

    score_t = z(entropy_t) z(gain_t)    gain_t = exp(sum over k >= t of log pi - log mu), within 1 - CLIP and 1 + CLIP

z is over the tokens of a rollout, pi the policy as its engine serves it now, mu as it was when it sampled. The places
of the highest scores among the group's first attempts are forked behind their token; the recipe `appo` pays each
beginning by its forks, which carry no loss themselves. Scores and places are the released code's. The entropy is over
the candidates that the policy records (`top_logprobs`); without them, -log p of the token that was drawn stands for it.
(The scripted engine's log-probs say nothing, so here the places are arbitrary.)
"""

import asyncio
import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from home import Home, Outcome, Session, run

from rolltap.types import Task

QUESTION = "How many moons has Mars? Think, then answer."
ANSWERS = ("Phobos is one, Deimos another: two.", "Phobos is one: one.")
ENDINGS = (" ... and that makes two.", " ... or only one.")
CLIP, PLACES = 0.2, 2


class Place(NamedTuple):
    """Where a rollout may be forked: behind the token `at - 1` of a call's reply. `sure`: both factors are positive."""

    sure: bool
    score: float
    rollout: str
    call: str
    at: int


def reply(prompt):
    """The stand-in: it answers rightly each second time, and ends a reply that it finds begun as often."""
    reply.asked += 1
    begun = not prompt.text.rstrip().endswith(("assistant", "</think>"))
    return (ENDINGS if begun else ANSWERS)[reply.asked % 2]


reply.asked = 0


def scores(entropy: Sequence[float], ratios: Sequence[float]) -> list[tuple[bool, float]]:
    """Of each token, whether both factors are positive, and their product; `ratios` are log pi - log mu."""
    gains = [math.exp(min(max(sum(ratios[at:]), -20), 20)) for at in range(len(ratios))]
    unsure, gained = z(entropy), z([min(max(gain, 1 - CLIP), 1 + CLIP) for gain in gains])
    return [(a > 0 and b > 0, a * b) for a, b in zip(unsure, gained, strict=True)]


def z(values: Sequence[float]) -> list[float]:
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    return [(value - mean) / (deviation + 1e-6) for value in values]


def entropy(token: Mapping[str, Any]) -> float:
    """Of the recorded candidates of a token; else -log p of what was drawn."""
    candidates = [each["logprob"] for each in token["top"]]
    return -sum(math.exp(one) * one for one in candidates) if candidates else -token["logprob"]


async def places(home: Home, rollout: str, call: str) -> list[Place]:
    """Every place of a reply, but behind blanks and behind its end."""
    recorded = await home.client.get(f"/read/calls/{call}/tokens")
    start, tokens = recorded["prompt_tokens"], recorded["tokens"]
    now = await home.score("tiny", [token["id"] for token in tokens], start)
    own = tokens[start:]
    found = scores(
        [entropy(token) for token in own], [new - token["logprob"] for new, token in zip(now, own, strict=True)]
    )
    return [
        Place(sure, score, rollout, call, at)
        for at, (token, (sure, score)) in enumerate(zip(own, found, strict=True), 1)
        if token["text"].strip() and at < len(own)
    ]


async def riddle(session: Session) -> float:
    return float((await session.ask(QUESTION)).endswith("two."))


async def main(
    home: Home,
    n: int = 2,
    task: Task = Task("moons", QUESTION),  # noqa: B008 - frozen
    answer: Callable[[Session], Awaitable[float]] = riddle,
) -> dict[str, object]:
    group = await home.client.open_group(task, policy="tiny", n=n)
    paid: list[tuple[Outcome, str]] = []
    known: list[Place] = []
    everyone = asyncio.Barrier(n)

    async def first(session: Session, rollout: str) -> float:
        reward = await answer(session)
        known.extend(await places(home, rollout, session.calls[0]))
        if await everyone.wait() == 0:  # the group is open as long as this attempt is
            await asyncio.gather(*(fork(place) for place in sorted(known, reverse=True)[:PLACES]))
        return reward

    async def fork(place: Place) -> None:
        mark = f"{place.call}:{place.at}"
        forked = await home.client.fork_rollout(place.rollout, place.call, at=place.at, id=mark)
        own = next(one.id for one in forked.rollouts if one.parent and one.parent.fork == mark)
        paid.append((await home.attempt(own, answer), "fork"))

    async def attempt(rollout: str) -> None:
        paid.append((await home.attempt(rollout, lambda session: first(session, rollout)), ""))

    await asyncio.gather(*(attempt(rollout) for rollout in group.rollout_ids))
    return {
        "rollouts": len(paid),
        "forks": sum(kind == "fork" for _, kind in paid),
        "places": sorted(known, reverse=True)[:PLACES],
        "rewards": sorted(outcome.reward for outcome, _ in paid),
        "group": group.id,
    }


if __name__ == "__main__":
    run(main)
