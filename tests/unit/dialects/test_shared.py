"""What the dialects stand on: hints, arguments, probes, legacy completions."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from rolltap.errors import InvalidRequest
from rolltap.protocols.base import WireRequest
from rolltap.protocols.contents import check_arguments, object_of, text_of
from rolltap.protocols.conversation import MAX_DEPTH
from rolltap.protocols.hints import read_hints
from rolltap.protocols.replies import encode
from rolltap.protocols.requests import check_depth
from rolltap.proxy.planes.agent import AgentPlane
from rolltap.settings import LimitSettings
from tests.dialects import DIALECTS


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"session-id": "s", "thread-id": "s"}, ("s", None, None)),
        (
            {"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "s", "x-openai-subagent": "collab_spawn"},
            ("s", "t", None),
        ),
        (
            {"session-id": "s", "thread-id": "s", "x-codex-turn-metadata": '{"request_kind": "compaction", "n": [1]}'},
            ("s", None, "summary"),
        ),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, ("s", "a", None)),
        ({"x-session-id": "child", "x-parent-session-id": "s"}, ("child", "child", None)),
        ({"x-interaction-type": "conversation-subagent"}, (None, "conversation-subagent", None)),
        ({"x-interaction-type": "conversation-compaction"}, (None, None, "summary")),
        ({"session_id": "s"}, ("s", None, None)),
        ({"x-codex-turn-metadata": "[" * 5000}, (None, None, None)),
        ({}, (None, None, None)),
    ],
)
def test_harness_headers(headers: dict[str, str], expected: tuple[Any, ...]) -> None:
    hints = read_hints(headers)
    assert (hints.conversation, hints.agent, hints.kind) == expected


def test_hints_in_the_body_come_after_those_in_headers() -> None:
    user_id = json.dumps({"device_id": "d", "session_id": "s"})
    assert read_hints({}, user_id=user_id).conversation == "s"
    assert read_hints({}, user_id="user_abc").conversation is None
    assert read_hints({}, cache_key="k").conversation == "k"
    assert read_hints({"session-id": "s"}, cache_key="k").conversation == "s"


@pytest.mark.parametrize(("count", "retry"), [("2", 2), ("-1", 0), ("x", 0), ("9" * 30, 0), ("²", 0)])
def test_retries(count: str, retry: int) -> None:
    assert read_hints({"x-stainless-retry-count": count}).retry == retry


def test_hints_keep_no_secrets_and_no_long_values() -> None:
    hints = read_hints({"authorization": "Bearer sk", "x-api-key": "sk", "user-agent": "u" * 10_000})
    assert list(hints.raw) == ["user-agent"]
    assert len(hints.raw["user-agent"]) == 2048


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


ILL_ENCODED = {
    "openai_chat": b'{"model": "m", "messages": [{"role": "user", "content": "hi", "x\xf0": 1}]}',
    "openai_responses": b'{"model": "m", "input": [{"role": "user", "content": "hi", "x\xf0": 1}]}',
    "anthropic": b'{"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi", "x\xf0": 1}]}',
    "gemini": b'{"contents": [{"role": "user", "parts": [{"text": "hi"}], "x\xf0": 1}]}',
    "openai_completions": b'{"model": "m", "prompt": "hi", "stream_options": {"x\xf0": 1}}',
}


@pytest.mark.parametrize("name", ILL_ENCODED)
def test_a_body_that_is_no_utf_8_is_refused_wherever_that_stands(name: str) -> None:
    body, params = ILL_ENCODED[name], {"model": "m"} if name == "gemini" else {}
    path = "/v1beta/models/m:generateContent" if name == "gemini" else ""
    with pytest.raises(InvalidRequest, match="UTF-8"):
        DIALECTS[name].parse(WireRequest(path, params, {}, {}, body))


@settings(deadline=None)
@given(value=st.dictionaries(st.text(max_size=5), VALUES, max_size=3), indent=st.none() | st.integers(0, 2))
def test_arguments_of_any_spacing_keep_their_meaning(value: dict[str, Any], indent: int | None) -> None:
    written = encode(object_of(json.dumps(value, indent=indent)))
    assert b"\n" not in written
    assert json.loads(text_of(msgspec.Raw(written), "args")) == value


@settings(deadline=None)
@given(text=st.text().filter(lambda text: text.strip()))
def test_text_that_is_no_object_survives_the_object(text: str) -> None:
    try:
        is_object = isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        assert text_of(msgspec.Raw(encode(object_of(text))), "args") == text


def test_an_object_that_mentions_the_wrapper_is_its_own(parse: Any) -> None:
    raw = b'{"__unparsedToolInput": {"raw": 7}}'
    assert text_of(msgspec.Raw(raw), "args") == raw.decode()


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def test_depth_is_counted_exactly() -> None:
    check_depth(nested(MAX_DEPTH), "here")
    with pytest.raises(InvalidRequest, match="here: nested deeper than 64"):
        check_depth(nested(MAX_DEPTH + 1), "here")
    check_depth(7, "here")


def test_probes_are_answered_at_the_root_and_under_a_session() -> None:
    unused: Any = SimpleNamespace(serve=None, count_tokens=None, models=None, retrieve=None)
    client = TestClient(AgentPlane(DIALECTS, unused, unused, LimitSettings()))
    for prefix in ("", "/s/abc"):
        assert client.head(f"{prefix}/").status_code == 200
        assert client.head(f"{prefix}/api/hello").status_code == 200
        assert client.get(f"{prefix}/health").json() == {"status": "ok"}
        assert client.post(f"{prefix}/api/show", json={"model": "m"}).status_code == 404
        upgrade = client.get(f"{prefix}/v1/responses", headers={"upgrade": "websocket", "connection": "upgrade"})
        assert upgrade.status_code == 426
        assert upgrade.json()["error"]["code"] == "upgrade_required"


def test_a_legacy_prompt_is_one_user_message(parse: Any, refusal: Any) -> None:
    chat = parse("openai_completions", prompt=["hi"], logprobs=2)
    assert [(message.role, message.text) for message in chat.messages] == [("user", "hi")]
    assert (chat.sampling.max_tokens, chat.sampling.top_logprobs) == (16, 2)
    for prompt in ([1, 2, 3], ["a", "b"], [[1]], 7):
        assert refusal("openai_completions", prompt=prompt) == "prompt"
    for fields in ({"echo": True}, {"best_of": 2}, {"suffix": "x"}, {"prompt": None}):
        assert refusal("openai_completions", **fields) == next(iter(fields))


@pytest.mark.parametrize("end", ["", "\\", '\\"', '"', '"}'])
def test_brackets_in_a_string_are_no_levels_even_if_it_was_cut_off(end: str) -> None:
    text = f'{{"command": "{"[" * 100}{end}'
    assert check_arguments(text, "here") == text
    with pytest.raises(InvalidRequest, match="here: nested deeper than 64"):
        check_arguments(f'{{"a": {"[" * 100}"{end}', "here")
