"""A request may keep earlier thinking in the prompt, where its policy lets the template drop it."""

from __future__ import annotations

from typing import Any

import pytest

from rolltap.types import BreakReason

USER = {"role": "user", "content": "hi"}
KEEPS = [
    {"chat_template_kwargs": {"preserve_thinking": True}},
    {"preserve_thinking": True},
    {"thinking": {"type": "enabled", "clear_thinking": False}},
    {"thinking": {"type": "enabled", "keep": "all"}},
]


@pytest.mark.parametrize("asked", [{}, {"thinking": {"type": "enabled"}}, *KEEPS])
async def test_thinking_stays_where_the_request_keeps_it(plane: Any, asked: dict[str, Any]) -> None:
    plane.engine.replies = ["<think>\nponder\n</think>\n\nok<|im_end|>", "fine<|im_end|>"]
    history: list[Any] = [USER]
    for _ in range(2):
        body = {"model": "tiny", "messages": history, **asked}
        message = (await plane.client.post("/v1/chat/completions", body)).json()["choices"][0]["message"]
        history = [*history, {"role": "assistant", "content": message["content"]}, USER]
    prompt = plane.engine.tokenizer.decode(list(plane.engine.seen[1].prompt_ids))
    rows = await plane.rows()
    reason = rows[1].intent.break_ and rows[1].intent.break_.reason
    assert ("ponder" in prompt) == (asked in KEEPS)
    assert reason == (None if asked in KEEPS else BreakReason.THINKING_DROPPED)
