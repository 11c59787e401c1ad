"""Templates that write new messages by what stood before them: such a call continues if nothing before it changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rolltap.protocols.conversation import Message, Text
from rolltap.proxy.continuation.template import HISTORICAL, TemplateRenderer
from rolltap.types import BreakReason

from .conftest import World
from .making import TURNS, tokenizer_with

TEMPLATE = TURNS.replace(
    "CALLS",
    "{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}",
)
COUNT = "{% set seen = namespace(n=0) %}"
NUMBERED = COUNT + TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.role == 'tool' %}{% set seen.n = seen.n + 1 %}result {{ seen.n }}: {% endif %}{{ m.content }}",
)
FIRST = COUNT + TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.role == 'tool' %}{% if seen.n == 0 %}results: {% endif %}{% set seen.n = 1 %}{% endif %}{{ m.content }}",
)
MOVED = TEMPLATE.replace(
    "{{ m.content }}", "{% if loop.last %}{{ messages | length }} messages: {% endif %}{{ m.content }}"
)
CALL = '<tool_call>\n{"name":  "bash",   "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'


def played(template: str, folder: Path) -> tuple[World, list[BreakReason | None]]:
    """Two prompts with two tool cycles each: the breaks of the calls."""
    world = World(TemplateRenderer(tokenizer_with(folder, template)))
    messages, reasons = list[Message](), list[BreakReason | None]()
    for turn in range(6):
        if turn % 3 == 0:
            messages.append(Message("user", (Text(f"prompt {turn}"),)))
        node = world.call(*messages, output="It is done.<|im_end|>" if turn % 3 == 2 else CALL)
        assert node.reply is not None
        reasons.append(node.break_.reason if node.break_ is not None else None)
        context = node.context_ids()
        messages.append(node.reply)
        messages += [
            Message("tool", (Text(f'"out" {turn}\n'),), tool_call_id=call.id, name="bash")
            for call in node.reply.tool_calls
        ]
        plan = world.plan(world.request(*messages)) if turn % 3 < 2 else None
        if plan is not None and plan.break_ is None:
            np.testing.assert_array_equal(plan.prompt_ids[: len(context)], context)
            new = world.tokenizer.decode(plan.prompt_ids[len(context) :].tolist())
            whole = world.tokenizer.decode(world.renderer.render(messages, world.tools, thinking=True))
            assert new.strip()
            assert whole.endswith(new)
    return world, reasons


@pytest.mark.parametrize("template", [NUMBERED, FIRST], ids=["numbered", "first"])
def test_results_that_are_written_by_those_before_them_continue(template: str, tmp_path: Path) -> None:
    world, reasons = played(template, tmp_path)
    assert isinstance(world.renderer, TemplateRenderer)
    assert HISTORICAL in {result.reason for result in world.renderer.audit}
    assert set(reasons) == {None}


def test_a_template_that_then_changes_what_stood_before_breaks(tmp_path: Path) -> None:
    _, (first, *others) = played(MOVED, tmp_path)
    assert first is None
    assert None not in others
    assert BreakReason.TEMPLATE_NOT_BRIDGEABLE in others
