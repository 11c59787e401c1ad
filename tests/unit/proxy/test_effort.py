"""A request's effort stands in the prompt, whatever its protocol; what the prompt can't say is a finding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolltap.errors import ConfigError
from rolltap.protocols.handles import Handles
from rolltap.proxy.call.open_policies import open_policies
from rolltap.proxy.continuation.plan import Continuation
from rolltap.proxy.continuation.rendering import FamilyRenderer
from rolltap.proxy.engines.prompts import Prompts
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.settings import PinSettings, Settings
from tests.unit.continuation.making import tokenizer_with, trl_template
from tests.unit.continuation.test_effort import LOW, VISION, XHIGH

USER = {"role": "user", "content": "hi"}
GEMINI = "/v1beta/models/tiny:generateContent"


def gemini(**config: Any) -> dict[str, Any]:
    contents = [{"role": "user", "parts": [{"text": "hi"}]}]
    return {"contents": contents, "generationConfig": {"thinkingConfig": config}}


def anthropic(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 99, "messages": [USER], **fields}


@pytest.fixture
def qwen(plane: Any, tmp_path: Path) -> Any:
    """The plane with Qwen3.8's prompts."""
    renderer = FamilyRenderer("qwen3.8", tokenizer_with(tmp_path, trl_template("qwen3_8_training"), *VISION))
    source = plane.policy.source
    source.continuation = Continuation("tiny", renderer, source.handles, "keep")
    plane.engine.replies = ["<think>\nhm\n</think>\n\nHello.<|im_end|>"] * 4
    return plane


async def prompt_of(plane: Any, path: str, body: Any) -> str:
    answer = await plane.client.post(path, body)
    assert answer.status == 200, answer.body
    return plane.engine.tokenizer.decode(list(plane.engine.seen[-1].prompt_ids))


async def findings(plane: Any) -> list[tuple[str, int]]:
    calls = [row.call() for row in await plane.rows()]
    return [(each.name, each.count) for each in reconstruct(calls).findings if each.name != "one_call"]


@pytest.mark.parametrize(
    ("path", "low", "unsaid"),
    [
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": [USER], "reasoning_effort": "low"},
            {"model": "tiny", "messages": [USER]},
        ),
        (
            "/v1/responses",
            {"model": "tiny", "input": "hi", "reasoning": {"effort": "low"}},
            {"model": "tiny", "input": "hi"},
        ),
        ("/v1/messages", anthropic(output_config={"effort": "low"}), anthropic()),
        ("/v1/messages", anthropic(thinking={"type": "enabled", "budget_tokens": 1024}), anthropic()),
        (GEMINI, gemini(thinkingLevel="LOW"), gemini()),
        (GEMINI, gemini(thinkingBudget=512), gemini(thinkingBudget=-1)),
    ],
)
async def test_every_protocols_effort_is_said(qwen: Any, path: str, low: Any, unsaid: Any) -> None:
    assert LOW in await prompt_of(qwen, path, low)
    assert XHIGH in await prompt_of(qwen, path, unsaid)
    assert [one for one in await findings(qwen) if one[0] != "thinking_budget_not_kept"] == [("system_changed", 1)]
    assert [one.mask for one in reconstruct([row.call() for row in await qwen.rows()]).classifications] == ["", ""]


async def test_a_level_is_kept_over_turns_and_a_change_is_named(qwen: Any) -> None:
    history: list[Any] = [USER]
    for effort in ("low", "low", "xhigh"):
        body = {"model": "tiny", "messages": history, "reasoning_effort": effort}
        answer = (await qwen.client.post("/v1/chat/completions", body)).json()
        history = [*history, answer["choices"][0]["message"], {"role": "user", "content": "and?"}]
    rows = await qwen.rows()
    breaks = [row.intent.break_ and row.intent.break_.reason.value for row in rows]
    assert breaks == [None, None, "system_changed"]
    assert await findings(qwen) == [("system_changed", 1)]


