"""Request shapes of real harnesses: small clients that send what real releases were seen to send.

Each holds one conversation in its harness's own protocol: which roles its messages have and in what order, what of a
reply it sends back and how it writes it anew. The texts are made up. Real releases run in the harness stage
(`tests/harnesses/test_families.py`); these clients need no installation, so that every family can be tried in seconds.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rolltap.engine.scripted import ToolUse

JsonObject = dict[str, Any]

SYSTEM = "You are a coding agent. You work in the folder /work and call tools until the task is done."
RULES = "<permissions>\nYou may change files in /work. The network is closed.\n</permissions>"
ENVIRONMENT = "<environment>\n  <cwd>/work</cwd>\n  <shell>bash</shell>\n  <date>2026-11-21</date>\n</environment>"
REMINDER = "<system-reminder>\nThe user may have changed files.\n</system-reminder>"
NOTICE = "The sandbox is now read only outside of /work."
SUMMARIZE = "Write a detailed summary of the conversation so far."
PATH_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    "required": ["path"],
}
SCRIPT_SCHEMA: JsonObject = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "args": {"description": "Any JSON value, exposed to the script."},
        "turns": {"oneOf": [{"type": "string", "enum": ["all"]}, {"type": "string", "pattern": "^[1-9][0-9]*$"}]},
    },
    "additionalProperties": False,
}


@dataclass(frozen=True)
class RecordedCall:
    """A tool call that a harness has read from a reply. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str

    @property
    def command(self) -> str:
        """The shell's command."""
        value = next(iter(json.loads(self.arguments).values()), "")
        return value[0] if isinstance(value, list) else value


@dataclass(frozen=True)
class RecordedReply:
    """What a harness has read of a reply."""

    text: str
    calls: list[RecordedCall]


@dataclass(frozen=True)
class RecordedRequest:
    """`path` is relative to the session's base URL."""

    path: str
    body: JsonObject


@dataclass
class RecordedHarness(ABC):
    """The conversation of one harness. `model` is the name that its requests ask for.

    `ask` and `notify` add to the conversation, `request` is what the harness then sends, `take` reads the reply (the
    events of its stream, or its one body), whose calls are to be answered with `answer`.
    """

    model: str
    items: list[JsonObject] = field(default_factory=list)

    name: ClassVar[str]
    shell: ClassVar[str] = "bash"
    argument: ClassVar[str] = "command"
    type: ClassVar[JsonObject] = {"type": "string"}
    """The schema of the shell's argument: a text, or a list of texts."""
    notifies: ClassVar[bool] = False
    """Whether it sends system or developer messages in mid-session."""
    compacts: ClassVar[bool] = False
    finish: ClassVar[str] = ""
    """The command that ends its task."""

    @abstractmethod
    def ask(self, prompt: str) -> None:
        """The user's first or next prompt."""

    @abstractmethod
    def request(self) -> RecordedRequest: ...

    @abstractmethod
    def take(self, events: Sequence[JsonObject]) -> RecordedReply: ...

    @abstractmethod
    def answer(self, calls: Sequence[RecordedCall], outputs: Sequence[tuple[str, bool]]) -> None:
        """The tools' outputs in the order of `calls`, each with whether the tool failed."""

    def notify(self, text: str) -> None:
        raise NotImplementedError(self.name)

    def ask_summary(self) -> RecordedRequest:
        """The request for a summary of the conversation."""
        raise NotImplementedError(self.name)

    def compact(self, summary: str) -> None:
        """Replaces the conversation by `summary`."""
        raise NotImplementedError(self.name)

    @classmethod
    def use(cls, command: str) -> ToolUse:
        """The model's call of the shell."""
        return ToolUse(tool=cls.shell, arguments={cls.argument: [command] if cls.type["type"] == "array" else command})

    def schemas(self) -> list[tuple[str, JsonObject]]:
        shell = {"type": "object", "properties": {self.argument: self.type}, "required": [self.argument]}
        return [(self.shell, shell), ("read_file", PATH_SCHEMA), ("run_script", SCRIPT_SCHEMA)]


