"""Gemini: ids that clients drop, repeated responses, schemas, and what is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from rolltap.errors import InvalidRequest
from rolltap.protocols.base import WireRequest
from rolltap.protocols.conversation import TOOL_RESULT_REPEATED, Image, Reasoning, Text, ToolChoice
from rolltap.protocols.gemini.parse import json_schema
from tests.dialects import DIALECTS

USER = {"role": "user", "parts": [{"text": "hi"}]}
LOOK = {"functionDeclarations": [{"name": "look", "parametersJsonSchema": {"type": "object"}}]}


def called(name: str = "look", **fields: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {}, **fields}}


def answered(output: Any, name: str = "look", **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": output, **fields}}


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def test_calls_without_ids_are_numbered_and_answered_in_order(parse: Any) -> None:
    first = [model(called(), called()), user(answered({"output": "a"}), answered({"output": "b"}))]
    chat = parse("gemini", contents=[USER, *first, model(called("nap")), user(answered({"output": "c"}, "nap"))])
    calls = [call.id for message in chat.messages for call in message.tool_calls]
    answers = [(message.tool_call_id, message.text) for message in chat.messages if message.role == "tool"]
    assert len(set(calls)) == 3
    assert answers == list(zip(calls, ["a", "b", "c"], strict=True))


def test_ids_do_not_change_as_the_history_grows(parse: Any) -> None:
    turns = [USER, model(called()), user(answered({"output": "a"})), model(called()), user(answered({"output": "b"}))]
    shorter, longer = (parse("gemini", contents=turns[:count]).messages for count in (3, 5))
    assert all(a is b for a, b in zip(shorter, longer, strict=False))


def test_a_response_repeated_to_the_letter_is_dropped(parse: Any) -> None:
    once = user(answered({"output": "a"}, id="x"))
    turns = [USER, model(called(id="x")), once, once, user(answered({"output": "a"}))]
    assert [message.role for message in parse("gemini", contents=turns).messages] == ["user", "assistant", "tool"]
    turns[3] = user(answered({"output": "other"}, id="x"))
    assert parse("gemini", contents=turns).messages[3].marks == (TOOL_RESULT_REPEATED,)


@pytest.mark.parametrize(
    ("response", "expected", "is_error"),
    [
        ({"output": "soil"}, "soil", False),
        ({"result": "soil"}, "soil", False),
        ({"error": "no bed"}, "[tool error]\nno bed", True),
        ({"output": 7}, '{"output": 7}', False),
        ({"a": 1, "b": "c"}, '{"a": 1, "b": "c"}', False),
        ({}, "{}", False),
    ],
)
def test_a_response_is_its_text_where_it_has_only_that(
    parse: Any, response: Any, expected: str, is_error: bool
) -> None:
    message = parse("gemini", contents=[USER, model(called()), user(answered(response))]).messages[2]
    assert (message.text, message.is_error) == (expected, is_error)


def test_signatures_are_read_in_either_alphabet(parse: Any) -> None:
    handle = "call_signature"
    plain = base64.b64encode(handle.encode()).decode()
    for signature in (plain, plain.rstrip("="), base64.urlsafe_b64encode(handle.encode()).decode()):
        turn = parse("gemini", contents=[USER, model({"text": "ok", "thoughtSignature": signature}), USER]).messages[1]
        assert turn.handle == handle
    foreign = parse("gemini", contents=[USER, model({"text": "ok", "thoughtSignature": "skip_it!"}), USER]).messages[1]
    assert foreign.handle == "skip_it!"


def test_thoughts_and_images(parse: Any) -> None:
    image = {"inlineData": {"mimeType": "image/png", "data": "aGk="}}
    turns = [user(image), model({"text": "hm", "thought": True}, {"text": "ok"}), USER]
    chat = parse("gemini", contents=turns)
    assert chat.messages[0].parts == (Image("data:image/png;base64,aGk="),)
    assert chat.messages[1].parts == (Reasoning("hm"), Text("ok"))


def test_snake_case_is_read_as_well(parse: Any) -> None:
    chat = parse(
        "gemini",
        system_instruction={"parts": [{"text": "Be brief."}]},
        contents=[user({"inline_data": {"mime_type": "image/png", "data": "aGk="}})],
        tools=[{"function_declarations": [{"name": "look_at", "parameters": {"type": "OBJECT"}}]}],
        generation_config={"max_output_tokens": 5},
        tool_config={"function_calling_config": {"mode": "ANY", "allowed_function_names": ["look_at"]}},
    )
    assert [message.role for message in chat.messages] == ["system", "user"]
    assert chat.tools[0].parameters == {"type": "object"}
    assert chat.tool_choice == ToolChoice("named", ("look_at",))
    assert chat.sampling.max_tokens == 5


def test_googles_schemas_become_json_schemas() -> None:
    google = {
        "type": "OBJECT",
        "properties": {
            "place": {"type": "STRING", "nullable": True, "enum": ["bed", "pot"]},
            "tags": {"type": "ARRAY", "items": {"type": "INTEGER"}},
        },
        "propertyOrdering": ["place"],
        "required": ["place"],
        "anyOf": [{"type": "OBJECT"}],
    }
    assert json_schema(google) == {
        "type": "object",
        "properties": {
            "place": {"type": ["string", "null"], "enum": ["bed", "pot"]},
            "tags": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["place"],
        "anyOf": [{"type": "object"}],
    }


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        ({"candidateCount": 2}, "n", 2),
        ({"topK": 64.0}, "top_k", 64),
        ({"responseMimeType": "application/json"}, "json_schema", {}),
        ({"responseJsonSchema": {"type": "array"}}, "json_schema", {"type": "array"}),
        ({"responseSchema": {"type": "ARRAY"}}, "json_schema", {"type": "array"}),
        ({"thinkingConfig": {"thinkingBudget": 0}}, "thinking", False),
        ({"thinkingConfig": {"thinkingBudget": -1}}, "thinking", True),
        ({"thinkingConfig": {"thinkingLevel": "HIGH"}}, "effort", "high"),
        ({"responseLogprobs": True, "logprobs": 3}, "top_logprobs", 3),
    ],
)
def test_sampling(parse: Any, config: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(parse("gemini", generationConfig=config).sampling, name) == value


@pytest.mark.parametrize(
    ("calling", "expected"),
    [
        ({"mode": "AUTO"}, ToolChoice("auto")),
        ({"mode": "NONE"}, ToolChoice("none")),
        ({"mode": "ANY"}, ToolChoice("required")),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["look"]}, ToolChoice("auto", ("look",))),
    ],
)
def test_tool_choice(parse: Any, calling: Any, expected: ToolChoice) -> None:
    assert parse("gemini", tools=[LOOK], toolConfig={"functionCallingConfig": calling}).tool_choice == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"contents": []}, "contents"),
        ({"contents": [{"role": "narrator", "parts": []}]}, "contents[0].role"),
        ({"contents": [user({"fileData": {"fileUri": "gs://x"}})]}, "contents[0].parts[0].fileData"),
        ({"contents": [user({"inline_data": {"mime_type": "x"}})]}, "contents[0].parts[0].inlineData.data"),
        ({"contents": [user(called())]}, "contents[0].parts[0].functionCall"),
        ({"contents": [model(answered({}))]}, "contents[0].parts[0]"),
        ({"contents": [USER, model(called(id="x"), called(id="x"))]}, "contents[1]"),
        ({"contents": [USER, model(called(args=7))]}, "contents[1].parts[0].functionCall.args"),
        ({"tools": [{"codeExecution": {}}]}, "tools[0].codeExecution"),
        ({"tools": [LOOK, LOOK]}, "tools[1].functionDeclarations[0].name"),
        ({"cachedContent": "cachedContents/x"}, "cachedContent"),
        ({"generationConfig": {"temperature": 3}}, "generationConfig.temperature"),
        ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "generationConfig.responseModalities[0]"),
        ({"generationConfig": {"speechConfig": {"languageCode": "en"}}}, "generationConfig.speechConfig"),
        ({"generationConfig": {"logprobs": 3}}, "generationConfig.logprobs"),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["nap"]}}},
            "toolConfig.functionCallingConfig.allowedFunctionNames",
        ),
        ({"systemInstruction": {"parts": [called()]}}, "systemInstruction.parts[0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_field(refusal: Any, fields: dict[str, Any], param: str) -> None:
    assert refusal("gemini", **fields) == param


def test_streams_are_server_sent_events_only() -> None:
    body = json.dumps({"contents": [USER]}).encode()
    wire = WireRequest("/v1beta/models/m:streamGenerateContent", {"model": "m"}, {}, {}, body)
    with pytest.raises(InvalidRequest, match="alt=sse"):
        DIALECTS["gemini"].parse(wire)


def test_a_count_may_hold_a_whole_request(parse: Any) -> None:
    path = "/v1beta/models/m:countTokens"
    inner = {"model": "models/m", "contents": [USER], "system_instruction": {"parts": [{"text": "Be brief."}]}}
    chat = parse("gemini", path=path, generateContentRequest=inner)
    assert [message.role for message in chat.messages] == ["system", "user"]


def test_a_streamed_turn_that_came_back_in_chunks_is_one_message(parse: Any) -> None:
    """As `chats.send_message_stream` of Google's SDK keeps it."""
    chunks = [
        {"text": "Two ", "thought": True},
        {"text": "places.", "thought": True},
        {"text": "I "},
        {"text": "look."},
        {"functionCall": {"id": "call_1", "name": "look", "args": {}}, "thoughtSignature": "c2lnbmVk"},
        {"functionCall": {"id": "call_2", "name": "look", "args": {}}},
    ]
    answers = [{"functionResponse": {"id": f"call_{at}", "name": "look", "response": {}}} for at in (1, 2)]
    question = {"role": "user", "parts": [{"text": "Look."}]}
    rest = {"role": "user", "parts": answers}
    apart = parse("gemini", contents=[question, *({"role": "model", "parts": [chunk]} for chunk in chunks), rest])
    at_once = parse("gemini", contents=[question, {"role": "model", "parts": chunks}, rest])
    assert apart.messages == at_once.messages
    assert [message.role for message in apart.messages] == ["user", "assistant", "tool", "tool"]
    assert apart.messages[1].handle == "signed"
