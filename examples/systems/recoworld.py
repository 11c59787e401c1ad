"""RecoWorld: a recommender against a simulated user who may leave; the session's length is the reward.

Each turn the recommender shows a list, and the user (a frozen role of the same rollout) clicks, skips, asks for
something else, or leaves. Before he would leave he reflects and gives an instruction, which the recommender may follow.

    reward of a turn = clicks - skips        reward of the rollout = the turns that the user stayed (retention)

Roles are `recommender` (trained) and `user` (frozen): the user's calls are context and carry no loss.
"""

from collections.abc import Mapping

from home import Home, Session, run

from rolltap.types import Task

SHELF = ["crime", "crime", "jazz", "travel", "jazz"]
MAX_TURNS, PATIENCE = 5, 1


def reply(prompt):
    """The stand-in for both: a user who likes jazz, and a recommender that listens."""
    if "You are a reader" in prompt.text:
        shown = prompt.last.rsplit("You see: ", 1)[1]
        return "click" if "jazz" in shown else "skip; instruction: show me jazz"
    return "jazz" if "show me jazz" in prompt.text else "crime"


async def visit(session: Session) -> Mapping[str, float]:
    rewards: dict[str, float] = {}
    patience, stayed, said = PATIENCE, 0, "A reader comes in."
    recommender: list[dict] = [{"role": "system", "content": f"Recommend one of: {', '.join(sorted(set(SHELF)))}."}]
    for _ in range(MAX_TURNS):
        shown = await session.ask([*recommender, {"role": "user", "content": said}], role="recommender")
        recommender, call = session.history, session.calls[-1]
        mood = await session.ask(f"You are a reader of books on music. You see: {shown}.", role="user")
        stayed += 1
        rewards[f"call:{call}"] = 1.0 if mood.startswith("click") else -1.0
        patience -= mood.startswith("skip")
        if patience < 0:
            break
        said = mood
    return {"rollout": float(stayed), **rewards}


async def main(home: Home) -> dict[str, object]:
    roles = {"recommender": "tiny", "user": "frozen"}
    outcomes = await home.group(Task("visit", "Keep the reader."), visit, policy=roles, n=2)
    session = await home.client.get(f"/read/sessions/{outcomes[0].session}")
    return {"stayed": [one.reward for one in outcomes], "trajectory": session["report"]}


if __name__ == "__main__":
    run(main)
