"""Constrained requests against a real process: what they may sample, what they tell, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import io
import random
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from rolltap.engine.model import CausalModel
from rolltap.token_masks import FREE, ids_of

from ...schemas import check, schema
from .test_server import GENERATE, PROMPT, events, logprobs_of, post

LONG = 900
ENDS, THINK, THOUGHT = ("<|im_end|>", "<|endoftext|>"), "<think>", "</think>"


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


def body_of(grammar: dict[str, Any], *, stream: bool = False, **sampling: Any) -> dict[str, Any]:
    params = {"logprobs": 0, "max_tokens": LONG, "structured_outputs": grammar, **sampling}
    return {"token_ids": PROMPT, "stream": stream, "sampling_params": params}


async def constrained(engine: aiohttp.ClientSession, grammar: dict[str, Any], **sampling: Any) -> dict[str, Any]:
    return (await post(engine, GENERATE, body_of(grammar, **sampling)))["choices"][0]


def table_of(pieces: list[dict[str, Any]]) -> np.ndarray:
    encoded = [piece["mask_table"] for piece in pieces if piece.get("mask_table")]
    arrays = [np.load(io.BytesIO(base64.b64decode(one))) for one in encoded]
    return np.concatenate([np.empty(0, np.int32), *arrays])


def assert_drawn_from_masks(choice: dict[str, Any], model: CausalModel, temperature: float = 1.0) -> None:
    """Each log-prob is the model's, normalised over the ids that the reply tells."""
    ids, rows, table = choice["token_ids"], choice["mask_rows"], table_of([choice])
    assert len(rows) == len(ids)
    with torch.no_grad():
        logits_TV = model.network(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1] / temperature
    for token, row, logits_V, logprob in zip(ids, rows, logits_TV, logprobs_of(choice), strict=True):
        mask = ids_of(row, table)
        left = np.arange(len(logits_V)) if mask is None else mask
        assert token in left
        total = logits_V[torch.from_numpy(left.astype(np.int64))].logsumexp(0)
        assert float(logits_V[token] - total) == pytest.approx(logprob, abs=1e-4)
        assert row >= FREE or logprob == 0.0


async def test_random_schemas_are_kept_and_told(
    engine: aiohttp.ClientSession, model: CausalModel, tokenizer: Tokenizer
) -> None:
    rng = random.Random(7)
    wanted = [schema(rng) for _ in range(24)]
    cuts = [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 3, "temperature": 1.3}]
    jobs = [constrained(engine, {"json": one}, seed=at, **cuts[at % 4]) for at, one in enumerate(wanted)]
    for at, (one, choice) in enumerate(zip(wanted, await asyncio.gather(*jobs), strict=True)):
        assert choice["finish_reason"] == "stop", one
        assert tokenizer.id_to_token(choice["token_ids"][-1]) in ENDS
        check(tokenizer.decode(choice["token_ids"]), one)
        assert_drawn_from_masks(choice, model, cuts[at % 4].get("temperature", 1.0))


async def test_streamed_and_whole_are_the_same(engine: aiohttp.ClientSession) -> None:
    one = schema(random.Random(3))
    whole = await constrained(engine, {"json": one}, seed=5)
    async with engine.post(GENERATE, json=body_of({"json": one}, stream=True, seed=5)) as reply:
        pieces = [event["choices"][0] async for event in events(reply) if isinstance(event, dict)]
    assert [id for piece in pieces for id in piece["token_ids"]] == whole["token_ids"]
    assert [row for piece in pieces for row in piece.get("mask_rows") or ()] == whole["mask_rows"]
    np.testing.assert_array_equal(table_of(pieces), table_of([whole]))


async def test_other_forms_of_a_grammar(engine: aiohttp.ClientSession, tokenizer: Tokenizer) -> None:
    forms = [
        {"regex": "(yes|no)/[0-9]{3}"},
        {"grammar": 'start: "yes" "/" /[0-9]{3}/ | "no/" /[0-9]{3}/'},
        {"json_object": True},
    ]
    *texts, free = [tokenizer.decode((await constrained(engine, form, max_tokens=40))["token_ids"]) for form in forms]
    for text in texts:
        assert text.split("/")[0] in ("yes", "no")
        assert len(text.split("/")[1]) == 3
    assert free.startswith("{")


async def test_each_choice_walks_for_itself(engine: aiohttp.ClientSession, tokenizer: Tokenizer) -> None:
    one = schema(random.Random(11))
    choices = (await post(engine, GENERATE, body_of({"json": one}, n=5)))["choices"]
    for choice in choices:
        check(tokenizer.decode(choice["token_ids"]), one)


async def test_the_limit_cuts_a_constrained_reply_off(engine: aiohttp.ClientSession) -> None:
    choice = await constrained(
        engine, {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 90}}, max_tokens=9
    )
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == len(choice["mask_rows"]) == 9


