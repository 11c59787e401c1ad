"""One contract for every engine client with a token API, over real HTTP to the scripted engine: what it samples.

Chunks come in order and the last one has `finish`; log-probs are one per id or said to be missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltap.engine.scripted import Fault, ScriptedReply
from rolltap.engine.scripted.sampling import experts_of
from rolltap.errors import (
    ContextOverflow,
    EngineRefused,
)

from .engine_world import EXACT, EXPERTS, PROMPT, REPLY, Start, ids_of, logprobs_of, starter


async def test_tokens_come_as_sampled(start_any: Start):
    async with start_any(REPLY) as world:
        chunks = await world.sample()
    assert ids_of(chunks) == list(REPLY.ids or ())
    assert logprobs_of(chunks) == EXACT
    assert [chunk.finish for chunk in chunks if chunk.finish] == ["stop"]
    assert chunks[-1].finish == "stop"
    assert world.server.journal.entries[0].prompt_ids == PROMPT


async def test_a_whole_reply_is_the_streamed_one(start_any: Start):
    async with start_any(REPLY) as world:
        chunks = await world.sample(stream=False)
        streamed = await world.sample()
    assert (ids_of(chunks), logprobs_of(chunks)) == (list(REPLY.ids or ()), EXACT)
    assert [chunk.finish for chunk in chunks] == ["stop"]
    assert chunks[-1].versions == streamed[-1].versions


@pytest.mark.parametrize("size", [1, 2, 5, 100])
async def test_any_number_of_tokens_a_event(start_any: Start, size: int):
    async with start_any(ScriptedReply(ids=REPLY.ids, tokens_per_event=size)) as world:
        chunks = await world.sample()
    assert ids_of(chunks) == list(REPLY.ids or ())
    assert logprobs_of(chunks) == EXACT


async def test_a_length_limit_is_a_finish_of_its_own(start_any: Start):
    async with start_any(REPLY) as world:
        chunks = await world.sample(max_tokens=3)
    assert ids_of(chunks) == [10, 11, 12]
    assert chunks[-1].finish == "length"


async def test_a_stop_token_ends_the_output_and_is_part_of_it(start_any: Start):
    async with start_any(REPLY) as world:
        chunks = await world.sample(stop_token_ids=(12,))
    assert ids_of(chunks) == [10, 11, 12]
    assert chunks[-1].finish == "stop"


async def test_candidates_of_each_position(start_any: Start):
    async with start_any(REPLY) as world:
        chunks = await world.sample(top_logprobs=3)
    for chunk in chunks:
        assert chunk.extras["top_ids"].shape == (len(chunk.token_ids), 3)
        assert set(chunk.token_ids) <= set(chunk.extras["top_ids"].ravel().tolist())
        assert (chunk.extras["top_logprobs"][:, :-1] >= chunk.extras["top_logprobs"][:, 1:]).all()


@pytest.mark.parametrize("wire", EXPERTS)
@pytest.mark.parametrize("size", [1, 3])
async def test_the_experts_that_sampled_each_token(wire: str, size: int):
    """Token i was sampled by the pass that read the token before it."""
    async with starter(wire)(ScriptedReply(ids=REPLY.ids, tokens_per_event=size)) as world:
        chunks = await world.sample(routed_experts=True)
        without = await world.sample()
    ids = REPLY.ids or ()
    read = experts_of([PROMPT[-1], *ids[:-1]])
    assert all(not chunk.whole for chunk in [*chunks[:-1], *without])
    found = chunks[-1].whole["routed_experts"]
    assert found.dtype == np.int16
    np.testing.assert_array_equal(found.reshape(read.shape), read)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("no_logprobs", lambda chunks: any(chunk.logprobs is None for chunk in chunks)),
        ("short_logprobs", lambda chunks: any(chunk.logprobs is None for chunk in chunks)),
        ("nan_logprobs", lambda chunks: any(math.isnan(value) for value in logprobs_of(chunks))),
        ("null_logprobs", lambda chunks: any(math.isnan(value) for value in logprobs_of(chunks))),
    ],
)
@pytest.mark.parametrize("after", [0, 3])
async def test_logprobs_are_never_made_up(start_any: Start, kind: Any, check: Callable[..., bool], after: int):
    async with start_any(ScriptedReply(ids=REPLY.ids, fault=Fault(kind=kind, after=after))) as world:
        chunks = await world.sample()
    assert ids_of(chunks) == list(REPLY.ids or ())
    assert check(chunks)


async def test_logprobs_before_the_missing_ones_are_kept(start: Start):
    async with start(ScriptedReply(ids=REPLY.ids, fault=Fault(kind="no_logprobs", after=3))) as world:
        chunks = await world.sample()
    known = [chunk for chunk in chunks if chunk.logprobs is not None and chunk.token_ids]
    assert logprobs_of(known) == EXACT[:3]
    missing = [chunk for chunk in chunks if chunk.logprobs is None]
    assert ids_of(known) + ids_of(missing) == list(REPLY.ids or ())


async def test_a_prompt_that_was_altered_is_shown(start: Start):
    async with start(ScriptedReply(ids=REPLY.ids, fault=Fault(kind="altered_prompt"))) as world:
        chunks = await world.sample()
    assert list(chunks[0].prompt_ids or ()) != PROMPT


async def test_connections_are_used_again(start_any: Start):
    async with start_any(*[REPLY] * 20) as world:
        port = int(world.server.url.rpartition(":")[2])
        earlier = connections_to(port)  # the kernel remembers those to a server that had this port a minute ago
        for _ in range(20):
            await world.sample()
        assert len(connections_to(port) - earlier) == 1


def connections_to(port: int) -> set[str]:
    """The local ends of this machine's connections to a port of it, closing ones included."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    return {local for _, local, remote, *_ in rows if int(remote.rpartition(":")[2], 16) == port}


async def test_a_prompt_that_does_not_fit(start_any: Start):
    async with start_any(REPLY, context=4) as world:
        with pytest.raises(ContextOverflow) as caught:
            await world.sample()
        assert (caught.value.tokens, caught.value.limit) == (4, 4)


@pytest.mark.parametrize("mode", ["processed", "raw"])
async def test_the_probe_tells_what_the_server_gives(start: Start, mode: str):
    async with start(REPLY, mode=mode) as world:
        facts = await world.engine.probe()
    assert facts.models == ("scripted",)
    assert facts.max_context == 4096
    assert facts.weight_updates
    assert facts.logprobs_mode == mode
    budgets = sum("budget" in note for note in facts.notes)
    assert budgets == (facts.kind == "sglang" or mode == "processed")
    assert len(facts.notes) == (mode == "raw") + (not facts.weight_versions) + budgets


async def test_llama_cpp_says_what_it_can_not(tmp_path: Path):
    async with starter("llamacpp")(REPLY) as world:
        facts = await world.engine.probe()
        with pytest.raises(EngineRefused, match="can't change its weights"):
            await world.engine.load_weights(str(tmp_path), 1)
    assert (facts.max_context, facts.logprobs_mode, facts.weight_updates) == (4096, "raw", False)
    assert "replies come in one piece" in facts.notes


async def test_a_conversation_extends_token_for_token(start_any: Start):
    async with start_any("one", "two", "three") as world:
        prompt = PROMPT
        for _ in range(3):
            output = ids_of(await world.sample(prompt_ids=prompt))
            prompt = [*prompt, *output, 9]
        await world.sample(prompt_ids=[*PROMPT, 1])
        entries = list(world.server.journal.entries)
    assert [entry.extends for entry in entries] == [None, True, True, False]
    assert [entry.turn for entry in entries] == [0, 1, 2, 0]
