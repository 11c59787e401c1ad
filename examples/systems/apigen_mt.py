"""APIGen-MT: blueprints that are executed and reviewed, then played as dialogues that are kept if they end as planned.

1. A generator writes a blueprint: an intent, and the tool calls that fulfil it. It is executed; a committee of
   reviewers votes on it. What fails goes back with the reasons, `ROUNDS` times at most.
2. A simulated user plays the intent against the agent, whose tools are real. A dialogue is kept if the state it leaves
   is the blueprint's.

Kept dialogues leave as an `sft` export. Generator, reviewers and user are sessions of the frozen policy.
"""

import json
from pathlib import Path

from home import Home, Session, run

from rolltap.types import Task

ROUNDS, REVIEWERS, MAX_TURNS = 3, 3, 6
STOCK = {"pear": 3, "plum": 0}
INTEGER = {"type": "object", "properties": {"item": {"type": "string"}, "count": {"type": "integer"}}}
ORDER = {"type": "function", "function": {"name": "order", "description": "Orders fruit.", "parameters": INTEGER}}


def reply(prompt):
    """The stand-in: its first blueprint orders what isn't there, its second is sound."""
    if "Write a blueprint" in prompt.text:
        item = "pear" if "is not in stock" in prompt.text else "plum"
        return json.dumps({"intent": f"I want 2 {item}s.", "calls": [{"item": item, "count": 2}]})
    if "Do intent and calls agree?" in prompt.text:
        return "yes"
    if "You are the customer" in prompt.text:
        return "Thanks, bye." if "Ordered." in prompt.text else "I want 2 pears."
    if "Ordered" in prompt.last or "bye" in prompt.last:
        return "Ordered."
    from rolltap.engine.scripted import ScriptedReply, ToolUse

    return ScriptedReply(call=(ToolUse("order", {"item": "pear", "count": 2}),))


def execute(stock: dict[str, int], calls: list[dict]) -> dict[str, int]:
    """The stock after these orders; `ValueError` says what is wrong with one."""
    left = dict(stock)
    for call in calls:
        if left.get(call["item"], 0) < call["count"]:
            raise ValueError(f"{call['item']} is not in stock")
        left[call["item"]] -= call["count"]
    return left


async def blueprint(home: Home) -> dict:
    """A blueprint that ran and that most reviewers approve of."""
    generator, reasons = await home.session(role="generator"), ""
    for _ in range(ROUNDS):
        plan = json.loads(await generator.ask(f"Write a blueprint as JSON for this stock: {STOCK}. {reasons}"))
        try:
            execute(STOCK, plan["calls"])
        except ValueError as wrong:
            reasons = f"Not so: {wrong}"
            continue
        reviewers = [await home.session(role="reviewer") for _ in range(REVIEWERS)]
        votes = [await reviewer.ask(f"Do intent and calls agree? {plan}") for reviewer in reviewers]
        if votes.count("yes") > REVIEWERS / 2:
            return plan
        reasons = "The reviewers disagree."
    raise RuntimeError("no blueprint was approved")


async def main(home: Home, out: Path = Path("out-apigen-mt")) -> dict[str, object]:
    plan = await blueprint(home)
    wanted = execute(STOCK, plan["calls"])

    async def dialogue(session: Session) -> float:
        user, stock, heard = await home.session(role="user"), dict(STOCK), "How can I help?"
        for _ in range(MAX_TURNS):
            words = await user.ask(f"You are the customer. {plan['intent']} The shop says: {heard}")
            if "bye" in words:
                break
            heard = await session.ask([*session.history, {"role": "user", "content": words}], tools=[ORDER])
            if heard.startswith("{"):
                stock = execute(stock, [json.loads(heard)])
                call = session.history[-1]["tool_calls"][0]["id"]
                shop = {"role": "tool", "tool_call_id": call, "content": "Ordered."}
                heard = await session.ask([*session.history, shop], tools=[ORDER])
        return float(stock == wanted)

    outcomes = await home.group(Task("fruit", plan["intent"], {"blueprint": plan}), dialogue, n=2)
    await home.export(out, "sft", "policy=tiny and reward>=1")
    return {"blueprint": plan, "kept": sum(one.reward for one in outcomes)}


if __name__ == "__main__":
    run(main)