async def test_thinking_is_free_and_the_grammar_begins_behind_it(
    engine: aiohttp.ClientSession, model: CausalModel, tokenizer: Tokenizer
) -> None:
    """In a prompt that opens it, and where the model may open it: a random model closes its thinking now and then."""
    close, open_ = tokenizer.token_to_id(THOUGHT), tokenizer.token_to_id(THINK)
    form = {"json": {"enum": ["left", "right"]}, "thinking": {"close": close, "opened": True}}
    jobs = [constrained(engine, form, seed=seed, max_tokens=LONG, temperature=1.5) for seed in range(24)]
    may_open = {"json": {"enum": ["left", "right"]}, "thinking": {"close": close, "open": open_}}
    *opened, choice = await asyncio.gather(*jobs, constrained(engine, may_open))  # before what follows holds the loop
    first = ids_of(choice["mask_rows"][0], table_of([choice]))
    assert first is not None
    assert open_ in first
    assert choice["token_ids"][0] == open_ or tokenizer.decode(choice["token_ids"]).strip() in ('"left"', '"right"')
    closed = [one for one in opened if close in one["token_ids"]]
    assert closed
    for choice in closed:
        at = choice["token_ids"].index(close) + 1
        assert set(choice["mask_rows"][:at]) == {FREE}
        assert tokenizer.decode(choice["token_ids"][at:]).strip() in ('"left"', '"right"')
        assert_drawn_from_masks(choice, model, 1.5)


@pytest.mark.parametrize("form", [{}, {"json": {"enum": ["left", "right"]}}])
async def test_thinking_ends_at_its_budget(
    engine: aiohttp.ClientSession, model: CausalModel, tokenizer: Tokenizer, form: dict[str, Any]
) -> None:
    """With a grammar and without: at the budget only the end is left, and the reply says so."""
    close, open_ = tokenizer.token_to_id(THOUGHT), tokenizer.token_to_id(THINK)
    ended = 0
    for budget in (0, 1, 7, 40):
        asked = {**form, "thinking": {"close": close, "opened": True, "budget": budget}}
        for seed in range(4):
            choice = await constrained(engine, asked, seed=seed, max_tokens=80, temperature=1.5)
            ids, rows = choice["token_ids"], choice["mask_rows"]
            assert_drawn_from_masks(choice, model, 1.5)
            thought = ids.index(close) if close in ids[: budget + 1] else None
            if thought is None:
                assert len(ids) <= budget  # the reply ended in its thinking
                continue
            assert set(rows[:thought]) <= {FREE}
            if thought == budget:
                ended += 1
                left = ids_of(rows[budget], table_of([choice]))
                assert left is not None
                assert left.tolist() == [close]
            if form:
                assert tokenizer.decode(ids[thought + 1 :]).strip() in ('"left"', '"right"')
            else:
                assert set(rows[thought + 1 :]) <= {FREE}
    assert ended >= 8
    may_open = {**form, "thinking": {"close": close, "open": open_, "budget": 0}}
    choice = await constrained(engine, may_open, max_tokens=40)
    if choice["token_ids"][0] == open_:
        assert choice["token_ids"][1] == close


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"json": {"type": "not-a-type"}}, "not-a-type"),
    "keyword": ({"json": {"type": "string", "not": {}}}, "not"),
    "pattern": ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
    "look-ahead": ({"json": {"type": "string", "pattern": "(?!a)b"}}, "look-ahead"),
    "reference": ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
    "loop": ({"json": {"$ref": "#"}}, ""),
    "unsatisfiable": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "nsatisfiable"),
    "huge": ({"json": {"enum": [f"{at:09}" for at in range(40_000)]}}, "limit"),
    "lark": ({"grammar": "start: nowhere"}, "nowhere"),
    "none": ({}, "0 grammars"),
    "two": ({"regex": "a", "json_object": True}, "2 grammars"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_bad_grammar_is_refused_with_its_problem(engine: aiohttp.ClientSession, name: str) -> None:
    grammar, words = REFUSED[name]
    async with asyncio.timeout(20):
        async with engine.post(GENERATE, json=body_of(grammar)) as reply:
            told = await reply.text()
    assert reply.status == 400, told
    assert words in told
    assert "structured_outputs" in told
    assert (await constrained(engine, {"regex": "ok"}))["finish_reason"] == "stop"


async def test_a_step_that_takes_too_much_effort_ends_its_request_alone(engine: aiohttp.ClientSession) -> None:
    # at least 30 letters: a shorter string would end before the effort is too much
    slow = {"json": {"type": "string", "pattern": "^(([a-z]{1,500}){30,500}){1,50}$"}}
    one = schema(random.Random(1))
    ended, other = await asyncio.gather(constrained(engine, slow), constrained(engine, {"json": one}))
    assert (ended["finish_reason"], other["finish_reason"]) == ("abort", "stop")