class Codex(RecordedHarness):
    """Instructions, then a developer item; the environment and the prompt are two users' items."""

    name = "codex"
    shell = "exec_command"
    argument = "cmd"
    notifies = True
    compacts = True

    def ask(self, prompt: str) -> None:
        if not self.items:
            self.items += [_item("developer", RULES, ENVIRONMENT), _item("user", ENVIRONMENT)]
        self.items.append(_item("user", prompt))

    def request(self) -> RecordedRequest:
        return self._request(self.items, tools=True)

    def _request(self, items: list[JsonObject], *, tools: bool) -> RecordedRequest:
        body: JsonObject = {
            "model": self.model,
            "instructions": SYSTEM,
            "input": items,
            "tools": [
                {
                    "type": "function",
                    "name": name,
                    "description": f"Runs {name}.",
                    "strict": False,
                    "parameters": schema,
                }
                for name, schema in (self.schemas() if tools else [])
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": tools,
            "reasoning": {"summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "01a1fbf1-5b68-7de3-af25-4afd6ef7084e",
        }
        return RecordedRequest("/v1/responses", body)

    def take(self, events: Sequence[JsonObject]) -> RecordedReply:
        (response,) = (event["response"] for event in events if event["type"] == "response.completed")
        text, calls = "", list[RecordedCall]()
        for item in response["output"]:
            if item["type"] == "reasoning":
                kept = {key: item.get(key) for key in ("type", "id", "summary", "encrypted_content")}
                self.items.append({**kept, "content": None})
                continue
            self.items.append(item)
            if item["type"] == "function_call":
                calls.append(RecordedCall(item["call_id"], item["name"], item["arguments"]))
            else:
                text += "".join(part["text"] for part in item["content"])
        return RecordedReply(text, calls)

    def answer(self, calls: Sequence[RecordedCall], outputs: Sequence[tuple[str, bool]]) -> None:
        for call, (text, failed) in zip(calls, outputs, strict=True):
            output = f"Wall time: 0.0000 seconds\nProcess exited with code {int(failed)}\nOutput:\n{text}"
            self.items.append({"type": "function_call_output", "call_id": call.id, "output": output})

    def notify(self, text: str) -> None:
        self.items.append(_item("developer", text))

    def ask_summary(self) -> RecordedRequest:
        return self._request([*self.items, _item("user", SUMMARIZE)], tools=False)

    def compact(self, summary: str) -> None:
        self.items = [_item("developer", RULES, ENVIRONMENT), _item("user", ENVIRONMENT), _item("user", summary)]


def _item(role: str, *texts: str) -> JsonObject:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text} for text in texts]}


class ClaudeCode(RecordedHarness):
    """A system message after the first user's message, others in mid-session; a cache breakpoint that moves."""

    name = "claude-code"
    shell = "Bash"
    notifies = True
    compacts = True

    def ask(self, prompt: str) -> None:
        if not self.items:
            self.items.append({"role": "user", "content": [_block(REMINDER), _block(ENVIRONMENT), _block(prompt)]})
            self.items.append({"role": "system", "content": [_block(f"# Environment\n{RULES}")]})
        else:
            self.items.append({"role": "user", "content": [_block(prompt)]})

    def request(self) -> RecordedRequest:
        last = self.items[-1]
        marked = [*last["content"][:-1], {**last["content"][-1], "cache_control": {"type": "ephemeral"}}]
        messages = [*map(_flattened, self.items[:-1]), {**last, "content": marked}]
        system = [_block(SYSTEM), {**_block("Be brief."), "cache_control": {"type": "ephemeral"}}]
        body: JsonObject = {
            "model": self.model,
            "system": system,
            "messages": messages,
            "tools": [
                {"name": name, "description": f"Runs {name}.", "input_schema": schema}
                for name, schema in self.schemas()
            ],
            "max_tokens": 32_000,
            "thinking": {"type": "adaptive", "display": "summarized"},
            "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
            "stream": True,
        }
        return RecordedRequest("/v1/messages?beta=true", body)

    def take(self, events: Sequence[JsonObject]) -> RecordedReply:
        blocks: dict[int, JsonObject] = {}
        for event in events:
            if event["type"] == "content_block_start":
                blocks[event["index"]] = {**event["content_block"], "json": ""}
            elif event["type"] == "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                for key, kind in (("thinking", "thinking"), ("text", "text"), ("signature", "signature")):
                    block |= {kind: block.get(kind, "") + delta[key]} if key in delta else {}
                block["json"] += delta.get("partial_json", "")
        calls: list[RecordedCall] = []
        for block in blocks.values():
            written = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(written or "{}")
                calls.append(RecordedCall(block["id"], block["name"], json.dumps(block["input"])))
        self.items.append({"role": "assistant", "content": list(blocks.values())})
        return RecordedReply("".join(block["text"] for block in blocks.values() if "text" in block), calls)

    def answer(self, calls: Sequence[RecordedCall], outputs: Sequence[tuple[str, bool]]) -> None:
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": text, "is_error": failed}
            for call, (text, failed) in zip(calls, outputs, strict=True)
        ]
        self.items.append({"role": "user", "content": results})

    def notify(self, text: str) -> None:
        self.items.append({"role": "system", "content": [_block(text)]})

    def ask_summary(self) -> RecordedRequest:
        kept = self.items
        try:
            self.items = [*kept, {"role": "user", "content": [_block(SUMMARIZE)]}]
            return self.request()
        finally:
            self.items = kept

    def compact(self, summary: str) -> None:
        self.items = [
            {"role": "user", "content": [_block(REMINDER), _block(summary)]},
            {"role": "system", "content": [_block(f"# Environment\n{RULES}")]},
        ]


