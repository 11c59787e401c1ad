"""LUMINA: what would an oracle help with? The same tasks with and without an oracle's words at every turn.

    value of a skill = success with its oracle - success without, on the same tasks

Here the oracle keeps the state: at each turn it says where the agent is. Nothing is trained: both arms are sessions of
a frozen policy, tagged with the task and the arm, and everything that was said is in the record.
"""

from home import Home, Session, run

GOALS = {"near": 2, "far": 5}
MAX_TURNS = 8


def reply(prompt):
    """The stand-in: it walks, and stops where the oracle or its luck with short ways says so."""
    steps = prompt.text.count("You walked.")
    if "oracle:" in prompt.text:
        return "stop" if "oracle: you are there" in prompt.last else "walk"
    return "stop" if steps == 2 else "walk"  # it loses count on long ways


def oracle(position: int, goal: int) -> str:
    return f" oracle: you are {'there' if position == goal else f'at {position} of {goal}'}."


async def episode(session: Session, goal: int, helped: bool) -> float:
    """Walk `goal` steps and stop: 1, else 0."""
    position = 0
    said = await session.ask(f"Walk {goal} steps, one a turn, then stop.{oracle(position, goal) if helped else ''}")
    for _ in range(MAX_TURNS):
        if said != "walk":
            break
        position += 1
        said = await session.say(f"You walked.{oracle(position, goal) if helped else ''}")
    return float(said == "stop" and position == goal)


async def main(home: Home) -> dict[str, float]:
    success: dict[str, list[float]] = {"alone": [], "oracle": []}
    for task, goal in GOALS.items():
        for arm, results in success.items():
            session = await home.session(task=task, arm=arm)
            results.append(await episode(session, goal, arm == "oracle"))
    means = {arm: sum(results) / len(results) for arm, results in success.items()}
    return {**means, "value of state": means["oracle"] - means["alone"]}


if __name__ == "__main__":
    run(main)
