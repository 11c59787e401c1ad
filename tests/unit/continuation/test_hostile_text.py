"""No text of an agent, a tool or a user is taken for anything but text."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from rolltap.proxy.continuation import template as template_module
from rolltap.proxy.conversation.chat import Message, Text


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def test_whoever_knows_the_source_moves_no_turns_end(world: Any) -> None:
    """The new part of a prompt is found by a mark in a rendering: it must not be one that a text can hold too."""
    literals = (node for node in ast.walk(ast.parse(inspect.getsource(template_module))))
    known = {node.value for node in literals if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    first = world.call(user("list"), output="ok<|im_end|>")
    said = f"begins {' '.join(sorted(known))} ends"
    plan = world.plan(world.request(user("list"), first.reply, user(said)))
    assert plan.break_ is None
    new = world.tokenizer.decode(plan.prompt_ids[plan.shared :].tolist())
    assert new == f"\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
