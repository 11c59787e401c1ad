"""Recorded rollouts for the exporters' tests: real conversations, rendered, sampled and bridged by a real tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from rolltap.reconstructor.exporters.base import CallText, ExportItem, Message, Row, SkippedItem
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.types import (
    Call,
    CallKind,
    Finish,
    Reward,
    Rollout,
    RolloutStatus,
    Session,
    Task,
    VersionSpan,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Reads a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    },
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def tool(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def says(text: str, *calls: tuple[str, str, dict[str, Any]], reasoning: str = "") -> dict[str, Any]:
    """An assistant's turn; calls are (id, tool, arguments)."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in calls
        ]
    return message


@dataclass
class Script:
    """A session being recorded. `sampled` overrides the text that the engine is taken to have sampled for a turn."""

    world: World
    session_id: str
    calls: list[Call] = field(default_factory=list)
    texts: dict[str, CallText] = field(default_factory=dict)

    def ask(
        self,
        messages: Sequence[Message],
        reply: Message,
        *,
        parent: str | None = None,
        sampled: str | None = None,
        **changes: Any,
    ) -> str:
        """Records a call: `messages` are its whole history. Returns the call's id."""
        number = len(self.calls)
        call_id = f"{self.session_id}-{number:04d}"
        prompt = self._prompt(messages, parent)
        output = self.world.ids(sampled if sampled is not None else self.world.reply(messages, reply))
        call = Call(
            id=call_id,
            session_id=self.session_id,
            prompt_ids=np.asarray(prompt, np.int32),
            output_ids=np.asarray(output, np.int32),
            logprobs=-np.linspace(0.1, 0.9, len(output), dtype=np.float32),
            **{
                "versions": (VersionSpan(number // 2, 0, len(output)),),
                "parent_id": parent,
                "policy": "tiny",
                "delivered": True,
                "finish": Finish.TOOL_CALLS if reply.get("tool_calls") else Finish.STOP,
                **changes,
            },
        )
        self.calls.append(call)
        self.texts[call_id] = CallText(list(messages), reply, TOOLS, created_at=1_700_000_000.0 + number)
        return call_id

    def _prompt(self, messages: Sequence[Message], parent: str | None) -> list[int]:
        if parent is None:
            return self.world.ids(self.world.render(messages, generate=True))
        earlier = next(call for call in self.calls if call.id == parent)
        new = messages[len(self.texts[parent].conversation) :]
        bridge = self.world.ids(self.world.bridge(new))
        return [*earlier.prompt_ids.tolist(), *earlier.output_ids.tolist(), *bridge]

    def item(self, *, reward: float | None = None, task: str = "", group: str = "", **changes: Any) -> ExportItem:
        """The session as exporters get it; with a `task`, as a rollout of it."""
        session = Session(self.session_id, "tiny", "hash", created_at=1_772_000_000.0, expires_at=2e9)
        rewards = () if reward is None else (Reward("r", self.session_id, reward),)
        rollout = None
        if task:
            rollout = Rollout(
                f"rollout-{self.session_id}", group or f"group-{task}", task, 0, RolloutStatus.SUCCEEDED,
                session_id=self.session_id, rewards=rewards,
            )  # fmt: skip
        return ExportItem(
            **{
                "session": session,
                "trajectory": reconstruct(self.calls),
                "calls": {call.id: call for call in self.calls},
                "texts": self.texts,
                "rollout": rollout,
                "task": Task(task, "do it", {"evaluator": {"kind": "command"}}, ("files",)) if task else None,
                "reward": reward,
                "rewards": rewards,
                "harness": "codex",
                **changes,
            }
        )


class World:
    """A tokenizer with its chat template."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def render(self, messages: Sequence[Message], *, generate: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            list(messages), tools=TOOLS, tokenize=False, add_generation_prompt=generate
        )

    def reply(self, messages: Sequence[Message], reply: Message) -> str:
        """What the engine samples for `reply` where it writes as the template does."""
        prompt = self.render(messages, generate=True)
        return self.render([*messages, reply]).removeprefix(prompt).removesuffix("\n")

    def bridge(self, new: Sequence[Message]) -> str:
        """What the template writes for new messages behind a sampled turn."""
        text, results = "\n", [message["content"] for message in new if message["role"] == "tool"]
        if results:
            inner = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in results)
            text += f"<|im_start|>user{inner}<|im_end|>\n"
        for message in new:
            if message["role"] == "user":
                text += f"<|im_start|>user\n{message['content']}<|im_end|>\n"
        return f"{text}<|im_start|>assistant\n"

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def script(self, session_id: str) -> Script:
        return Script(self, session_id)

    def solved(self, session_id: str, answer: str = "done", path: str = "a.txt") -> Script:
        """Two tools in parallel, then an answer; with thoughts."""
        script = self.script(session_id)
        start = [system("You are an agent."), user("Make the file.")]
        first = says(
            "I look around.",
            ("c1", "bash", {"command": "ls"}),
            ("c2", "read", {"path": path}),
            reasoning="what is here?",
        )
        parent = script.ask(start, first)
        history = [*start, first, tool("c1", "a.txt"), tool("c2", "text")]
        script.ask(history, says(answer, reasoning="all there"), parent=parent)
        return script

    def with_subagent(self, session_id: str) -> Script:
        """A main conversation that breaks by compaction, a title, and a subagent in between."""
        script = self.script(session_id)
        start = [user("Long work.")]
        parent = script.ask(start, says("step one"))
        script.ask([user("Title of: Long work.")], says("Work"), kind=CallKind.AUXILIARY)
        sub = script.ask([system("You are a helper."), user("Look.")], says("", ("s1", "bash", {"command": "pwd"})),
                         agent="helper")  # fmt: skip
        script.ask([*script.texts[sub].conversation, tool("s1", "/")], says("at the root"), parent=sub, agent="helper")
        script.ask([*start, says("step one"), user("go on")], says("step two"), parent=parent)
        script.ask([user("Summary: two steps are done. Go on.")], says("step three"))
        return script


def without_tokens(item: ExportItem) -> ExportItem:
    """As of a model that is only relayed."""
    none: Any = {"prompt_ids": np.zeros(0, np.int32), "output_ids": np.zeros(0, np.int32), "images": ()}
    none |= {"logprobs": np.zeros(0, np.float32), "versions": ()}
    calls = {call.id: replace(call, **none) for call in item.calls.values()}
    return replace(item, calls=calls, trajectory=reconstruct(list(calls.values())))


def rows_of(found: Sequence[Row | SkippedItem]) -> list[dict[str, Any]]:
    return [dict(row.values) for row in found if isinstance(row, Row)]


def reasons_of(found: Sequence[Row | SkippedItem]) -> list[str]:
    return [row.reason for row in found if isinstance(row, SkippedItem)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]
