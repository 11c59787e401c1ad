"""One harness a protocol: the vendors' own Python clients, each keeping its history as its protocol has it.

A talker resends what it got, as agents do: it never sees a token. `ask` sends a user's message, `answer` the tool's
results; both return what the model said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import anthropic
import openai
from google import genai
from google.genai import types as genai_types
from minisweagent.models.utils.actions_toolcall import BASH_TOOL

from rolltap.engine.tiny.tasks import MINI_SWE_AGENT

from .servers import MAX_TOKENS

SYSTEM: str = MINI_SWE_AGENT["agent"]["system_template"]
FUNCTION: dict[str, Any] = BASH_TOOL["function"]
NAME, SCHEMA = FUNCTION["name"], FUNCTION["parameters"]


@dataclass(frozen=True)
class Said:
    """A reply as its client read it: text, and the tool calls' ids."""

    text: str
    calls: tuple[str, ...]


class Talker(Protocol):
    def ask(self, text: str) -> Said: ...

    def answer(self, results: Mapping[str, str]) -> Said:
        """`results` is the output of each call by its id."""
        ...

    def close(self) -> None:
        """Closes the client's connections."""
        ...


@dataclass
class ChatTalker:
    """OpenAI chat completions, streamed."""

    client: openai.OpenAI
    model: str
    history: list[Any] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])

    def ask(self, text: str) -> Said:
        return self._send({"role": "user", "content": text})

    def answer(self, results: Mapping[str, str]) -> Said:
        return self._send(*({"role": "tool", "tool_call_id": id, "content": out} for id, out in results.items()))

    def close(self) -> None:
        self.client.close()

    def _send(self, *messages: Any) -> Said:
        self.history += messages
        tools: Any = [{"type": "function", "function": FUNCTION}]
        with self.client.chat.completions.stream(
            model=self.model, messages=self.history, tools=tools, max_tokens=MAX_TOKENS
        ) as stream:
            message = _until_done(stream).choices[0].message
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
            for c in message.tool_calls or ()
        ]
        self.history.append(
            {"role": "assistant", "content": message.content, **({"tool_calls": calls} if calls else {})}
        )
        return Said(message.content or "", tuple(call["id"] for call in calls))


def _until_done(stream: Any) -> Any:
    """The whole completion; a turn that hit the token limit is one too, though the client's helper raises for it."""
    try:
        return stream.get_final_completion()
    except openai.LengthFinishReasonError as limit:
        return limit.completion


@dataclass
class ResponsesTalker:
    """OpenAI Responses, streamed, resending all items."""

    client: openai.OpenAI
    model: str
    history: list[Any] = field(default_factory=list)
    previous: Any = openai.omit

    def ask(self, text: str) -> Said:
        return self._send({"role": "user", "content": text})

    def answer(self, results: Mapping[str, str]) -> Said:
        return self._send(*({"type": "function_call_output", "call_id": id, "output": o} for id, o in results.items()))

    def close(self) -> None:
        self.client.close()

    def _send(self, *items: Any) -> Said:
        self.history += items
        tools: Any = [{"type": "function", "strict": False, **FUNCTION}]
        with self.client.responses.stream(
            model=self.model,
            instructions=SYSTEM,
            input=self.history,
            tools=tools,
            max_output_tokens=MAX_TOKENS,
            previous_response_id=self.previous,
        ) as stream:
            last = list(stream)[-1]
        reply: Any = last.response  # type: ignore[union-attr]
        self._keep(reply)
        return Said(reply.output_text, tuple(item.call_id for item in reply.output if item.type == "function_call"))

    def _keep(self, reply: Any) -> None:
        self.history += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in reply.output]


@dataclass
class StatefulResponsesTalker(ResponsesTalker):
    """OpenAI Responses, sending only what is new and the former reply's id."""

    def _keep(self, reply: Any) -> None:
        self.history, self.previous = [], reply.id


