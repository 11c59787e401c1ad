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


class Lamp:
    """The stand-in's game. Another has as many turns as its expert (`tiny.py`)."""

    async def expert(self, home: Home) -> list[str]:
        """The expert's moves."""
        return await self.play(await home.session(), (), "You are an expert.")

    async def student(self, session: Session, kept: Sequence[str]) -> float:
        """What an attempt comes to that goes on from the moves `kept`."""
        return float(await self.play(session, kept) == list(MOVES))

    async def play(self, session: Session, before: Sequence[str], system: str = "") -> list[str]:
        moves = list(before)
        while len(moves) < len(MOVES):
            said = [{"role": "system", "content": system}] if system else []
            moves.append(await session.ask([*said, *self.told(moves)]))
        return moves

    def told(self, moves: Sequence[str]) -> list[dict[str, str]]:
        """The game so far, as its player sees it."""
        said = [{"role": "user", "content": "It is dark. Your move?"}]
        for move in moves:
            said += [
                {"role": "assistant", "content": move},
                {"role": "user", "content": f"Done: {move}. Your move?"},
            ]
        return said


async def main(
    home: Home, steps: Sequence[int] = (0, EVERY, 2 * EVERY, 3 * EVERY), game: Lamp | None = None, n: int = 2
) -> list[dict[str, object]]:
    game = game or Lamp()
    expert = await game.expert(home)
    rounds = []
    for step in steps:
        kept = expert[: max(0, len(expert) - 1 - step // EVERY)]

        async def student(session: Session, kept: Sequence[str] = kept) -> float:
            return await game.student(session, kept)

        outcomes = await home.group(Task(f"lamp-{step}", "Light the lamp."), student, n=n)
        rounds.append({"kept": len(kept), "rewards": [outcome.reward for outcome in outcomes]})
    return rounds


if __name__ == "__main__":
    run(main)
