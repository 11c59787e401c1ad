"""The vendors' own Python clients read what the dialects write, and send it back so that it is known again.

The clients run for real, over HTTP, against a server that holds nothing but the dialects and a scripted reply.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from google import genai
from google.genai import errors as genai_errors
from google.genai import types as genai_types

from rolltap.errors import ContextOverflow, InvalidRequest, RateLimited, SessionClosed
from rolltap.protocols.conversation import Choice, Message, Reasoning, Text, TokenLogprob, ToolCall
from rolltap.proxy.continuation.canonical import message_digest, thought_digest

from .sdk_server import ARGUMENTS, FIRST, HANDLE, REPLY, SCHEMA, SECOND, Server


def assert_known_again(echoed: Message, *, thinking: bool = True) -> None:
    """The echoed turn is the recorded one: equal in meaning, and naming its call."""
    assert message_digest(echoed) == message_digest(REPLY)
    assert thought_digest(echoed) in (b"", thought_digest(REPLY))
    assert not thinking or echoed.reasoning == REPLY.reasoning
    assert [call.id for call in echoed.tool_calls] == [FIRST, SECOND]


CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]


def test_openai_chat_whole(server: Server, openai_client: openai.OpenAI) -> None:
    history: list[Any] = [{"role": "user", "content": "Look."}]
    reply = openai_client.chat.completions.create(model="gardener", messages=history, tools=CHAT_TOOLS)
    message = reply.choices[0].message
    assert (message.content, reply.choices[0].finish_reason) == ("I look.", "tool_calls")
    assert [call.function.arguments for call in message.tool_calls or [] if call.type == "function"] == [
        ARGUMENTS,
        "{}",
    ]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert (reply.usage.total_tokens, reply.usage.prompt_tokens_details.cached_tokens) == (52, 30)
    results: list[Any] = [{"role": "tool", "tool_call_id": id, "content": "soil"} for id in (FIRST, SECOND)]
    echo: Any = [*history, message, *results]
    openai_client.chat.completions.create(model="gardener", messages=echo, tools=CHAT_TOOLS)
    assert_known_again(server.seen[1].messages[1])
    assert [entry.name for entry in server.seen[1].messages[2:]] == ["look", "look"]


def test_openai_chat_stream(server: Server, openai_client: openai.OpenAI) -> None:
    history: list[Any] = [{"role": "user", "content": "Look."}]
    options: Any = {"include_usage": True}
    with openai_client.chat.completions.stream(
        model="gardener", messages=history, tools=CHAT_TOOLS, stream_options=options
    ) as stream:
        final = stream.get_final_completion()
    message = final.choices[0].message
    assert (message.content, final.choices[0].finish_reason) == ("I look.", "tool_calls")
    assert final.usage is not None
    assert final.usage.completion_tokens == 12
    echo: Any = message.model_dump(exclude_none=True)
    openai_client.chat.completions.create(model="gardener", messages=[*history, echo], tools=CHAT_TOOLS)
    assert_known_again(server.seen[1].messages[1])


def test_openai_chat_gives_the_log_probs_that_were_asked_for(server: Server, openai_client: openai.OpenAI) -> None:
    entries = (TokenLogprob("I", -0.5, (("I", -0.5), ("We", -2.0))), TokenLogprob(" look.", -0.125))
    server.choice = Choice(Message("assistant", (Text("I look."),)), "stop", logprobs=entries)
    history: list[Any] = [{"role": "user", "content": "Look."}]
    reply = openai_client.chat.completions.create(model="m", messages=history, logprobs=True, top_logprobs=2)
    assert server.seen[0].sampling.top_logprobs == 2
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert [(entry.token, entry.logprob) for entry in logprobs.content or []] == [("I", -0.5), (" look.", -0.125)]
    assert [top.token for top in (logprobs.content or [])[0].top_logprobs] == ["I", "We"]


def test_openai_chat_errors(server: Server, openai_client: openai.OpenAI) -> None:
    history: list[Any] = [{"role": "user", "content": "Look."}]
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.chat.completions.create(model="m", messages=history, extra_body={"functions": [{"name": "look"}]})
    assert (refused.value.param, refused.value.code) == ("functions", "invalid_request")
    server.errors = [ContextOverflow("too long", tokens=900, limit=512)]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as overflow:
        openai_client.chat.completions.create(model="m", messages=history)
    assert overflow.value.code == "context_length_exceeded"
    server.errors = [RateLimited("wait", retry_after=0.01)]
    assert openai_client.chat.completions.create(model="m", messages=history).choices


def test_the_sdks_do_not_repeat_a_final_refusal(
    server: Server, openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic
) -> None:
    history: list[Any] = [{"role": "user", "content": "Look."}]
    server.errors = [SessionClosed("closed")]
    with pytest.raises(openai.ConflictError, match="closed"):
        openai_client.chat.completions.create(model="m", messages=history)
    server.errors = [SessionClosed("closed")]
    with pytest.raises(anthropic.ConflictError, match="closed"):
        anthropic_client.messages.create(model="m", max_tokens=10, messages=history)


def test_openai_models(openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic) -> None:
    assert [model.id for model in openai_client.models.list()] == ["gardener"]
    assert openai_client.models.retrieve("gardener").owned_by == "rolltap"
    assert [model.display_name for model in anthropic_client.models.list()] == ["gardener"]
    with pytest.raises(openai.NotFoundError, match="served: gardener"):
        openai_client.models.retrieve("cook")


RESPONSES_TOOLS: Any = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}]


def test_openai_responses_whole(server: Server, openai_client: openai.OpenAI) -> None:
    history: list[Any] = [{"role": "user", "content": "Look."}]
    reply = openai_client.responses.create(
        model="gardener", input=history, tools=RESPONSES_TOOLS, include=["reasoning.encrypted_content"]
    )
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "function_call"]
    assert reply.output_text == "I look."
    assert reply.usage is not None
    assert (reply.usage.input_tokens, reply.usage.input_tokens_details.cached_tokens) == (40, 30)
    results: list[Any] = [{"type": "function_call_output", "call_id": id, "output": "soil"} for id in (FIRST, SECOND)]
    echo: Any = [*history, *reply.output, *results]
    openai_client.responses.create(model="gardener", input=echo, tools=RESPONSES_TOOLS)
    echoed = server.seen[1].messages[1]
    assert_known_again(echoed)
    assert HANDLE in (echoed.handle or "")
    assert [part.handle for part in echoed.parts if isinstance(part, Reasoning)] == [HANDLE]
    openai_client.responses.create(model="gardener", input="Go on.", previous_response_id=reply.id)
    assert server.seen[2].previous == reply.id
    assert HANDLE in reply.id


def test_openai_responses_stream(server: Server, openai_client: openai.OpenAI) -> None:
    with openai_client.responses.stream(model="gardener", input="Look.", tools=RESPONSES_TOOLS) as stream:
        numbers = [event.sequence_number for event in stream]
        final = stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    assert (final.status, final.output_text) == ("completed", "I look.")
    calls = [item for item in final.output if item.type == "function_call"]
    assert [(call.call_id, call.arguments) for call in calls] == [(FIRST, ARGUMENTS), (SECOND, "{}")]
    echo: list[Any] = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in final.output]
    openai_client.responses.create(model="gardener", input=[{"role": "user", "content": "Look."}, *echo])
    assert_known_again(server.seen[1].messages[1])


def test_openai_responses_that_hit_the_limit_are_incomplete(server: Server, openai_client: openai.OpenAI) -> None:
    server.choice = Choice(Message("assistant", (Text("I lo"),)), "length")
    reply = openai_client.responses.create(model="m", input="Look.")
    assert (reply.status, reply.incomplete_details and reply.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    last = list(openai_client.responses.create(model="m", input="Look.", stream=True))[-1]
    assert last.type == "response.incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_openai_response_is_sent_back_as_a_turn(
    server: Server, openai_client: openai.OpenAI, stream: bool
) -> None:
    server.choice = Choice(Message("assistant"), "stop")
    history: list[Any] = [{"role": "user", "content": "Look."}]
    if stream:
        with openai_client.responses.stream(model="m", input=history) as events:
            reply: Any = events.get_final_response()
    else:
        reply = openai_client.responses.create(model="m", input=history)
    assert reply.output_text == ""
    echo: Any = [*history, *(item.to_dict() for item in reply.output), {"role": "user", "content": "Go on."}]
    openai_client.responses.create(model="m", input=echo)
    echoed = server.seen[1].messages
    assert [message.role for message in echoed] == ["user", "assistant", "user"]
    assert message_digest(echoed[1]) == message_digest(server.choice.message)
    assert HANDLE in (echoed[1].handle or "")


def test_openai_completions(openai_client: openai.OpenAI) -> None:
    assert openai_client.completions.create(model="m", prompt="Look.").choices[0].text == "I look."
    chunks = list(openai_client.completions.create(model="m", prompt="Look.", stream=True))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "I look."


ANTHROPIC_TOOLS: Any = [{"name": "look", "input_schema": SCHEMA}]


def test_anthropic_whole(server: Server, anthropic_client: anthropic.Anthropic) -> None:
    history: list[Any] = [{"role": "user", "content": "Look."}]
    reply = anthropic_client.messages.create(
        model="gardener", max_tokens=99, messages=history, tools=ANTHROPIC_TOOLS, system="Be brief."
    )
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert reply.stop_reason == "tool_use"
    assert (reply.usage.input_tokens, reply.usage.cache_read_input_tokens, reply.usage.output_tokens) == (10, 30, 12)
    results = [{"type": "tool_result", "tool_use_id": id, "content": "soil"} for id in (FIRST, SECOND)]
    echo: list[Any] = [*history, {"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    anthropic_client.messages.create(model="gardener", max_tokens=99, messages=echo, system="Be brief.")
    assert [message.role for message in server.seen[1].messages] == ["system", "user", "assistant", "tool", "tool"]
    echoed = server.seen[1].messages[2]
    assert_known_again(echoed)
    assert [part.handle for part in echoed.parts if isinstance(part, Reasoning)] == [HANDLE]


def test_anthropic_stream(server: Server, anthropic_client: anthropic.Anthropic) -> None:
    history: list[Any] = [{"role": "user", "content": "Look."}]
    with anthropic_client.messages.stream(
        model="gardener", max_tokens=99, messages=history, tools=ANTHROPIC_TOOLS
    ) as stream:
        assert "".join(stream.text_stream) == "I look."
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert (final.usage.output_tokens, final.usage.cache_read_input_tokens) == (12, 30)
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"place": "shed"}, {}]
    results = [{"type": "tool_result", "tool_use_id": id, "content": "soil"} for id in (FIRST, SECOND)]
    echo: list[Any] = [*history, {"role": "assistant", "content": final.content}, {"role": "user", "content": results}]
    anthropic_client.messages.create(model="gardener", max_tokens=99, messages=echo)
    assert_known_again(server.seen[1].messages[1])


def test_anthropic_counts_tokens_and_tells_a_stop_sequence(
    server: Server, anthropic_client: anthropic.Anthropic
) -> None:
    history: list[Any] = [{"role": "user", "content": "Look."}]
    assert anthropic_client.messages.count_tokens(model="m", messages=history).input_tokens == 40
    server.choice = Choice(Message("assistant", (Text("I look"),)), "stop", stop=".")
    reply = anthropic_client.messages.create(model="m", max_tokens=9, messages=history, stop_sequences=["."])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", ".")


def test_anthropic_errors(server: Server, anthropic_client: anthropic.Anthropic) -> None:
    history: list[Any] = [{"role": "user", "content": "Look."}]
    server.errors = [ContextOverflow("too long", tokens=900, limit=512)]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 900 tokens > 512 maximum"):
        anthropic_client.messages.create(model="m", max_tokens=9, messages=history)
    server.errors = [InvalidRequest("tools: no", param="tools")] * 2
    with pytest.raises(anthropic.BadRequestError, match="tools: no"):
        anthropic_client.messages.create(model="m", max_tokens=9, messages=history)
    server.errors = [RateLimited("wait", retry_after=0.01)]
    assert anthropic_client.messages.create(model="m", max_tokens=9, messages=history).content


CUT = '{"place": "shed", "depth": [1, '


@pytest.mark.parametrize("finish", ["length", "stop"])
def test_a_call_that_was_cut_off_is_the_same_streamed_and_whole(
    server: Server,
    openai_client: openai.OpenAI,
    anthropic_client: anthropic.Anthropic,
    gemini_client: genai.Client,
    finish: Any,
) -> None:
    """Its arguments are no JSON, which every client is told in its own way; sent back, it is known again."""
    server.choice = Choice(Message("assistant", (), (ToolCall(FIRST, "look", CUT),), handle=HANDLE), finish)
    history: list[Any] = [{"role": "user", "content": "Look."}]
    asked: Any = {"model": "m", "messages": history, "tools": CHAT_TOOLS}
    deltas = [chunk.choices[0] for chunk in openai_client.chat.completions.create(**asked, stream=True)]
    calls = [call.function for delta in deltas for call in delta.delta.tool_calls or []]
    whole = openai_client.chat.completions.create(**asked).choices[0]
    assert deltas[-1].finish_reason == whole.finish_reason == finish
    assert [call.function.arguments for call in whole.message.tool_calls or [] if call.type == "function"] == [CUT]
    assert "".join(call.arguments or "" for call in calls if call is not None) == CUT

    asked = {"model": "m", "input": history, "tools": RESPONSES_TOOLS}
    last: Any = list(openai_client.responses.create(**asked, stream=True))[-1]
    assert last.type == ("response.incomplete" if finish == "length" else "response.completed")
    response = openai_client.responses.create(**asked)
    assert response.output == last.response.output
    assert [(item.arguments, item.status) for item in response.output if item.type == "function_call"] == [
        (CUT, "incomplete")
    ]

    asked = {"model": "m", "max_tokens": 9, "messages": history, "tools": ANTHROPIC_TOOLS}
    with anthropic_client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    said = anthropic_client.messages.create(**asked)
    assert final.stop_reason == said.stop_reason == ("max_tokens" if finish == "length" else "end_turn")
    inputs = [[block.input for block in reply.content if block.type == "tool_use"] for reply in (final, said)]
    assert inputs[0] == inputs[1] == [{"place": "shed", "depth": [1]}]
    results = [{"type": "tool_result", "tool_use_id": FIRST, "content": "cut off"}]
    echo: list[Any] = [*history, {"role": "assistant", "content": said.content}, {"role": "user", "content": results}]
    anthropic_client.messages.create(model="m", max_tokens=9, messages=echo, tools=ANTHROPIC_TOOLS)
    assert message_digest(server.seen[-1].messages[1]) == message_digest(server.choice.message)

    contents: list[Any] = [user(genai_types.Part(text="Look."))]
    reply = gemini_client.models.generate_content(model="m", contents=contents, config=gemini_config())
    chunks = gemini_client.models.generate_content_stream(model="m", contents=contents, config=gemini_config())
    *_, chunk = chunks
    assert [call.args for call in chunk.function_calls or []] == [call.args for call in reply.function_calls or []]
    assert reply.candidates
    contents += [reply.candidates[0].content, user(genai_types.Part(text="Go on."))]
    gemini_client.models.generate_content(model="m", contents=contents, config=gemini_config())
    assert server.seen[-1].messages[2].tool_calls[0].arguments == CUT


def gemini_config(**settings: Any) -> genai_types.GenerateContentConfig:
    declared = genai_types.FunctionDeclaration(name="look", parameters_json_schema=SCHEMA)
    return genai_types.GenerateContentConfig(
        system_instruction="Be brief.",
        tools=[genai_types.Tool(function_declarations=[declared])],
        thinking_config=genai_types.ThinkingConfig(include_thoughts=True),
        **settings,
    )


def user(*parts: genai_types.Part) -> genai_types.Content:
    return genai_types.Content(role="user", parts=list(parts))


def test_gemini_whole(server: Server, gemini_client: genai.Client) -> None:
    question = user(genai_types.Part(text="Look."))
    reply = gemini_client.models.generate_content(model="gardener", contents=[question], config=gemini_config())
    assert reply.text == "I look."
    assert [(call.id, call.args) for call in reply.function_calls or []] == [(FIRST, {"place": "shed"}), (SECOND, {})]
    assert reply.usage_metadata is not None
    assert reply.usage_metadata.thoughts_token_count == 5
    assert reply.usage_metadata.total_token_count == 52
    assert reply.candidates
    assert reply.candidates[0].content is not None
    results = [
        genai_types.Part(
            function_response=genai_types.FunctionResponse(id=id, name="look", response={"output": "soil"})
        )
        for id in (FIRST, SECOND)
    ]
    contents: list[Any] = [question, reply.candidates[0].content, user(*results)]
    gemini_client.models.generate_content(model="gardener", contents=contents, config=gemini_config())
    assert [message.role for message in server.seen[1].messages] == ["system", "user", "assistant", "tool", "tool"]
    echoed = server.seen[1].messages[2]
    assert_known_again(echoed)
    assert echoed.handle == HANDLE
    assert server.seen[1].messages[3].text == "soil"


def test_gemini_stream(server: Server, gemini_client: genai.Client) -> None:
    chunks = list(
        gemini_client.models.generate_content_stream(model="gardener", contents="Look.", config=gemini_config())
    )
    contents = [chunk.candidates[0].content for chunk in chunks if chunk.candidates]
    parts = [part for content in contents if content is not None for part in content.parts or []]
    assert "".join(part.text or "" for part in parts if not part.thought) == "I look."
    assert "".join(part.text or "" for part in parts if part.thought) == "Two places."
    assert chunks[-1].candidates
    assert chunks[-1].candidates[0].finish_reason == genai_types.FinishReason.STOP
    echo = genai_types.Content(role="model", parts=parts)
    gemini_client.models.generate_content(
        model="gardener", contents=[user(genai_types.Part(text="Look.")), echo, user(genai_types.Part(text="And?"))]
    )
    assert_known_again(server.seen[1].messages[1])


def test_gemini_without_thoughts_sends_none(server: Server, gemini_client: genai.Client) -> None:
    reply = gemini_client.models.generate_content(model="gardener", contents="Look.")
    assert reply.candidates
    assert reply.candidates[0].content is not None
    assert not any(part.thought for part in reply.candidates[0].content.parts or [])
    assert server.seen[0].sampling.thinking is None


def test_gemini_counts_lists_and_refuses(server: Server, gemini_client: genai.Client) -> None:
    assert gemini_client.models.count_tokens(model="gardener", contents="Look.").total_tokens == 40
    assert [model.name for model in gemini_client.models.list()] == ["models/gardener"]
    server.errors = [ContextOverflow("too long", tokens=900, limit=512)]
    with pytest.raises(genai_errors.ClientError, match=r"input token count \(900\) exceeds"):
        gemini_client.models.generate_content(model="gardener", contents="Look.")
    server.errors = [RateLimited("wait", retry_after=3)]
    with pytest.raises(genai_errors.ClientError) as limited:
        gemini_client.models.generate_content(model="gardener", contents="Look.")
    assert (limited.value.code, limited.value.status) == (429, "RESOURCE_EXHAUSTED")
    assert "3s" in json.dumps(limited.value.details)
