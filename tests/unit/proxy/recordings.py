"""Sessions as harnesses hold them, in miniature: the order, tools, headers and wire format of each, with short texts.

Made by hand after what the harnesses send. Every call has the kind that it is expected to be given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
SUMMARY = "So far the agent has listed the files; what is left is to read the first."
ANSWER = "There is one file, and it holds a greeting."


@dataclass(frozen=True)
class Line:
    """A message: of a `role`, with `text`; an assistant's with a tool call of the id `call`, a tool's for it.

    `command` is the tool call's argument.
    """

    role: str
    text: str = ""
    call: str = ""
    command: str = "ls"


@dataclass(frozen=True)
class Step:
    """A call of a session, the reply that is sampled, and what the call is expected to be: kind, mask and agent.

    Later lines whose `call` is `minted` hold the id that the client was given for the reply's tool call.
    """

    lines: tuple[Line, ...]
    reply: str
    kind: str = "main"
    mask: str = ""
    agent: str = ""
    tools: tuple[str, ...] = ("bash",)
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    minted: str = ""


SYSTEM, USER = Line("system", "You are an agent."), Line("user", "Show me the files.")
CALLED, RESULT = Line("assistant", "", "c1"), Line("tool", "a.txt", "c1")
START = (SYSTEM, USER)
SECOND = (*START, CALLED, RESULT)
DONE = (*SECOND, Line("assistant", ANSWER))
TITLE = (Line("system", "Write a title."), USER)


def later(*history: Line, text: str = "And now?") -> tuple[Line, ...]:
    return (*history, Line("user", text))


def side(*lines: Line, reply: str = "Listing files", **more: Any) -> Step:
    return Step(lines, reply, "auxiliary", "auxiliary", tools=(), **more)


def sub(name: str, **headers: str) -> list[Step]:
    """A subagent's two calls."""
    task = (Line("system", "You search."), Line("user", "Find the file."))
    made = [Step(task, CALL), Step((*task, CALLED, RESULT), ANSWER)]
    return [Step(step.lines, step.reply, agent=name, tools=("bash", "grep"), headers=headers) for step in made]


def together(*agents: list[Step]) -> list[Step]:
    """The calls of several agents, one of each in turn."""
    return [step for steps in zip(*agents, strict=True) for step in steps]


def kept_beside(summary: str, call: str) -> tuple[Line, ...]:
    """A history whose beginning is a summary, and whose last turn was kept as it was."""
    return (
        SYSTEM,
        Line("user", f"Summary: {summary}"),
        Line("assistant", f"I go on: {call}.", call),
        Line("tool", "b", call),
    )


def kept_turn(lines: tuple[Line, ...], call: str) -> Step:
    return Step(lines, f"I go on: {call}.{CALL}", minted=call)


def summarised(lines: tuple[Line, ...], reply: str) -> Step:
    return Step(later(*lines, text="Summarise."), reply, "summary", "summary")


TURNS = [Step(START, CALL), Step(SECOND, ANSWER)]
AFTER_SUMMARY = later(*START, text=f"Summary: {SUMMARY} Go on.")
CODEX_COMPACTION = {"x-codex-turn-metadata": json.dumps({"request_kind": "compaction"})}
PASTED = (Line("system", "You summarise."), Line("user", "[User]: Show me the files. [Assistant]: a tool call"))
RESUMED = (SYSTEM, Line("user", "What did we do so far?"))
COMPRESSED = (
    SYSTEM,
    Line("user", f"<state_snapshot>{SUMMARY}</state_snapshot>"),
    Line("assistant", "Got it."),
    Line("assistant", "I go on.", "c1"),
    RESULT,
)
STREAMED = {"stream": True}
MAIN_TOOLS, MEMORY_TOOLS = ("bash", "edit", "task"), ("bash", "write")
RESUMED_DONE = later(*DONE)
MEMORY = (Line("system", "You keep the memory."), *later(*RESUMED_DONE[1:], Line("assistant", "Bye."), text="Extract."))


def offering(tools: tuple[str, ...], *steps: Step) -> list[Step]:
    return [replace(step, tools=tools) for step in steps]


def failed(lines: tuple[Line, ...], question: str, reply: str) -> Step:
    """An attempt at a summary after which the conversation goes on as if it had not been."""
    return Step(later(*lines, text=question), reply, "auxiliary", "auxiliary")