async def test_a_captured_conversation_with_an_effort_is_one_session(qwen: Any) -> None:
    body = {"model": "tiny", "messages": [USER], "reasoning_effort": "low"}
    answer = (await qwen.client.post("/v1/chat/completions", body, key="project-key")).json()
    body["messages"] = [USER, answer["choices"][0]["message"], {"role": "user", "content": "and?"}]
    assert (await qwen.client.post("/v1/chat/completions", body, key="project-key")).status == 200
    sizes = [len(await qwen.log.rows(session.id)) for session in await qwen.log.sessions()]
    assert sorted(sizes) == [0, 2]


async def test_a_pinned_effort_stands_and_the_others_are_named(qwen: Any) -> None:
    source = qwen.policy.source
    source.settings = source.settings.model_copy(update={"pin": PinSettings(effort="low")})
    body = {"model": "tiny", "messages": [USER], "reasoning_effort": "xhigh"}
    assert LOW in await prompt_of(qwen, "/v1/chat/completions", body)
    assert await findings(qwen) == [("effort_not_applied", 1)]


async def test_the_nearest_level_is_named(qwen: Any) -> None:
    body = {"model": "tiny", "messages": [USER], "reasoning_effort": "minimal"}
    assert LOW in await prompt_of(qwen, "/v1/chat/completions", body)
    assert await findings(qwen) == [("effort_not_applied", 1)]


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 2000}])
async def test_thinking_that_no_template_switches_is_named(plane: Any, tmp_path: Path, thinking: Any) -> None:
    from rolltap.proxy.continuation.template import TemplateRenderer

    source = plane.policy.source
    renderer = TemplateRenderer(tokenizer_with(tmp_path, trl_template("qwen2_5")))
    source.continuation = Continuation("tiny", renderer, source.handles, "keep")
    await prompt_of(plane, "/v1/messages", anthropic(thinking=thinking))
    assert ("thinking_not_switched", 1) in await findings(plane)


def test_a_pinned_level_that_the_prompt_lacks_is_refused(tmp_path: Path) -> None:
    folder = tokenizer_with(tmp_path, trl_template("qwen3_8_training"), *VISION).name_or_path
    policy = {"engine": "main", "tokenizer": folder, "pin": {"effort": "high"}}
    settings = Settings.model_validate(
        {"engines": {"main": {"kind": "vllm", "url": "http://127.0.0.1:9"}}, "policies": {"p": policy}}
    )
    with pytest.raises(ConfigError, match=r"policies.p.pin.effort.*no level 'high'; it has: low, medium, xhigh"):
        open_policies(settings, Handles(b"0123456789abcdef"), None, Prompts())  # type: ignore[arg-type]


BUDGETS = [
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 2000}}, 2000),
    ("/v1/messages", {"thinking": {"type": "adaptive"}}, None),
    ("/v1/chat/completions", {"thinking_budget": 77}, 77),
    ("/v1/chat/completions", {"reasoning": {"max_tokens": 77}}, 77),
    ("/v1/chat/completions", {"thinking_budget": 0}, None),
    ("/v1/chat/completions", {"reasoning_effort": "low"}, None),
]


@pytest.mark.parametrize(("path", "asked", "budget"), BUDGETS)
@pytest.mark.parametrize("keeps", ["grammars", "budgets", ""])
async def test_a_budget_is_the_engines_or_is_named(
    plane: Any, path: str, asked: dict[str, Any], budget: int | None, keeps: str
) -> None:
    """An engine that can end thinking gets the budget; of another one the record says that it did not keep to it."""
    if keeps:
        setattr(plane.policy.source, keeps, True)
    body = anthropic(**asked) if path == "/v1/messages" else {"model": "tiny", "messages": [USER], **asked}
    await prompt_of(plane, path, body)
    extra, markers = plane.engine.seen[-1].extra, plane.policy.source.continuation.renderer.markers
    sent = {
        "grammars": {"close": markers.reasoning_close, "open": markers.reasoning_open, "budget": budget},
        "budgets": {"close": markers.reasoning_close, "open": markers.reasoning_open, "most": budget},
    }
    is_kept = budget is not None and keeps
    assert extra == ({"thinking" if keeps == "grammars" else "thinking_budget": sent[keeps]} if is_kept else {})
    named = ("thinking_budget_not_kept", 1) in await findings(plane)
    assert named == (budget is not None and not keeps)
