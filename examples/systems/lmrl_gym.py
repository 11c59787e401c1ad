"""LMRL-Gym: an environment of turns, played and recorded, then its offline data: transitions with returns to go.

The environment is a maze in words (the benchmark has eight such tasks): one move a turn, -1 for each, 0 where the goal
is. Every call has its reward, so `rolltap export --format transitions` gives state, action, reward, return to go and
done of each: what offline value methods and filtered behaviour cloning read. On-line: recipes `archer` and `ppo`.
"""

from collections.abc import Mapping
from pathlib import Path

from home import Home, Session, run

from rolltap.types import Task

MAZE = {
    "hall": {"north": "tower", "east": "cellar"},
    "tower": {"south": "hall"},
    "cellar": {"west": "hall", "down": "vault"},
}
GOAL, MAX_MOVES = "vault", 6


def reply(prompt):
    """The stand-in: it looks into the tower first."""
    if "You are in the hall" in prompt.last:
        return "east" if "tower" in prompt.text else "north"
    return "south" if "tower" in prompt.last else "down"


def describe(room: str) -> str:
    return f"You are in the {room}. Ways: {', '.join(MAZE.get(room, {}))}."


async def episode(session: Session) -> Mapping[str, float]:
    """-1 a move until the goal. The moves have all of it: the rollout's own reward would come on top at the end."""
    room, rewards = "hall", {}
    said = await session.ask(f"Find the {GOAL}; say one way a turn. {describe(room)}")
    for _ in range(MAX_MOVES):
        room = MAZE[room].get(said, room)
        rewards[f"call:{session.calls[-1]}"] = 0.0 if room == GOAL else -1.0
        if room == GOAL:
            break
        said = await session.say(describe(room))
    return {"rollout": 0.0, **rewards}


async def main(home: Home, out: Path = Path("out-lmrl-gym")) -> list[str]:
    outcomes = await home.group(Task("maze", f"Find the {GOAL}."), episode, n=2)
    await home.export(out, "transitions", "policy=tiny")
    return [one.rollout for one in outcomes]


if __name__ == "__main__":
    run(main)
