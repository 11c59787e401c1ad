"""User-oriented dialogues: a simulated user with several wishes, whose dialogues may go on from any stored state.

One user asks for one thing after the other, so that dialogues grow long. Each turn's state is in the record: a task
with `fork` goes on behind any stored call, with another wish from there on; the tokens up to there are context. What
satisfied the user leaves as an `sft` export.
"""

from pathlib import Path

from home import Home, Session, run

from rolltap.types import Task

WISHES = ["a table for two", "by the window", "and a cake"]


def reply(prompt):
    """The stand-in: a user who reads his list, and a clerk who can't do cakes."""
    if "You are a guest" in prompt.text:
        return f"I'd like {prompt.text.rsplit('Next wish: ', 1)[1].split('.')[0]}."
    return "Sorry, no." if "cake" in prompt.last else "Certainly."


async def serve(home: Home, session: Session, wishes: list[str]) -> float:
    """The share of wishes that were met."""
    met = 0
    for wish in wishes:
        user = await home.session(role="user")
        words = await user.ask(f"You are a guest in a restaurant. Next wish: {wish}.")
        met += (await session.say(words)) == "Certainly."
    return met / len(wishes)


def text_of(message: dict) -> str:
    return "".join(part["text"] for part in message["parts"] if part["kind"] == "text")


async def main(home: Home, out: Path = Path("out-user-dialogue")) -> dict[str, object]:
    async def first(session: Session) -> float:
        return await serve(home, session, WISHES)

    (one,) = await home.group(Task("evening", "Serve the guest."), first, n=1)
    calls = (await home.client.get(f"/read/sessions/{one.session}"))["calls"]
    stored = await home.client.get(f"/read/calls/{calls[1]['id']}")

    async def again(session: Session) -> float:
        said = [*stored["messages"], stored["reply"]]
        session.history = [{"role": one["role"], "content": text_of(one)} for one in said]
        return await serve(home, session, ["by the door"])

    spec = {"fork": {"rollout": one.rollout, "call": calls[1]["id"]}}
    (other,) = await home.group(Task("evening", "Serve the guest.", spec), again, n=1)
    await home.export(out, "sft", "policy=tiny and reward>=1")
    return {"first": one.reward, "again": other.reward, "goes on": other.rollout}


if __name__ == "__main__":
    run(main)
