"""A service desk: a simulated customer talks to the agent, who has tools on the shop's orders. Two roles, one rollout.

The customer alone knows the task's instruction. Both histories grow by what the other said, as in tau-bench; tool calls
are the agent's and stay out of the customer's sight.
"""

import json
import os
import urllib.request
from pathlib import Path

MOST_TURNS = 12
STOP = "###STOP###"
ORDERS = Path("orders.json")

DESK = """You work at the service desk of a shop. Look orders up before you change them.
A pending order may be cancelled by the customer who made it. A delivered one may only be returned, if it is broken."""
CUSTOMER = """You are a customer at a service desk. {scenario}
Say one thing at a time. When your wish is met, or clearly won't be, say {stop}."""


def tool(name: str, text: str) -> dict:
    order = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": order}}


TOOLS = [
    tool("look_up", "Shows an order."),
    tool("cancel", "Cancels a pending order."),
    tool("take_back", "Takes a broken, delivered order back and refunds it."),
]
CHANGES = {"cancel": ("pending", "cancelled"), "take_back": ("delivered", "refunded")}


def ask(role: str, messages: list[dict], **more: object) -> dict:
    body = json.dumps({"model": role, "messages": messages, **more}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]


def use(name: str, arguments: str) -> str:
    """What a tool answers; it changes the orders' file."""
    orders = json.loads(ORDERS.read_text())
    order = orders.get(json.loads(arguments).get("order", ""))
    if order is None:
        return "no such order"
    if name in CHANGES:
        before, after = CHANGES[name]
        if order["status"] != before:
            return f"the order is {order['status']}"
        order["status"] = after
        ORDERS.write_text(json.dumps(orders, indent=2))
    return json.dumps(order)


def answer(desk: list[dict]) -> str:
    """The agent's next words to the customer, after the tools that it wants."""
    for _ in range(MOST_TURNS):
        message = ask("agent", desk, tools=TOOLS)
        desk.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            said = use(call["function"]["name"], call["function"]["arguments"])
            desk.append({"role": "tool", "tool_call_id": call["id"], "content": said})
    return message.get("content") or "One moment."


def main() -> None:
    customer = [
        {"role": "system", "content": CUSTOMER.format(scenario=os.environ["ROLLTAP_PROMPT"], stop=STOP)},
        {"role": "user", "content": "Hello! How can I help you?"},
    ]
    desk: list[dict] = [{"role": "system", "content": DESK}]
    for _ in range(MOST_TURNS):
        wish = ask("user", customer)
        customer.append(wish)
        if STOP in (wish.get("content") or STOP):
            break
        desk.append({"role": "user", "content": wish["content"]})
        customer.append({"role": "user", "content": answer(desk)})


if __name__ == "__main__":
    main()
