"""What is shown of a session whose upstream returned text without token ids: the upstream's own numbers of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolltap.engine.scripted import ScriptedEngine, say
from rolltap.engine.tiny import FOLDER
from rolltap.proxy.call.engine_watch import probe_engine
from rolltap.proxy.viewer.one_file import one_file
from rolltap.proxy.viewer.pages import Pages
from rolltap.reading.reader import reader_on

from .test_chat_mode import LOOK, chat_mode_proxy, client_of, rows_of, two_turns


async def test_the_upstreams_own_counts_are_shown_where_there_are_no_ids(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(say(LOOK, "There are three."), FOLDER, wire="openai") as engine,
        chat_mode_proxy(tmp_path, engine) as (app, url),
    ):
        async with client_of(app, url) as client:
            await two_turns(client)
        rows = await rows_of(app)
        usages = [(row.completion.usage["prompt"], row.completion.usage["output"]) for row in rows]
        reader = reader_on(app.services.call_log)
        try:
            await reader.settle()
            (listed,) = (await reader.sessions()).sessions
            detail = await reader.session(listed.id)
            tokens = await reader.tokens(rows[0].intent.id)
            page = await Pages(reader, "store").call(rows[0].intent.id)
            saved = await one_file(reader, listed.id)
        finally:
            await reader.close()
    assert all(prompt > 0 and output > 0 for prompt, output in usages)
    sums = tuple(map(sum, zip(*usages, strict=True)))
    assert (listed.prompt_tokens, listed.output_tokens) == sums
    assert (detail.summary.prompt_tokens, detail.summary.output_tokens) == sums
    assert [(call.prompt_tokens, call.output_tokens) for call in detail.calls] == usages
    assert [(call.token_ids, call.length) for call in detail.calls] == [(False, 0)] * 2
    assert tokens.total == 0
    assert '"total": 0' in page or '"total":0' in page
    assert "No tokenizer is known" not in page + saved
    assert [(found.name, found.grade) for found in detail.findings] == [("text_only", "info")]


@pytest.mark.parametrize("trainable", [True, False])
async def test_a_start_on_an_engine_without_token_ids_says_once_that_nothing_can_be_trained(
    trainable: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        ScriptedEngine(say("Hello."), FOLDER, wire="openai") as engine,
        chat_mode_proxy(tmp_path, engine, trainable=trainable) as (app, _),
    ):
        (policy,) = app.policies.all
        await probe_engine(app.policies, policy)  # as after calls without an answer
    said = [record.getMessage() for record in caplog.records if "can't be trained" in record.getMessage()]
    sentence = "no token ids with its replies: its calls are recorded as text and can't be trained"
    assert said == ([f"policy default: engine main: {sentence}"] if trainable else [])
