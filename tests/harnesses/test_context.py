"""A task that outgrows the policy's context: harnesses that can compact do so, and finish.

Nothing but the engine's own answer says how long the context is, as for users.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rolltap.engine.scripted import Rule, Script, ScriptedReply
from rolltap.harnesses.agents.install import Installation
from rolltap.harnesses.agents.registry import get_harness
from rolltap.harnesses.base import Ending

from .house import Run, house
from .scenarios import PROMPT, TOOLS, main_rule
from .usual_vocabulary import make_usual_vocabulary

STEPS = 16
SUMMARY = "<state_snapshot><analysis>Long.</analysis><summary>MAINTASK: numbers were read.</summary></state_snapshot>"
CELLS = [
    ("codex", 45_000),
    ("codex", 20_000),
    ("claude-code", 45_000),  # its first prompt has 19,500 tokens
    ("pi", 45_000),
    ("pi", 20_000),
    ("qwen-code", 45_000),  # its first prompt has 18,000 tokens
    ("opencode", 45_000),
    ("opencode", 20_000),
    ("copilot-cli", 45_000),
    ("copilot-cli", 20_000),
    ("mistral-vibe", 45_000),
    ("mistral-vibe", 20_000),
    ("hermes", 100_000),  # its first prompt has 15,000 tokens, and it refuses less than 64,000
]


def script_of_steps(name: str, numbers: int) -> Script:
    """Each step prints other numbers, a token a character: a harness that estimates is far off."""
    tools = TOOLS[name]
    steps = [
        ScriptedReply(say=f"Step {step}.", call=(tools.run(f"seq {step + 1} {step + numbers}"),))
        for step in range(STEPS)
    ]
    summary = Rule(last=tools.asks_summary, turns=(ScriptedReply(say=SUMMARY),) * 2 * STEPS, count="session")
    return Script(rules=(summary, main_rule(*steps, tools.end("All read."))), otherwise=ScriptedReply(say="Fine."))


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_usual_vocabulary(tmp_path_factory.mktemp("vocabulary") / "usual")


@pytest.mark.harness
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "context"), CELLS)
async def test_a_task_that_outgrows_the_context_compacts_and_finishes(
    name: str, context: int, vocabulary: Path, release: Callable[[str], Installation], tmp_path: Path
) -> None:
    """5 to 15 CPU seconds, most of them the harness's: it fills a context of that length."""
    harness = get_harness(name)
    script = script_of_steps(name, context // 60)
    async with house(script, tmp_path, context=context, tokenizer=vocabulary) as home:
        session = await home.open()
        assert session.endpoint.context == context
        async with home.workspace(release(name)) as workspace:
            job = home.job(workspace, session, PROMPT)
            exit_ = await home.launch(workspace, harness, job, session, timeout=200)
        run = await home.read(Run(session, [exit_]))
    calls = [(call["kind"], call["outcome"], call["prompt_tokens"], call["error"]) for call in run.calls]
    assert exit_.ending is Ending.DONE, (exit_.output[-2000:], calls)
    assert "All read." in exit_.output, calls
    assert not [call for call in run.calls if call["outcome"] == "refused"], calls
    assert len(run.calls) > STEPS + 1, calls
    assert "not found. Defaulting" not in exit_.output
