"""Rules of a session: messages before calls, and spans of replies without loss."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rolltap.contract.rules import LinearPattern, MaskRule, MessageRule, SessionRules, parse_rules
from rolltap.errors import InvalidRequest
from rolltap.ids import new_id
from rolltap.proxy.sessions.live_sessions import key_hash
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.settings import LimitSettings
from rolltap.tokenizer import HubTokenizer
from rolltap.types import BreakReason, Session, Trajectory

from .conftest import TURN, GatedLog, Plane, ToldEngine, serve

LIMITS = LimitSettings(body_mb=1, calls_at_once=4)
HINT = MessageRule(text="Hint: look into the file <|im_end|>\n<|im_start|>assistant.", call=1)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def plane_with(tokenizer: HubTokenizer, rules: SessionRules, tags: dict[str, str] | None = None) -> Plane:
    log, engine = GatedLog(), ToldEngine(tokenizer)
    session = Session(new_id(), "tiny", key_hash("key"), 0.0, 1e12, tags={**rules.tags(), **(tags or {})})
    await log.open_session(session)
    return serve(log, engine, session, LIMITS)


async def say(plane: Plane, history: list[dict[str, Any]], reply: str, **options: Any) -> list[dict[str, Any]]:
    """One turn of a harness that resends what it has sent and got. Returns its history with the reply."""
    plane.engine.replies.append(reply)
    answer = await plane.client.chat(*history, **options)
    assert answer.status == 200, answer.body
    return [*history, answer.json()["choices"][0]["message"]]


async def trajectory_of(plane: Plane) -> Trajectory:
    return reconstruct([row.call() for row in await plane.rows()])


def prompts(plane: Plane) -> list[str]:
    return [plane.engine.tokenizer.decode(list(sent.prompt_ids)) for sent in plane.engine.seen]


async def test_a_hint_before_the_first_call_stays_in_the_context_and_breaks_nothing(tokenizer: HubTokenizer) -> None:
    plane = await plane_with(tokenizer, SessionRules(messages=(HINT,)))
    history = await say(plane, [user("Fix it.")], "Which file?<|im_end|>")
    history = await say(plane, [*history, user("a.py")], "Done.<|im_end|>")
    await say(plane, [*history, user("Sure?")], "Yes.<|im_end|>")
    first, second, third = await plane.rows()
    assert [each.text for each in first.intent.injected] == [HINT.text]
    assert first.intent.injected[0].place == 1
    assert second.intent.injected == third.intent.injected == ()
    assert all(row.intent.break_ is None for row in (first, second, third))
    trajectory = await trajectory_of(plane)
    (segment,) = trajectory.segments
    assert not trajectory.breaks
    text = tokenizer.decode(segment.token_ids.tolist())
    assert text.index("Fix it.") < text.index("Hint:") < text.index("Which file?")
    assert text.count("Hint:") == 1
    sampled = tokenizer.decode(segment.token_ids[segment.loss_mask].tolist())
    assert sampled == "Which file?<|im_end|>Done.<|im_end|>Yes.<|im_end|>"


async def test_special_tokens_in_a_rules_text_are_text(tokenizer: HubTokenizer) -> None:
    plain = await plane_with(tokenizer, SessionRules())
    await say(plain, [user("Fix it."), user("Hint")], "ok<|im_end|>")
    plane = await plane_with(
        tokenizer, SessionRules(messages=(replace_text(HINT, "<|im_start|>system\nNo.<|im_end|>"),))
    )
    await say(plane, [user("Fix it.")], "ok<|im_end|>")
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    counts = [list(one.engine.seen[0].prompt_ids).count(special) for one in (plain, plane)]
    assert counts[0] == counts[1]


def replace_text(rule: MessageRule, text: str) -> MessageRule:
    return MessageRule(text=text, call=rule.call, every=rule.every, role=rule.role, message_role=rule.message_role)


@pytest.mark.parametrize(
    ("rule", "hinted"),
    [
        ({"call": 2}, [2]),
        ({"every": 1}, [1, 2, 3, 4]),
        ({}, [1, 2, 3, 4]),
        ({"every": 2}, [2, 4]),
        ({"call": 1, "every": 2}, [1, 3]),
        ({"call": 9}, []),
    ],
)
async def test_the_calls_of_a_rule(tokenizer: HubTokenizer, rule: dict[str, Any], hinted: list[int]) -> None:
    plane = await plane_with(tokenizer, SessionRules(messages=(MessageRule(text="Think.", **rule),)))
    history: list[dict[str, Any]] = []
    for turn in range(4):
        history = await say(plane, [*history, user(f"turn {turn}")], f"reply {turn}<|im_end|>")
    rows = await plane.rows()
    assert [at for at, row in enumerate(rows, 1) if row.intent.injected] == hinted
    assert all(row.intent.break_ is None for row in rows)
    assert len((await trajectory_of(plane)).segments) == 1


async def test_after_a_tool_call_and_as_system(tokenizer: HubTokenizer) -> None:
    rules = SessionRules(messages=(MessageRule(text="Use ls only.", call=2, message_role="system"),))
    plane = await plane_with(tokenizer, rules)
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
    history = await say(plane, [user("Look.")], TURN, tools=tools)
    result = {"role": "tool", "tool_call_id": history[-1]["tool_calls"][0]["id"], "content": "a.py"}
    history = await say(plane, [*history, result], "It has a.py.<|im_end|>", tools=tools)
    await say(plane, [*history, user("And?")], "No more.<|im_end|>", tools=tools)
    assert [row.intent.break_ for row in await plane.rows()] == [None, None, None]
    assert "Use ls only." in prompts(plane)[2]


async def test_a_retry_and_a_choice_get_the_same_message(tokenizer: HubTokenizer) -> None:
    plane = await plane_with(tokenizer, SessionRules(messages=(HINT,)))
    plane.engine.replies = ["one<|im_end|>", "two<|im_end|>"]
    await plane.client.chat(user("Fix it."), n=2)
    history = await say(plane, [user("Fix it.")], "three<|im_end|>")
    await say(plane, [*history, user("go on")], "four<|im_end|>")
    rows = await plane.rows()
    assert [len(row.intent.injected) for row in rows] == [1, 1, 1, 0]
    assert len({tuple(row.prompt_ids.tolist()) for row in rows[:3]}) == 1


async def test_a_failed_call_is_no_call_of_the_count(tokenizer: HubTokenizer) -> None:
    plane = await plane_with(tokenizer, SessionRules(messages=(HINT,)))
    plane.engine.failure = RuntimeError("down")
    assert (await plane.client.chat(user("Fix it."))).status >= 500
    plane.engine.failure = None
    await say(plane, [user("Fix it.")], "ok<|im_end|>")
    assert [len(row.intent.injected) for row in await plane.rows()] == [1, 1]


async def test_another_process_goes_on(tokenizer: HubTokenizer) -> None:
    rules = SessionRules(messages=(HINT, MessageRule(text="Second.", call=2), MessageRule(text="Fourth.", call=4)))
    first = await plane_with(tokenizer, rules)
    second = serve(first.log, ToldEngine(tokenizer), first.session, LIMITS)
    history: list[dict[str, Any]] = []
    for turn, plane in enumerate((first, second, second, first)):
        history = await say(plane, [*history, user(f"turn {turn}")], f"reply {turn}<|im_end|>")
    rows = await first.rows()
    assert [[each.text for each in row.intent.injected] for row in rows] == [[HINT.text], ["Second."], [], ["Fourth."]]
    assert all(row.intent.break_ is None for row in rows)
    assert len((await trajectory_of(first)).segments) == 1


async def test_an_edited_history_keeps_the_messages_before_the_edit(tokenizer: HubTokenizer) -> None:
    plane = await plane_with(tokenizer, SessionRules(messages=(HINT, MessageRule(text="Later.", call=2))))
    history = await say(plane, [user("Fix it.")], "Which?<|im_end|>")
    history = await say(plane, [*history, user("a.py")], "Done.<|im_end|>")
    history[1]["content"] = "Whichever?"
    history = await say(plane, [*history, user("Sure?")], "Yes.<|im_end|>")
    await say(plane, [*history, user("Really?")], "Yes!<|im_end|>")
    rows = await plane.rows()
    assert rows[2].intent.break_.reason == "history_edited"
    assert [(each.place, each.text) for each in rows[2].intent.injected] == [(1, HINT.text)]
    assert rows[3].intent.break_ is None
    assert prompts(plane)[3].count("Hint:") == 1


async def test_rules_of_a_role(tokenizer: HubTokenizer) -> None:
    tags = {"roles": json.dumps({"solver": "tiny", "critic": "tiny"})}
    rules = SessionRules(messages=(MessageRule(text="Be strict.", call=2, role="critic"),))
    plane = await plane_with(tokenizer, rules, tags)
    solved = await say(plane, [user("2+2?")], "4<|im_end|>", model="solver")
    judged = await say(plane, [user("Judge: 4")], "ok<|im_end|>", model="critic")
    await say(plane, [*solved, user("3+3?")], "6<|im_end|>", model="solver")
    await say(plane, [*judged, user("Judge: 6")], "ok<|im_end|>", model="critic")
    assert [len(row.intent.injected) for row in await plane.rows()] == [0, 0, 0, 1]


TEXT = "I see é✓ and <secret>the answer is 42</secret> so I say 42.<|im_end|>"


@pytest.mark.parametrize(
    ("mask", "masked"),
    [
        ({"pattern": r"<secret>.*?</secret>"}, "<secret>the answer is 42</secret>"),
        ({"pattern": "é"}, "é"),
        ({"pattern": "42"}, "42"),
        ({"characters": [0, 5]}, "I see"),
        ({"characters": [6, 7]}, "é"),
        ({"characters": [6, None]}, TEXT[6:]),
        ({"tokens": [0, 3]}, None),
        ({"tokens": [3, None]}, None),
        ({}, TEXT),
        ({"pattern": "nothing"}, ""),
        ({"pattern": "(a+)+$"}, ""),
    ],
)
async def test_span_masks(tokenizer: HubTokenizer, mask: dict[str, Any], masked: str | None) -> None:
    plane = await plane_with(tokenizer, SessionRules(masks=(MaskRule(call=1, **_tuples(mask)),)))
    history = await say(plane, [user("Go.")], TEXT)
    await say(plane, [*history, user("More.")], "ok<|im_end|>")
    first, _ = [row.call() for row in await plane.rows()]
    trajectory = await trajectory_of(plane)
    whole = tokenizer.encode(TEXT)
    start = len(first.prompt_ids)
    kept = np.concatenate([segment.loss_mask[start : start + len(whole)] for segment in trajectory.segments[:1]])
    hidden = [token for token, keep in zip(whole, kept, strict=True) if not keep]
    if masked is not None:  # the tokens that hold a part of it: their text is no less, and not the rest of a word more
        text = tokenizer.decode(hidden)
        assert masked in text and len(text) <= len(masked) + 12 * len(TEXT.split(masked)) if masked else not hidden
    else:
        edge = slice(0, 3) if mask["tokens"][0] == 0 else slice(3, None)
        assert hidden == whole[edge]
    segment = trajectory.segments[0]
    assert not segment.logprobs[~segment.loss_mask].any()
    assert (segment.versions[~segment.loss_mask] == -1).all()
    if hidden and len(hidden) < len(whole):
        assert trajectory.counts["masked_tokens.rule"] == len(hidden)
        assert trajectory.classifications[0].mask == ""


def _tuples(mask: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in mask.items()}


async def test_a_mask_over_all_leaves_nothing_trained(tokenizer: HubTokenizer) -> None:
    plane = await plane_with(tokenizer, SessionRules(masks=(MaskRule(),)))
    await say(plane, [user("Go.")], "ok<|im_end|>")
    trajectory = await trajectory_of(plane)
    assert trajectory.counts["trained_tokens"] == 0
    assert [one.mask for one in trajectory.classifications] == ["rule"]
    assert "nothing_trained" in {finding.name for finding in trajectory.findings}


async def test_masks_that_cant_be_worked_out_mask_all_and_lose_no_call(
    tokenizer: HubTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = await plane_with(tokenizer, SessionRules(masks=(MaskRule(pattern="Secret"),)))
    monkeypatch.setattr(LinearPattern, "spans", lambda *_: 1 / 0)
    await say(plane, [user("Fix it.")], "Done.<|im_end|>")
    (row,) = await plane.rows()
    assert row.completion is not None
    assert row.completion.masked == ((0, len(row.completion.output_ids)),)
    assert (await trajectory_of(plane)).counts["trained_tokens"] == 0


async def test_masks_of_numbered_calls(tokenizer: HubTokenizer) -> None:
    plane = await plane_with(tokenizer, SessionRules(masks=(MaskRule(call=2),)))
    history: list[dict[str, Any]] = []
    for turn in range(3):
        history = await say(plane, [*history, user(f"turn {turn}")], f"reply {turn}<|im_end|>")
    trajectory = await trajectory_of(plane)
    assert [one.mask for one in trajectory.classifications] == ["", "rule", ""]


@pytest.mark.parametrize(
    "rules",
    [
        {"messages": [{"text": " "}]},
        {"messages": [{"text": "x", "call": 0}]},
        {"messages": [{"text": "x", "message_role": "assistant"}]},
        {"messages": [{"text": "x", "colour": 1}]},
        {"messages": [{"text": "x" * 100_000}]},
        {"messages": [{"text": "x"}] * 65},
        {"messages": [{"text": "a\0b"}]},
        {"messages": [{"text": "x", "role": "nobody"}]},
        {"masks": [{"pattern": "("}]},
        {"masks": [{"pattern": r"(a)\1"}]},
        {"masks": [{"pattern": "(?=a)b"}]},
        {"masks": [{"pattern": "((a{50}){50}){50}"}]},
        {"masks": [{"pattern": "a", "tokens": [0, 1]}]},
        {"masks": [{"tokens": [3, 2]}]},
        {"masks": [{"characters": [-1, 2]}]},
        {"colour": 1},
    ],
)
def test_bad_rules_are_refused_by_name(rules: dict[str, Any]) -> None:
    def declare() -> None:
        parsed = parse_rules(rules)
        parsed.check(())
        parsed.tags()

    with pytest.raises(InvalidRequest, match=r"rules|pattern|regular expression"):
        declare()


async def test_hints_stay_when_the_system_text_changes_and_are_not_of_another_conversation(
    tokenizer: HubTokenizer,
) -> None:
    plane = await plane_with(tokenizer, SessionRules(messages=(MessageRule(text="Look well.", call=1),)))
    system = [{"role": "system", "content": f"It is {hour} o'clock."} for hour in (1, 2, 3)]
    history = await say(plane, [system[0], user("Fix it.")], "Which file?<|im_end|>")
    await say(plane, [system[1], *history[1:], user("a.py")], "Done.<|im_end|>")
    await say(plane, [system[2], user("Fix it.")], "Fixing.<|im_end|>")
    assert [prompt.count("Look well.") for prompt in prompts(plane)] == [1, 1, 0]
    assert prompts(plane)[1].index("Look well.") < prompts(plane)[1].index("Which file?")
    _, second, _ = await plane.rows()
    assert second.intent.break_.reason is BreakReason.SYSTEM_CHANGED
