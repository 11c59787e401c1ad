"""User-oriented dialogues: a simulated user with several wishes, whose dialogues may go on from any stored state.

One user asks for one thing after the other, so that dialogues grow long. Each turn's state is in the record: a task
with `fork` goes on behind any stored call, with another wish from there on; the tokens up to there are context. What
satisfied the user leaves as an `sft` export.
"""

from collections.abc import Sequence
from pathlib import Path

from home import Home, Session, run

from rolltap.types import Task

WISHES = ["a table for two", "by the window", "and a cake"]


def reply(prompt):
    """The stand-in: a user who reads his list, and a clerk who can't do cakes."""
    if "You are a guest" in prompt.text:
        return f"I'd like {prompt.text.rsplit('Next wish: ', 1)[1].split('.')[0]}."
    return "Sorry, no." if "cake" in prompt.last else "Certainly."


class Restaurant:
    """The stand-in's house. Another has other wishes, and meets them otherwise (`tiny.py`)."""

    wishes: Sequence[str] = WISHES
    another = "by the door"
    satisfied = 1.0
    """From this share of met wishes on a dialogue is exported."""

    async def meet(self, home: Home, session: Session, wish: str) -> float:
        """1 if a guest's wish was met."""
        user = await home.session(role="user")
        words = await user.ask(f"You are a guest in a restaurant. Next wish: {wish}.")
        return float((await session.say(words)) == "Certainly.")


async def main(
    home: Home, out: Path = Path("out-user-dialogue"), house: Restaurant | None = None, n: int = 1
) -> dict[str, object]:
    house = house or Restaurant()
    states: dict[str, list[dict]] = {}

    async def serve(session: Session, wishes: Sequence[str]) -> float:
        """The share of wishes that were met. The dialogue behind each call is kept."""
        met = 0.0
        for wish in wishes:
            met += await house.meet(home, session, wish)
            states[session.calls[-1]] = list(session.history)
        return met / len(wishes)

    async def first(session: Session) -> float:
        return await serve(session, house.wishes)

    (one, *_) = await home.group(Task("evening", "Serve the guest."), first, n=n)
    calls = (await home.client.get(f"/read/sessions/{one.session}"))["calls"]

    async def again(session: Session) -> float:
        session.history = list(states[calls[1]["id"]])
        return await serve(session, [house.another])

    spec = {"fork": {"rollout": one.rollout, "call": calls[1]["id"]}}
    (other, *_) = await home.group(Task("evening", "Serve the guest.", spec), again, n=n)
    await home.export(out, "sft", f"policy=tiny and reward>={house.satisfied}", reader="trl")
    return {"first": one.reward, "again": other.reward, "goes on": other.rollout}


if __name__ == "__main__":
    run(main)