def compacted_by_paste(number: int, *kept: Line) -> list[Step]:
    """OpenCode's compaction: a request of its own, then a history that begins alike each time, and two turns."""
    summary, turn = f"Part {number}: {SUMMARY}", f"p{number}"
    resumed = (*later(*RESUMED, Line("assistant", summary), text="Go on."), *kept)
    called = Line("assistant", f"I go on: {turn}.", turn)
    return [
        Step(later(*PASTED, text=f"[User]: part {number}"), summary, "summary", "summary", tools=()),
        kept_turn(resumed, turn),
        Step((*resumed, called, Line("tool", "b", turn)), ANSWER),
    ]


RECORDINGS: dict[str, tuple[str, list[Step]]] = {
    "a plain run": ("openai_chat", TURNS),
    "codex, compacted": (
        "openai_responses",
        [
            *TURNS,
            Step(later(*DONE, text="Summarise."), SUMMARY, "summary", "summary", tools=(), headers=CODEX_COMPACTION),
            Step(AFTER_SUMMARY, CALL),
        ],
    ),
    "codex, two subagents at once": (
        "openai_responses",
        [
            Step(START, CALL, headers={"session-id": "s", "thread-id": "s"}),
            *together(*(sub(name, **{"session-id": "s", "thread-id": name}) for name in "ab")),
            Step(SECOND, ANSWER, headers={"session-id": "s", "thread-id": "s"}),
        ],
    ),
    "claude code, titled and compacted": (
        "anthropic",
        [
            side(*TITLE),
            *TURNS,
            Step(later(*DONE, text="Summarise."), f"<summary>{SUMMARY}</summary>", "summary", "summary"),
            Step(AFTER_SUMMARY, CALL),
        ],
    ),
    "claude code, which keeps its last turn beside the summary, twice": (
        "anthropic",
        [
            Step(START, CALL),
            kept_turn(SECOND, "x"),
            summarised(SECOND, f"<analysis>Long.</analysis>\n<summary>{SUMMARY}</summary>"),
            kept_turn(kept_beside(SUMMARY, "x"), "y"),
            summarised(kept_beside(SUMMARY, "x"), f"<summary>Then: {SUMMARY}</summary>"),
            Step(kept_beside(f"Then: {SUMMARY}", "y"), "I stop.", mask="abandoned"),
            Step(kept_beside(f"Then: {SUMMARY}", "y"), ANSWER),
        ],
    ),
    "claude code, whose first summary had no tags": (
        "anthropic",
        [
            Step(START, CALL),
            kept_turn(SECOND, "x"),
            summarised(SECOND, "What was done: files were listed, nothing more."),
            summarised((*SECOND, Line("user", "In tags.")), f"<summary>{SUMMARY}</summary>"),
            Step(kept_beside(SUMMARY, "x"), ANSWER),
        ],
    ),
    "claude code, which uses the first of two summaries without tags": (
        "anthropic",
        [
            Step(START, CALL),
            kept_turn(SECOND, "x"),
            summarised(SECOND, f"Without tags: {SUMMARY}"),
            summarised((*SECOND, Line("user", "In tags.")), "What was done: files were listed, nothing more."),
            Step(kept_beside(f"Without tags: {SUMMARY}", "x"), ANSWER),
        ],
    ),
    "claude code, whose attempts at a summary call tools, so that it goes on without one": (
        "anthropic",
        [
            Step(START, CALL),
            kept_turn(SECOND, "x"),
            failed(SECOND, "Summarise.", f"I look again.{CALL}"),
            failed(SECOND, "Summarise, in tags.", f"And again.{CALL}"),
            Step((*SECOND, Line("assistant", "I go on: x.", "x"), Line("tool", "b", "x")), ANSWER),
        ],
    ),
    "claude code, run again to verify the answer": (
        "anthropic",
        [*TURNS, Step((SYSTEM, Line("user", f"Verify this: {ANSWER}")), CALL)],
    ),
    "claude code, two subagents at once": (
        "anthropic",
        [
            Step(START, CALL),
            *together(*(sub(name, **{"x-claude-code-agent-id": name}) for name in "ab")),
            Step(SECOND, ANSWER),
        ],
    ),
    "opencode, titled, with a subagent": (
        "openai_chat",
        [
            side(*TITLE),
            Step(START, CALL),
            *sub("two", **{"x-parent-session-id": "one", "x-session-id": "two"}),
            Step(SECOND, ANSWER),
        ],
    ),
    "opencode, whose summary comes back as its own answer, twice": (
        "openai_chat",
        [
            *TURNS[:1],
            Step(PASTED, SUMMARY, "summary", "summary", tools=()),
            Step(later(*RESUMED, Line("assistant", SUMMARY)), CALL),
            Step(later(*PASTED), f"Then: {SUMMARY}", "summary", "summary", tools=()),
            Step(later(*RESUMED, Line("assistant", f"Then: {SUMMARY}")), ANSWER),
        ],
    ),
    "copilot, compacted in the background": (
        "openai_chat",
        [
            *TURNS,
            Step(
                later(*DONE, text="Summarise."),
                SUMMARY,
                "summary",
                "summary",
                headers={"x-interaction-type": "conversation-compaction"},
                fields={"tool_choice": "none"},
            ),
            Step(AFTER_SUMMARY, CALL),
        ],
    ),
    "gemini, routed first": (
        "gemini",
        [
            side(
                *TITLE,
                reply='{"model": "flash"}',
                fields={"generationConfig": {"responseMimeType": "application/json"}},
            ),
            *TURNS,
        ],
    ),
    "gemini, compressed early, its last turn kept behind a word that nobody sampled": (
        "gemini",
        [
            Step(START, CALL),
            Step(SECOND, f"I go on.{CALL}"),
            Step(
                (Line("system", "Compress."), *later(*SECOND[1:], text="Write the snapshot.")),
                f"<state_snapshot>{SUMMARY}</state_snapshot>",
                "summary",
                "summary",
                tools=(),
            ),
            Step(COMPRESSED, ANSWER),
        ],
    ),
    "qwen code, compacted without a header": (
        "openai_chat",
        [
            *TURNS,
            Step((Line("system", "Summarise."), *later(*DONE[1:])), SUMMARY, "summary", "summary", tools=()),
            Step(AFTER_SUMMARY, CALL),
        ],
    ),
    "qwen code, whose first summary, asked for in the conversation, had no snapshot": (
        "openai_chat",
        [
            *TURNS,
            summarised(DONE, "I would rather go on with the task than write a snapshot."),
            Step((Line("system", "Summarise."), *later(*DONE[1:])), SUMMARY, "summary", "summary", tools=()),
            Step(AFTER_SUMMARY, CALL),
        ],
    ),
    "qwen code, whose last call is a summary": (
        "openai_chat",
        [*TURNS, side(Line("system", "Summarise."), *later(*DONE[1:]), reply=SUMMARY)],
    ),
    "qwen code, resumed, with a memory agent": (
        "openai_chat",
        [
            *offering(MAIN_TOOLS, *TURNS, Step(RESUMED_DONE, "Bye.")),
            *offering(
                MEMORY_TOOLS,
                Step(MEMORY, CALL, "auxiliary", "auxiliary"),
                Step((*MEMORY, CALLED, RESULT), "Nothing.", "auxiliary", "auxiliary"),
            ),
        ],
    ),
    "opencode, compacted three times": (
        "openai_chat",
        [
            kept_turn(START, "a"),
            *compacted_by_paste(1, Line("assistant", "I go on: a.", "a"), Line("tool", "b", "a")),
            *compacted_by_paste(2),
            *compacted_by_paste(3, Line("assistant", "I go on: p2.", "p2"), Line("tool", "b", "p2")),
        ],
    ),
    "cline, with a subagent that no header names": (
        "openai_chat",
        [Step(START, CALL), *sub("subagent-1"), Step(SECOND, ANSWER)],
    ),
    "smolagents, whose last word has no tools": (
        "openai_chat",
        [
            Step(START, CALL, fields={"tool_choice": "required"}),
            Step((Line("system", "Answer now."), *SECOND[1:]), ANSWER, tools=()),
        ],
    ),
    "pi, which asks again after a dropped stream": (
        "openai_chat",
        [Step(START, "I look.", mask="abandoned"), *TURNS],
    ),
    "aider, with a commit message": (
        "openai_chat",
        [
            Step(START, ANSWER, tools=(), fields=STREAMED),
            Step(later(*START, Line("assistant", ANSWER)), "done", tools=(), fields=STREAMED),
            side(Line("system", "Write a commit message."), Line("user", "a diff"), reply="add a file"),
        ],
    ),
    "aider, with one edit and its commit message": (
        "openai_chat",
        [
            Step(START, ANSWER, tools=(), fields=STREAMED),
            side(Line("system", "Write a commit message."), Line("user", f"USER: ASSISTANT: {ANSWER}"), reply="add"),
        ],
    ),
    "gptme, with a name from a smaller model": (
        "openai_responses",
        [
            Step(START, ANSWER, tools=()),
            side(*TITLE, fields={"model": "small"}),
            Step(later(*START, Line("assistant", ANSWER)), "done", tools=()),
        ],
    ),
    "a scratchpad that is written anew each turn": (
        "openai_chat",
        [Step((Line("user", f"Question. Notes: {'note ' * count}"),), ANSWER, tools=()) for count in range(3)],
    ),
    "a workflow of planner, critic and writer": (
        "openai_chat",
        [
            Step((Line("system", f"You are the {name}."), USER), f"{name}: {ANSWER}", tools=())
            for name in ("planner", "critic", "writer")
        ],
    ),
}


