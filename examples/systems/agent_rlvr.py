"""Agent-RLVR: attempt, unit tests, guidance, a guided second attempt; the guided attempts are what is trained.

    reward = the tests' share passed        guidance = a plan and the tests' errors, by a frozen role

Guidance stands in the retry's prompt: it is context in the record, so it carries no loss, and the tag `retry-of:`
links the groups. Both attempts with their rewards are the data of a reward model (`kto` export). Trained by
`rolltap train --recipe grpo` on groups tagged `guided`.
"""

from pathlib import Path

from home import Home, Outcome, Session, run

from rolltap.types import Task

ISSUE = "Write a Python expression of x that is its square."
TESTS = {2: 4, -3: 9}


def reply(prompt):
    """The stand-in: it squares wrongly until it is guided."""
    if "Guide the next attempt" in prompt.text:
        return "Multiply x by itself."
    return "x * x" if "by itself" in prompt.text else "x * 2"


def passed(expression: str) -> tuple[float, list[str]]:
    """The share of tests that pass, and what the others say."""
    errors = []
    for x, expected in TESTS.items():
        try:
            value = eval(expression, {"__builtins__": {}}, {"x": x})  # noqa: S307  in your own runs: a sandbox
        except Exception as error:  # noqa: BLE001  the model's code: whatever it raises
            value = repr(error)
        if value != expected:
            errors.append(f"x = {x}: {value} instead of {expected}")
    return 1 - len(errors) / len(TESTS), errors


async def attempts(home: Home, name: str, prompt: str, *tags: str) -> tuple[list[Outcome], list[str]]:
    errors: list[str] = []

    async def play(session: Session) -> float:
        share, said = passed(await session.ask(prompt))
        errors.extend(said)
        return share

    return await home.group(Task(name, ISSUE, tags=tags), play, n=2), errors


async def main(home: Home, out: Path = Path("out-agent-rlvr")) -> dict[str, list[float]]:
    first, errors = await attempts(home, "square", ISSUE, "first")
    rewards = {"first": [one.reward for one in first]}
    if errors:
        teacher = await home.session(guides="square")
        said = "; ".join(sorted(set(errors)))
        guidance = await teacher.ask(f"Guide the next attempt at: {ISSUE} The tests say: {said}")
        prompt = f"{ISSUE}\nGuidance: {guidance}"
        guided, _ = await attempts(home, "square", prompt, "guided", f"retry-of:{first[0].rollout}")
        rewards["guided"] = [one.reward for one in guided]
    await home.export(out, "kto", "policy=tiny")
    return rewards


if __name__ == "__main__":
    run(main)