@dataclass
class AnthropicTalker:
    """Anthropic messages, streamed."""

    client: anthropic.Anthropic
    model: str
    history: list[Any] = field(default_factory=list)

    def ask(self, text: str) -> Said:
        return self._send({"role": "user", "content": text})

    def answer(self, results: Mapping[str, str]) -> Said:
        blocks = [{"type": "tool_result", "tool_use_id": id, "content": out} for id, out in results.items()]
        return self._send({"role": "user", "content": blocks})

    def close(self) -> None:
        self.client.close()

    def _send(self, message: Any) -> Said:
        self.history.append(message)
        tools: Any = [{"name": NAME, "description": FUNCTION["description"], "input_schema": SCHEMA}]
        with self.client.messages.stream(
            model=self.model, system=SYSTEM, messages=self.history, tools=tools, max_tokens=MAX_TOKENS
        ) as stream:
            reply = stream.get_final_message()
        self.history.append({"role": "assistant", "content": reply.content})
        text = "".join(block.text for block in reply.content if block.type == "text")
        return Said(text, tuple(block.id for block in reply.content if block.type == "tool_use"))


@dataclass
class GeminiTalker:
    """Gemini generateContent, not streamed."""

    client: genai.Client
    model: str
    history: list[genai_types.Content] = field(default_factory=list)

    def ask(self, text: str) -> Said:
        return self._send(genai_types.Part(text=text))

    def answer(self, results: Mapping[str, str]) -> Said:
        response = genai_types.FunctionResponse
        return self._send(
            *(
                genai_types.Part(function_response=response(id=id, name=NAME, response={"output": out}))
                for id, out in results.items()
            )
        )

    def close(self) -> None:
        self.client.close()

    def _send(self, *parts: genai_types.Part) -> Said:
        self.history.append(genai_types.Content(role="user", parts=list(parts)))
        declared = genai_types.FunctionDeclaration(
            name=NAME, description=FUNCTION["description"], parameters_json_schema=SCHEMA
        )
        config = genai_types.GenerateContentConfig(
            system_instruction=SYSTEM,
            max_output_tokens=MAX_TOKENS,
            tools=[genai_types.Tool(function_declarations=[declared])],
            automatic_function_calling=genai_types.AutomaticFunctionCallingConfig(disable=True),
        )
        contents: Any = self.history
        reply = self.client.models.generate_content(model=self.model, contents=contents, config=config)
        assert reply.candidates
        content = reply.candidates[0].content
        assert content is not None
        self.history.append(content)
        parts_said = content.parts or []
        text = "".join(part.text or "" for part in parts_said if not part.thought)
        return Said(text, tuple(call.id or "" for call in reply.function_calls or []))


def _openai(session: Mapping[str, str]) -> openai.OpenAI:
    return openai.OpenAI(base_url=session["base_url"] + "/v1", api_key=session["key"], max_retries=0)


def chat(session: Mapping[str, str]) -> Talker:
    return ChatTalker(_openai(session), session["policy"])


def responses(session: Mapping[str, str]) -> Talker:
    return ResponsesTalker(_openai(session), session["policy"])


def stateful_responses(session: Mapping[str, str]) -> Talker:
    return StatefulResponsesTalker(_openai(session), session["policy"])


def messages(session: Mapping[str, str]) -> Talker:
    client = anthropic.Anthropic(base_url=session["base_url"], api_key=session["key"], max_retries=0)
    return AnthropicTalker(client, session["policy"])


def gemini(session: Mapping[str, str]) -> Talker:
    client = genai.Client(api_key=session["key"], http_options={"base_url": session["base_url"]})
    return GeminiTalker(client, session["policy"])


TALKERS: dict[str, Callable[[Mapping[str, str]], Talker]] = {
    "chat": chat,
    "responses": responses,
    "responses by id": stateful_responses,
    "messages": messages,
    "gemini": gemini,
}
