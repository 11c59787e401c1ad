"""Scores over the trainer plane, from the embedded engine in a process of its own: right, bounded, and apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from rolltap.contract.trainer import ScoredIds
from rolltap.demo.stack import Stack
from rolltap.engine.model import CausalModel
from rolltap.engine.tiny import FOLDER
from rolltap.errors import ContextOverflow, Forbidden, InvalidRequest, UnknownPolicy
from rolltap.trainer_client.data.step import ScoredPass, view
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.run.teachers import scored_reading

from ..unit.trainer_client.making import group, record, segment
from .playing import POLICIES, POLICY

IDS = tuple((7 * place + 40) % 900 for place in range(40))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("scores"), FOLDER, {**POLICIES, "another": {}}) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> TrainerClient:
    """It owns nothing: whoever may use the policy may read its weights' opinion."""
    return TrainerClient(stack.trainer_url, stack.keys["trainer"], "judge", patience=5)


def plain(ids: tuple[int, ...]) -> torch.Tensor:
    """[len(ids) - 1, V]: the log-probs of one forward pass."""
    with torch.no_grad():
        return torch.log_softmax(CausalModel.load(FOLDER).network(torch.tensor([ids])).logits[0, :-1], -1)


def test_scores_are_the_models_own_log_probs(client: TrainerClient) -> None:
    asked = [ScoredIds(IDS, 1), ScoredIds(IDS[:17], 16), ScoredIds(IDS, 25)]
    scores = client.score(POLICY, asked, top_logprobs=3)
    assert (scores.policy, scores.version) == (POLICY, 0)
    for sequence, each in zip(asked, scores.sequences, strict=True):
        ids = tuple(sequence.token_ids)
        wanted = plain(ids)[sequence.start - 1 :]
        own = wanted.gather(1, torch.tensor(ids[sequence.start :])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(each.logprobs), own, atol=1e-4, rtol=1e-4)
        values, likeliest = wanted.topk(3)
        torch.testing.assert_close(torch.tensor(each.top_logprobs), values, atol=1e-4, rtol=1e-4)
        assert [list(top) for top in each.top_ids] == likeliest.tolist()
    assert not client.score(POLICY, asked[:1]).sequences[0].top_ids


def test_a_recipe_reads_a_served_teacher_as_its_engine_computes(client: TrainerClient) -> None:
    """Of several rows, at the places of their trained tokens; the tokenizers are compared."""
    parts = [segment(IDS[:size], [3, 4, size - 2]) for size in (20, 40)]
    step = view([group("g", [record("g", index, [part], 1.0) for index, part in enumerate(parts)])])
    reading = scored_reading(client, ScoredPass("another"), replace(step, tokenizer=FOLDER))
    for part, logprobs in zip(parts, reading.logprobs, strict=True):
        ids = part.token_ids.tolist()
        own = plain(tuple(ids)).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        wanted = np.where(part.loss_mask, np.concatenate([[0.0], own.numpy()]), 0.0)
        np.testing.assert_allclose(logprobs, wanted, atol=1e-4)


def test_scores_are_counted_apart_and_are_no_calls(stack: Stack, client: TrainerClient) -> None:
    def counted() -> dict[str, float]:
        text = httpx.get(f"{stack.admin_url}/metrics", headers=_bearer(stack.keys["admin"])).text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    before = counted()
    client.score(POLICY, [ScoredIds(IDS, 5), ScoredIds(IDS[:10], 5)])
    after = counted()
    changed = {name for name in after if after[name] != before.get(name)}
    scored = f'rolltap_scored_tokens_total{{policy="{POLICY}"}}'
    assert after[scored] - before.get(scored, 0.0) == 50
    assert not [name for name in changed if name.startswith(("rolltap_tokens_total", "rolltap_calls_total"))]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"sequences": [{"token_ids": [1, 2, 3], "start": 3}]}, "1 to 2 here, not 3"),
        ({"sequences": [{"token_ids": [1, 2, 3], "start": 0}]}, "1 to 2 here, not 0"),
        ({"sequences": [{"token_ids": [1], "start": 1}]}, "token_ids"),
        ({"sequences": [{"token_ids": [1, -2], "start": 1}]}, "token_ids"),
        ({"sequences": [{"token_ids": [1, 999_999], "start": 1}]}, "the vocabulary has"),
        ({"sequences": []}, "sequences"),
        ({"sequences": [{"token_ids": [1, 2], "start": 1}] * 257}, "sequences"),
        ({"sequences": [{"token_ids": [1, 2], "start": 1}], "top_logprobs": 21}, "top_logprobs"),
        ({"sequences": [{"token_ids": [1, 2], "start": 1}], "temperature": 2}, "temperature"),
        ({"sequences": [{"token_ids": [5] * 100_000, "start": 1}]}, "context length"),
    ],
)
def test_bad_input_is_a_400_that_names_it(stack: Stack, body: dict[str, Any], reason: str) -> None:
    reply = httpx.post(
        f"{stack.trainer_url}/policies/{POLICY}/score", json=body, headers=_bearer(stack.keys["trainer"]), timeout=30
    )
    assert reply.status_code == 400, reply.text
    assert reason in reply.text


def test_the_client_raises_what_is_wrong(client: TrainerClient) -> None:
    with pytest.raises(InvalidRequest, match=r"sequences\[1\].*vocabulary"):
        client.score(POLICY, [ScoredIds(IDS, 1), ScoredIds((1, 999_999), 1)])
    with pytest.raises(ContextOverflow):
        client.score(POLICY, [ScoredIds((5,) * 100_000, 1)])
    with pytest.raises(UnknownPolicy):
        client.score("nobody", [ScoredIds(IDS, 1)])


def test_a_key_scores_by_its_own_policies_only(stack: Stack) -> None:
    def minted(role: str, **more: Any) -> str:
        body = {"role": role, "name": "judge", **more}
        return httpx.post(f"{stack.admin_url}/keys", json=body, headers=_bearer(stack.keys["admin"])).json()["key"]

    other = TrainerClient(stack.trainer_url, minted("trainer", policies=["another"]), "judge", patience=1)
    with pytest.raises(Forbidden):
        other.score(POLICY, [ScoredIds(IDS, 1)])
    own = TrainerClient(stack.trainer_url, minted("trainer", policies=[POLICY]), "judge", patience=1)
    assert len(own.score(POLICY, [ScoredIds(IDS, 1)]).sequences[0].logprobs) == len(IDS) - 1
    viewer = TrainerClient(stack.trainer_url, minted("viewer"), "judge", patience=1)
    with pytest.raises(Forbidden):
        viewer.score(POLICY, [ScoredIds(IDS, 1)])


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
