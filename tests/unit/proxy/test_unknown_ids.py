"""Ids past the tokenizer's vocabulary: a flaw of their call, which neither a trainer nor an engine sees again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltap.engine.scripted import Fault, ScriptedEngine, ScriptedReply, say
from rolltap.engine.tiny import FOLDER
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.tokenizer import HubTokenizer
from rolltap.types import BreakReason, Flaw, Outcome

from .test_chat_mode import chat_mode_proxy, client_of, rows_of
from .test_kept_arrays import USER, served

FAULTS = (None, Fault(kind="nan_logprobs"), Fault(kind="no_logprobs"))


@pytest.mark.parametrize(("unknown", "fault"), [(880, None), (10**6, None), *((2**31 - 1, fault) for fault in FAULTS)])
async def test_a_reply_with_an_unknown_id_is_masked_and_goes_on_as_text(
    plane: Any, unknown: int, fault: Fault | None
) -> None:
    """Also where the engine's log-probs are as broken as its ids."""
    tokenizer = plane.policy.source.continuation.renderer.tokenizer
    known = tokenizer.encode("one")
    ids = (*known, unknown, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    reply = ScriptedReply(ids=ids, fault=fault)
    async with served(plane, "vllm", "zero", reply, "two"):
        history = [USER]
        for _ in range(3):
            answer = (await plane.client.chat(*history)).json()["choices"][0]["message"]
            history += [answer, USER]
    first, second, third = [row.call() for row in await plane.rows()]
    assert second.flaw is Flaw.IDS_UNKNOWN
    assert unknown in second.output_ids
    assert third.break_ is not None
    assert third.break_.reason is BreakReason.IDS_UNKNOWN
    assert unknown not in third.prompt_ids
    trajectory = reconstruct([first, second, third])
    assert [one.mask for one in trajectory.classifications] == ["", "ids_unknown", ""]
    assert trajectory.counts["masked_calls.ids_unknown"] == 1
    assert "ids_unknown" in [finding.name for finding in trajectory.findings]
    assert all(segment.token_ids.max() < 880 for segment in trajectory.segments)


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
@pytest.mark.parametrize("unknown", [880, 10**6, 2**31 - 1])
async def test_a_chat_upstreams_unknown_ids_are_masked_where_its_tokenizer_is_named(
    wire: str, unknown: int, tmp_path: Path
) -> None:
    tokenizer = HubTokenizer(FOLDER)
    ids = (*tokenizer.encode("one"), unknown, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    async with (
        ScriptedEngine(say(ScriptedReply(ids=ids)), FOLDER, wire=wire) as engine,
        chat_mode_proxy(tmp_path, engine, tokenizer=str(FOLDER)) as (app, url),
    ):
        await client_of(app, url).chat.completions.create(model="default", messages=[USER])  # type: ignore[arg-type]
        (call,) = [row.call() for row in await rows_of(app)]
    assert unknown in call.output_ids
    assert call.flaw is Flaw.IDS_UNKNOWN


@pytest.mark.parametrize("wire", ["vllm", "sglang", "llamacpp"])
@pytest.mark.parametrize("odd", [-1, -(2**31), 2**31, 2**63, 2**70])
async def test_a_number_that_is_no_id_fails_its_call(plane: Any, wire: str, odd: int) -> None:
    tokenizer = plane.policy.source.continuation.renderer.tokenizer
    ids = (*tokenizer.encode("one"), odd, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    async with served(plane, wire, ScriptedReply(ids=ids)):
        assert (await plane.client.chat(USER)).status == 502
    (row,) = await plane.rows()
    assert row.completion.outcome is Outcome.ENGINE_ERROR
    assert row.completion.error.startswith("engine_protocol_error")


VOCABULARY = json.loads((Path(FOLDER) / "tokenizer.json").read_text(encoding="utf-8"))


@settings(max_examples=10)
@given(st.sets(st.integers(300, 870), max_size=3))
def test_an_id_is_known_if_it_has_a_token(removed: set[int]) -> None:
    """Vocabularies have gaps."""
    changed = json.loads(json.dumps(VOCABULARY))
    vocabulary = changed["model"]["vocab"]
    lost = {token for token, id in vocabulary.items() if id in removed}
    changed["model"]["vocab"] = {token: id for token, id in vocabulary.items() if token not in lost}
    merges = (merge if isinstance(merge, list) else merge.split(" ") for merge in changed["model"]["merges"])
    changed["model"]["merges"] = [pair for pair in merges if lost.isdisjoint((*pair, "".join(pair)))]
    with TemporaryDirectory() as folder:
        shutil.copytree(FOLDER, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("weights"))
        (Path(folder) / "tokenizer.json").write_text(json.dumps(changed), encoding="utf-8")
        tokenizer = HubTokenizer(folder)
    for id in (*range(900), 10**6):
        assert tokenizer.lacks([0, id]) is (tokenizer._tokenizer.id_to_token(id) is None)