def _block(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def _flattened(message: JsonObject) -> JsonObject:
    """A system message loses its list of blocks when the cache breakpoint has moved on."""
    if message["role"] != "system":
        return message
    return {**message, "content": "".join(block["text"] for block in message["content"])}


class GeminiCli(RecordedHarness):
    """The session's context and the prompt in one user's message; thoughts are dropped, their signatures kept."""

    name = "gemini-cli"
    shell = "run_shell_command"

    def ask(self, prompt: str) -> None:
        texts = (ENVIRONMENT, prompt) if not self.items else (prompt,)
        self.items.append({"role": "user", "parts": [{"text": text} for text in texts]})

    def request(self) -> RecordedRequest:
        declarations = [
            {"name": name, "description": f"Runs {name}.", "parametersJsonSchema": schema}
            for name, schema in self.schemas()
        ]
        body: JsonObject = {
            "contents": self.items,
            "systemInstruction": {"role": "user", "parts": [{"text": SYSTEM}]},
            "tools": [{"functionDeclarations": declarations}],
            "generationConfig": {
                "temperature": 1,
                "topP": 0.95,
                "topK": 64,
                "thinkingConfig": {"includeThoughts": True},
            },
        }
        return RecordedRequest(f"/v1beta/models/{self.model}:streamGenerateContent?alt=sse", body)

    def take(self, events: Sequence[JsonObject]) -> RecordedReply:
        parts: list[JsonObject] = []
        calls: list[RecordedCall] = []
        for event in events:
            for part in event["candidates"][0].get("content", {}).get("parts", []):
                if part.get("thought"):
                    continue
                if "functionCall" in part:
                    call = part["functionCall"]
                    calls.append(RecordedCall(call["id"], call["name"], json.dumps(call["args"])))
                    parts.append(part)
                elif parts and part.keys() == {"text"} == parts[-1].keys():
                    parts[-1] = {"text": parts[-1]["text"] + part["text"]}
                else:
                    parts.append(part)
        self.items.append({"role": "model", "parts": parts or [{"text": ""}]})
        return RecordedReply("".join(part.get("text", "") for part in parts), calls)

    def answer(self, calls: Sequence[RecordedCall], outputs: Sequence[tuple[str, bool]]) -> None:
        responses = [
            {
                "functionResponse": {
                    "id": call.id,
                    "name": call.name,
                    "response": {
                        "error" if failed else "output": f"<untrusted_context>\nOutput: {text}\n</untrusted_context>"
                    },
                }
            }
            for call, (text, failed) in zip(calls, outputs, strict=True)
        ]
        self.items.append({"role": "user", "parts": responses})


class RecordedChat(RecordedHarness):
    """A harness that speaks Chat Completions. Subclasses say in what they differ."""

    system_role: ClassVar[str] = "system"
    streams: ClassVar[bool] = True
    fields: ClassVar[Mapping[str, Any]] = {}
    preface: ClassVar[tuple[str, ...]] = ()
    """Texts before the first prompt, as parts of its message."""

    def ask(self, prompt: str) -> None:
        if not self.items:
            self.items.append({"role": self.system_role, "content": SYSTEM})
            self.items.append({"role": "user", "content": self.content(*self.preface, prompt)})
        else:
            self.items.append({"role": "user", "content": self.content(prompt)})

    def content(self, *texts: str) -> Any:
        return [_block(text) for text in texts]

    def request(self) -> RecordedRequest:
        body: JsonObject = {
            "model": self.model,
            "messages": self.items,
            "tools": [
                {"type": "function", "function": {"name": name, "description": f"Runs {name}.", "parameters": schema}}
                for name, schema in self.schemas()
            ],
            **self.fields,
        }
        if self.streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return RecordedRequest("/v1/chat/completions", body)

    def take(self, events: Sequence[JsonObject]) -> RecordedReply:
        text, reasoning = "", ""
        found: dict[int, JsonObject] = {}
        for event in events:
            for choice in event["choices"]:
                delta = choice.get("delta") or choice.get("message") or {}
                text += delta.get("content") or ""
                reasoning += delta.get("reasoning_content") or ""
                for at, piece in enumerate(delta.get("tool_calls") or ()):
                    call = found.setdefault(piece.get("index", at), {"id": "", "name": "", "arguments": ""})
                    call["id"] = piece.get("id") or call["id"]
                    for key in ("name", "arguments"):
                        call[key] += piece["function"].get(key) or ""
        calls = [RecordedCall(**call) for call in found.values()]
        self.items.append(self.echo(text, reasoning, calls))
        return RecordedReply(text, calls)

    def echo(self, text: str, reasoning: str, calls: Sequence[RecordedCall]) -> JsonObject:
        """The turn as the harness sends it back: arguments re-serialised, reasoning kept."""
        turn: JsonObject = {"role": "assistant", "content": text or None}
        if reasoning:
            turn["reasoning_content"] = reasoning
        if calls:
            turn["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": self.rewritten(call)}}
                for call in calls
            ]
        return turn

    def rewritten(self, call: RecordedCall) -> str:
        return json.dumps(json.loads(call.arguments), separators=(",", ":"), ensure_ascii=False)

    def answer(self, calls: Sequence[RecordedCall], outputs: Sequence[tuple[str, bool]]) -> None:
        for call, (text, failed) in zip(calls, outputs, strict=True):
            content = self.result(f"{text}\nExit code: {int(failed)}")
            self.items.append({"role": "tool", "tool_call_id": call.id, "content": content})

    def result(self, text: str) -> Any:
        return text


