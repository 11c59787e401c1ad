"""TCOD, backward: the student goes on from an expert's first turns, ever fewer, until it plays whole games.

    kept = max(0, the expert's turns - 1 - floor(step / EVERY))

What the expert said stands in the student's history as context, without loss: the frozen policy sampled it. The recipe
`tcod` distils the student's own turns; its cap of 1 + floor(step / every) turns leaves the student as many as the
expert took from there. The schedule is the released code's (`tcod_b2f`).
"""

from collections.abc import Sequence

from home import Home, Session, run

from rolltap.types import Task

MOVES = ("go north", "take the lamp", "light the lamp")
EVERY = 5


def reply(prompt):
    """The stand-in: an expert who knows all moves, and a student who does not know the first one."""
    made = prompt.text.count("Done:")
    return MOVES[made] if made or "expert" in prompt.text else "wait"


def told(moves: Sequence[str]) -> list[dict[str, str]]:
    """The game so far, as its player sees it."""
    said = [{"role": "user", "content": "It is dark. Your move?"}]
    for move in moves:
        said += [{"role": "assistant", "content": move}, {"role": "user", "content": f"Done: {move}. Your move?"}]
    return said


async def play(session: Session, before: Sequence[str] = (), system: str = "") -> list[str]:
    """The moves of a whole game, of which some were made `before`."""
    moves = list(before)
    while len(moves) < len(MOVES):
        moves.append(await session.ask([*([{"role": "system", "content": system}] if system else []), *told(moves)]))
    return moves


async def main(home: Home, steps: Sequence[int] = (0, EVERY, 2 * EVERY, 3 * EVERY)) -> list[dict[str, object]]:
    expert = await play(await home.session(), system="You are an expert.")
    rounds = []
    for step in steps:
        kept = max(0, len(expert) - 1 - step // EVERY)

        async def student(session: Session, kept: int = kept) -> float:
            return float(await play(session, expert[:kept]) == list(MOVES))

        outcomes = await home.group(Task(f"lamp-{step}", "Light the lamp."), student, n=2)
        rounds.append({"kept": kept, "rewards": [outcome.reward for outcome in outcomes]})
    return rounds


if __name__ == "__main__":
    run(main)