def chat(step: Step) -> Any:
    messages = []
    for line in step.lines:
        message: dict[str, Any] = {"role": line.role, "content": line.text}
        if line.role == "assistant" and line.call:
            function = {"name": "bash", "arguments": json.dumps({"command": line.command})}
            message["tool_calls"] = [{"id": line.call, "type": "function", "function": function}]
        messages.append(message | ({"tool_call_id": line.call} if line.role == "tool" else {}))
    tools = [{"type": "function", "function": tool} for tool in _tools(step, "parameters")]
    return {"model": "tiny", "messages": messages} | ({"tools": tools} if tools else {})


def responses(step: Step) -> Any:
    items: list[Any] = []
    for line in step.lines:
        if line.role == "tool":
            items.append({"type": "function_call_output", "call_id": line.call, "output": line.text})
        elif line.call:
            if line.text:
                items.append({"type": "message", "role": line.role, "content": line.text})
            call = {"type": "function_call", "call_id": line.call, "name": "bash"}
            items.append(call | {"arguments": json.dumps({"command": line.command})})
        else:
            items.append({"type": "message", "role": line.role, "content": line.text})
    tools = [{"type": "function", **tool} for tool in _tools(step, "parameters")]
    return {"model": "tiny", "input": items} | ({"tools": tools} if tools else {})