class OpenCode(RecordedChat):
    """The prompt in literal quotes."""

    name = "opencode"
    fields: ClassVar = {"max_tokens": 32_000}
    compacts = True

    def ask(self, prompt: str) -> None:
        super().ask(f'"{prompt}"')

    def content(self, *texts: str) -> Any:
        return "\n".join(texts)

    def ask_summary(self) -> RecordedRequest:
        request = self.request()
        del request.body["tools"]
        system = {"role": "system", "content": "You are a context summarization agent."}
        request.body["messages"] = [system, *self.items[1:], {"role": "user", "content": SUMMARIZE}]
        return request

    def compact(self, summary: str) -> None:
        user, turn = {"role": "user", "content": "What did we do so far?"}, {"role": "assistant", "content": summary}
        self.items = [self.items[0], user, turn]


class Pi(RecordedChat):
    """Its instructions come from a developer."""

    name = "pi"
    system_role = "developer"
    fields: ClassVar = {"store": False, "max_completion_tokens": 8192, "reasoning_effort": "medium"}


class QwenCode(RecordedChat):
    """Reminders as parts before the prompt, results as parts, reasoning trimmed."""

    name = "qwen-code"
    shell = "run_shell_command"
    fields: ClassVar = {"max_tokens": 32_000}
    preface = (REMINDER, ENVIRONMENT)

    def echo(self, text: str, reasoning: str, calls: Sequence[RecordedCall]) -> JsonObject:
        return super().echo(text, reasoning.strip(), calls)

    def result(self, text: str) -> Any:
        return [_block(f"Directory: (root)\nOutput: {text}")]


class MiniSweAgent(RecordedChat):
    """Not streamed; arguments as they came."""

    name = "mini-swe-agent"
    streams = False
    finish = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

    def content(self, *texts: str) -> Any:
        return "\n".join(texts)

    def rewritten(self, call: RecordedCall) -> str:
        return call.arguments

    def echo(self, text: str, reasoning: str, calls: Sequence[RecordedCall]) -> JsonObject:
        return {**super().echo(text, reasoning, calls), "provider_specific_fields": {"refusal": None}}

    def result(self, text: str) -> Any:
        return json.dumps({"returncode": 0, "output": text}, indent=2)


class Cline(RecordedChat):
    """A shell that takes a list of commands; results as JSON."""

    name = "cline"
    shell = "run_commands"
    argument = "commands"
    type: ClassVar = {"type": "array", "items": {"type": "string"}}
    fields: ClassVar = {"tool_choice": "auto"}

    def content(self, *texts: str) -> Any:
        return "\n".join(texts)

    def result(self, text: str) -> Any:
        return json.dumps([{"result": text, "success": True}])


RECORDED: Mapping[str, type[RecordedHarness]] = {
    harness.name: harness for harness in (Codex, ClaudeCode, OpenCode, Pi, QwenCode, GeminiCli, MiniSweAgent, Cline)
}
