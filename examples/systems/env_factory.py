"""EnvFactory: environments with state that are written, run and checked before anyone is trained in them.

1. A writer proposes an environment: tools as Python functions over a state, with calls that must work.
2. It is executed: every proposed call has to run, and the same calls twice have to leave the same state.
3. Tasks are paths through the tools' dependencies (a tool needs what another one gives); the agent plays them, and a
   trajectory is kept if its calls, replayed on a fresh state, leave the state that the path leaves.

The writer is a session of the frozen policy. Code of a model runs in a sandbox of yours; here the stand-in wrote it.
"""

import json
from pathlib import Path

from home import Home, Session, run

from rolltap.types import Task

SOURCE = """
def open_account(state, name): state[name] = 0
def deposit(state, name, amount): state[name] += amount
"""
NEEDS = {"open_account": [], "deposit": ["open_account"]}
"""Which tools must have run before."""


def reply(prompt):
    """The stand-in: a writer of one environment, and an agent that does as it is asked, a call a turn."""
    if "Write an environment" in prompt.text:
        calls = [["open_account", {"name": "a"}], ["deposit", {"name": "a", "amount": 5}]]
        return json.dumps({"source": SOURCE, "needs": NEEDS, "calls": calls})
    done = prompt.text.count('{"tool"')
    plan = json.loads(prompt.text.split("plan: ")[1].split("\n")[0].split("<|im_end|>")[0])
    return json.dumps({"tool": plan[done][0], "arguments": plan[done][1]}) if done < len(plan) else "Done."


def replay(source: str, calls: list) -> dict:
    """The state that the calls leave, begun anew."""
    tools: dict = {}
    exec(source, tools)  # noqa: S102  a model's code: see above
    state: dict = {}
    for tool, arguments in calls:
        tools[tool](state, **arguments)
    return state


def paths(needs: dict[str, list[str]], calls: list) -> list[list]:
    """For each call a task: the calls that it needs, then itself."""
    by_tool = {call[0]: call for call in calls}
    return [[*(by_tool[other] for other in needs[tool]), call] for tool, call in by_tool.items()]


async def main(home: Home, out: Path = Path("out-env-factory")) -> dict[str, float]:
    """Each path's share of trajectories that were kept."""
    writer = await home.session(role="writer")
    made = json.loads(await writer.ask("Write an environment as JSON: source, needs, calls."))
    if replay(made["source"], made["calls"]) != replay(made["source"], made["calls"]):
        raise RuntimeError("the environment is not deterministic")
    kept = {}
    for path in paths(made["needs"], made["calls"]):

        async def play(session: Session, path: list = path) -> float:
            said, calls = await session.ask(f"Do this with a call a turn. plan: {json.dumps(path)}\n"), []
            while said.startswith("{") and len(calls) < 2 * len(path):
                call = json.loads(said)
                calls.append((call["tool"], call["arguments"]))
                said = await session.say("ok")
            return float(replay(made["source"], calls) == replay(made["source"], path))

        outcomes = await home.group(Task(f"to-{path[-1][0]}", "Use the tools.", {"path": path}), play, n=2)
        kept[path[-1][0]] = sum(one.reward for one in outcomes) / len(outcomes)
    await home.export(out, "sft", "policy=tiny and reward>=1")
    return kept


if __name__ == "__main__":
    run(main)
