"""What the proxy notes of a request is enough for the reconstructor to tell what the call was for."""

from __future__ import annotations

from typing import Any

from rolltap.reconstructor.reconstruct import reconstruct

TURN = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
USER = {"role": "user", "content": "list the files"}
SYSTEM = {"role": "system", "content": "You are an agent."}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
SUMMARY = "So far the agent has listed the files and found one of them."


def result(message: dict[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


async def reply(plane: Any, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    answer = await plane.client.chat(*messages, **fields)
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]["message"]


async def purposes(plane: Any) -> list[tuple[str, str, str]]:
    trajectory = reconstruct([row.call() for row in await plane.rows()])
    return [(found.kind.value, found.rule, found.mask) for found in trajectory.classifications]


async def test_a_title_that_is_asked_for_first(plane: Any) -> None:
    plane.engine.replies = ["Listing files<|im_end|>", TURN, "done<|im_end|>"]
    await reply(plane, {"role": "system", "content": "Generate a title."}, USER)
    first = await reply(plane, SYSTEM, USER, tools=TOOLS)
    await reply(plane, SYSTEM, USER, first, result(first, "a.txt"), tools=TOOLS)
    assert await purposes(plane) == [("auxiliary", "aside", "auxiliary"), ("main", "agent", ""), ("main", "agent", "")]


async def test_a_summary_that_the_conversation_itself_is_asked_for(plane: Any) -> None:
    plane.engine.replies = [TURN, "done<|im_end|>", f"{SUMMARY}<|im_end|>", "on it<|im_end|>"]
    first = await reply(plane, SYSTEM, USER, tools=TOOLS)
    history = [SYSTEM, USER, first, result(first, "a.txt")]
    history.append(await reply(plane, *history, tools=TOOLS))
    await reply(plane, *history, {"role": "user", "content": "Summarise."}, tools=TOOLS)
    await reply(plane, SYSTEM, {"role": "user", "content": f"Summary: {SUMMARY} Go on."}, tools=TOOLS)
    assert await purposes(plane) == [
        ("main", "agent", ""),
        ("main", "agent", ""),
        ("summary", "replaces_history", "summary"),
        ("main", "agent", ""),
    ]


async def test_an_agent_without_tools_whose_prompt_is_rebuilt_each_turn(plane: Any) -> None:
    plane.engine.replies = [f"thought {number}<|im_end|>" for number in range(3)]
    for number in range(3):
        await reply(plane, {"role": "user", "content": f"Question. Scratchpad: {'note ' * number}"})
    assert await purposes(plane) == [("main", "agent", "")] * 3


async def test_a_subagent_that_no_header_names(plane: Any) -> None:
    plane.engine.replies = [TURN, "found it<|im_end|>", "done<|im_end|>"]
    first = await reply(plane, SYSTEM, USER, tools=TOOLS)
    await reply(plane, {"role": "system", "content": "You search."}, {"role": "user", "content": "find"}, tools=TOOLS)
    await reply(plane, SYSTEM, USER, first, result(first, "found it"), tools=TOOLS)
    trajectory = reconstruct([row.call() for row in await plane.rows()])
    assert [found.agent for found in trajectory.classifications] == ["", "subagent-1", ""]


async def test_four_samples_of_one_request(plane: Any) -> None:
    plane.engine.replies = [f"answer {number}<|im_end|>" for number in range(4)]
    await plane.client.chat(USER, n=4)
    assert await purposes(plane) == [("main", "agent", "")] * 4
