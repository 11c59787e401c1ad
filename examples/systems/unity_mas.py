"""UnityMAS-O: a graph of roles, a map from agents to models, rewards of role, turn and rollout, an update a model.

    plan     the planner names two things to look up
    look up  two lookers find one each: two roles of one model (partial sharing)
    answer   the planner answers from what they found
    pay      the rollout by the answer, each looker by its find, a call that finds nothing by -0.1

Each model has a group with the same rollouts, and a run of its own: `rolltap train --policy tiny --name tiny --recipe
dr_mas`, and the same for `worker`. The planner's reward is the rollout's, as its role has none.
"""

from home import Home, Session, run

from rolltap.types import Task

MODELS = {"planner": "tiny", "first": "worker", "second": "worker"}
FACTS = {"length of the Lonn": "412 km", "age of Abel's tower": "150 years"}


def reply(prompt):
    """The stand-in: it plans rightly; a looker that is asked twice finds the length only."""
    text = prompt.text
    if "Answer from" in text:
        return "both" if all(fact in text for fact in FACTS.values()) else "one"
    if "Plan" in text:
        return "; ".join(FACTS)
    if "Look up" in text:
        return next((fact for name, fact in FACTS.items() if name in text), "nothing")
    return "?"


async def work(session: Session) -> dict[str, float]:
    """One rollout: the roles in the graph's order, and what each earned."""
    paid: dict[str, float] = {}
    plan = (await session.ask("Plan what to look up.", role="planner")).split("; ")
    found: list[str] = []
    for role, wanted in zip(("first", "second"), plan, strict=True):
        found.append(await session.ask(f"Look up: {wanted}", role=role))
        if found[-1] == "nothing":
            paid[f"call:{session.calls[-1]}"] = -0.1
        paid[f"role:{role}"] = float(found[-1] == FACTS.get(wanted))
    answer = await session.ask(f"Answer from: {', '.join(found)}", role="planner")
    return {**paid, "rollout": float(answer == "both")}


async def main(home: Home) -> dict[str, dict[str, str]]:
    """The groups of a task: the model that each trains."""
    (outcome, *_) = await home.group(Task("compare", "Compare them."), work, policy=MODELS)
    detail = (await home.client.get(f"/read/rollouts/{outcome.rollout}"))["rollout"]
    group = await home.client.get(f"/read/groups/{detail['group_id']}")
    return {"groups": group["line"]["trains"]}


if __name__ == "__main__":
    run(main)