def messages(step: Step) -> Any:
    out: list[Any] = []
    for line in step.lines[1:]:
        if line.role == "tool":
            block = {"type": "tool_result", "tool_use_id": line.call, "content": line.text}
            out.append({"role": "user", "content": [block]})
        elif line.call:
            use = {"type": "tool_use", "id": line.call, "name": "bash", "input": {"command": line.command}}
            text = [{"type": "text", "text": line.text}] if line.text else []
            out.append({"role": "assistant", "content": [*text, use]})
        else:
            out.append({"role": line.role, "content": line.text})
    body = {"model": "tiny", "max_tokens": 99, "system": step.lines[0].text, "messages": out}
    return body | ({"tools": _tools(step, "input_schema")} if step.tools else {})


def contents(step: Step) -> Any:
    out: list[Any] = []
    for line in step.lines[1:]:
        part: dict[str, Any] = {"text": line.text}
        text = [part] if line.call and line.role == "assistant" and line.text else []
        if line.role == "tool":
            part = {"functionResponse": {"name": "bash", "response": {"output": line.text}}}
        elif line.call:
            part = {"functionCall": {"name": "bash", "args": {"command": line.command}}}
        out.append({"role": "model" if line.role == "assistant" else "user", "parts": [*text, part]})
    body = {"systemInstruction": {"parts": [{"text": step.lines[0].text}]}, "contents": out}
    tools = [{"functionDeclarations": _tools(step, "parametersJsonSchema")}]
    return body | ({"tools": tools} if step.tools else {})


def _tools(step: Step, schema: str) -> list[Any]:
    return [{"name": name, schema: {"type": "object", "properties": {}}} for name in step.tools]


WIRES: dict[str, tuple[str, Callable[[Step], Any]]] = {
    "openai_chat": ("/v1/chat/completions", chat),
    "openai_responses": ("/v1/responses", responses),
    "anthropic": ("/v1/messages", messages),
    "gemini": ("/v1beta/models/tiny:generateContent", contents),
}


async def replay(plane: Any, dialect: str, steps: Sequence[Step]) -> None:
    """Sends a session's calls; each gets the step's reply."""
    path, body_of = WIRES[dialect]
    ids: dict[str, str] = {}
    for step in steps:
        step = replace(step, lines=tuple(replace(line, call=ids.get(line.call, line.call)) for line in step.lines))
        plane.engine.replies = [f"{step.reply}<|im_end|>"]
        answer = await plane.client.post(path, {**body_of(step), **step.fields}, headers=dict(step.headers))
        assert answer.status == 200, answer.body
        if step.minted:
            ids[step.minted] = re.findall(r'"(?:call_)?id": ?"(call_\w+|toolu_\w+)"', answer.body.decode())[-1]
