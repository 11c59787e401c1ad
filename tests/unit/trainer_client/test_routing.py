"""Recorded experts replayed: a sampler that routed otherwise, families beside a plain forward, packed and shared.

The sampler is a plain forward of the family's own attention whose routers' scores have noise added before they choose,
as another machine's rounding would. Its choices are the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rolltap.errors import AlignmentError, ConfigError
from rolltap.trainer_client.data.collate import collate
from rolltap.trainer_client.data.packing import PackedRow, Packer
from rolltap.trainer_client.data.recorded import ExpertShape
from rolltap.trainer_client.data.scoring import trainable
from rolltap.trainer_client.model.learner import checkpoint_activations
from rolltap.trainer_client.model.network import PolicyNetwork, load_model
from rolltap.trainer_client.model.routing import RouterLoss

from .making import VOCABULARY, group, record, segment
from .test_architectures import ALONE, EXPERTS, HEADS, PACKED, SMALL, model_of

FAMILIES: dict[str, tuple[dict[str, Any], bool]] = {
    "Qwen3Moe": (HEADS | EXPERTS | {"norm_topk_prob": True}, False),
    "Qwen2Moe": (SMALL | EXPERTS, False),
    "Mixtral": (PACKED["Mixtral"], False),
    "GptOss": (PACKED["GptOss"], False),
    "Olmoe": (SMALL | EXPERTS, False),
    "Qwen3_5MoeText": (ALONE["Qwen3_5MoeText"], True),
    "Qwen3Next": (ALONE["Qwen3Next"], True),
}


class Sampler(TorchFunctionMode):
    """Routers choose by scores with noise; what they choose is kept. With `replayed` they choose that instead."""

    def __init__(self, experts: int, seed: int, replayed: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.experts = experts
        self.seed = seed
        self.noise = torch.Generator()
        self.replayed = list(replayed)
        self.chosen: list[Tensor] = []
        self.changed = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.topk or args[0].shape[-1] != self.experts or args[0].dim() != 2:
            return result
        scores = args[0]
        indices = self.replayed.pop(0) if self.replayed else self.choose(scores, result[1].shape[1])
        self.changed += int((indices.sort(-1).values != result[1].sort(-1).values).any(-1).sum())
        self.chosen.append(indices)
        return torch.return_types.topk((scores.gather(-1, indices), indices))

    def choose(self, scores: Tensor, count: int) -> Tensor:
        self.noise.manual_seed(self.seed + len(self.chosen))  # beginnings that are alike are routed alike
        noisy = scores.detach() + scores[0].detach().std() * torch.randn(scores.shape, generator=self.noise)
        return torch.sort(noisy, descending=True, stable=True).indices[:, :count]


def sampled_row(model: Any, ids: list[int], number: int, mode: Sampler, prompt: int) -> tuple[PackedRow, list[Tensor]]:
    """A row whose tokens from `prompt` on were sampled by the sampler: its log-probs, and the experts on record.

    The prompt is routed as the trainer does it, but for its last token, whose pass samples.
    """
    with torch.no_grad(), Sampler(mode.experts, 0, []) as plain:
        plain.choose = lambda scores, count: scores.topk(count).indices  # type: ignore[method-assign]
        model(input_ids=torch.tensor([ids]), use_cache=False)
    with torch.no_grad(), mode:
        own, mode.chosen = mode.choose, []

        def choose(scores: Tensor, count: int) -> Tensor:
            free = own(scores, count)
            kept = scores.topk(count).indices
            sampling = torch.arange(len(scores)) >= prompt - 1
            sampling[-1] = False
            return torch.where(sampling[:, None], free, kept)

        mode.choose = choose  # type: ignore[method-assign]
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        mode.choose = own  # type: ignore[method-assign]
    chosen = list(mode.chosen)
    logprobs = torch.log_softmax(logits[:-1], -1).gather(-1, torch.tensor(ids)[1:, None])[:, 0].numpy()
    made = segment(ids, range(prompt, len(ids)))
    experts = np.full((len(ids), len(chosen), chosen[0].shape[1]), -1, np.int16)
    experts[prompt:] = torch.stack(chosen, 1)[prompt - 1 : -1].numpy()
    recorded = np.where(made.loss_mask, np.concatenate([[0.0], logprobs]), 0.0).astype(np.float32)
    made = replace(made, logprobs=recorded, extras={"routed_experts": experts})
    return PackedRow.uniform(made, number, number, 1.0 + number, 0.5), chosen


def sampled(model: Any, experts: int) -> tuple[list[PackedRow], list[list[Tensor]], int]:
    """Rows with a trunk of 24 tokens that two of them share, and a third one; how often the noise decided."""
    torch.manual_seed(0)
    trunk, *rest = (torch.randint(3, 64, (size,)).tolist() for size in (24, 16, 13, 30))
    whole = [(trunk + rest[0], 20), (trunk + rest[1], 20), (rest[2], 9)]
    mode = Sampler(experts, seed=3)
    made = []
    for number, (ids, prompt) in enumerate(whole):
        made.append(sampled_row(model, ids, number, mode, prompt))
    return [row for row, _ in made], [chosen for _, chosen in made], mode.changed


def loss_of(policy: PolicyNetwork, rows: list[PackedRow], packer: Packer) -> tuple[Tensor, Tensor]:
    """The weighed sum of the trained log-probs, and the largest difference to those on record."""
    off, total = torch.zeros(()), torch.zeros(())
    for pack in packer(rows):
        batch = collate(pack, len(rows))
        predicted = policy(batch).logprobs_M
        off = torch.maximum(off, (predicted - batch.logprobs_M).abs().max().detach())
        total = total + (predicted * batch.advantages_M * batch.weights_M).sum()
    return total, off


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_sampler_that_routed_otherwise(family: str, tmp_path: Path) -> None:
    options, alone = FAMILIES[family]
    own = model_of(family, options)
    own.save_pretrained(tmp_path)
    policy = PolicyNetwork(load_model(tmp_path, torch.float32).eval())
    shape = policy.mixture.shape
    rows, chosen, changed = sampled(own, shape.experts)
    assert changed > 20, "the noise decides somewhere, or the test shows nothing"
    total = torch.zeros(())
    for row, indices in zip(rows, chosen, strict=True):
        ids = torch.as_tensor(row.token_ids, dtype=torch.long)
        with Sampler(shape.experts, 0, indices):
            logits = own(input_ids=ids[None], use_cache=False).logits[0].float()
        logprobs = torch.log_softmax(logits[:-1], -1).gather(-1, ids[1:, None])[:, 0]
        trained = torch.from_numpy(row.segment.loss_mask[1:])
        total = total + (logprobs * trained * float(row.advantages[0] * row.weights[0])).sum()
    total.backward()
    wanted = gradients(own)
    _, unreplayed = loss_of(policy, rows, Packer(1000, alone=alone))
    assert unreplayed > 1e-2, "without replay the log-probs are of another network"
    for packer in (Packer(1, alone=alone, replay=True), Packer(1000, share=True, alone=alone, replay=True)):
        loss, off = loss_of(policy, rows, packer)
        assert off < 1e-4
        loss.backward()
        for name, gradient in gradients(policy.model).items():
            torch.testing.assert_close(gradient, wanted.get(name, torch.zeros_like(gradient)), atol=2e-3, rtol=2e-3)


def test_activations_that_are_computed_again_are_routed_as_before(tmp_path: Path) -> None:
    own = model_of("Qwen3Moe", FAMILIES["Qwen3Moe"][0])
    own.save_pretrained(tmp_path)
    rows, *_ = sampled(own, 4)
    policy = PolicyNetwork(load_model(tmp_path, torch.float32).train(), routers_move=True)
    loss_of(policy, rows, Packer(1000, share=True, replay=True))[0].backward()
    kept = gradients(policy.model)
    checkpoint_activations(policy.model, policy.mixture)
    loss_of(policy, rows, Packer(1000, share=True, replay=True))[0].backward()
    for name, gradient in gradients(policy.model).items():
        torch.testing.assert_close(gradient, kept[name], atol=1e-6, rtol=1e-5)


def test_a_trunk_ends_where_two_rows_were_routed_differently(tmp_path: Path) -> None:
    own = model_of("Qwen3Moe", FAMILIES["Qwen3Moe"][0])
    own.save_pretrained(tmp_path)
    rows, *_ = sampled(own, 4)
    (pack,) = Packer(1000, share=True, replay=True)(rows)
    assert 24 in {span.position for span in pack.spans if span.ancestors}
    other = rows[1].segment.extras["routed_experts"].copy()
    other[21, 0] = [0, 1] if sorted(other[21, 0].tolist()) != [0, 1] else [2, 3]
    rows[1] = replace(rows[1], segment=replace(rows[1].segment, extras={"routed_experts": other}))
    policy = PolicyNetwork(load_model(tmp_path, torch.float32).eval())
    (pack,) = Packer(1000, share=True, replay=True)(rows)
    assert {span.position for span in pack.spans if span.ancestors} == {20}
    shared = policy(collate(pack)).logprobs_M
    alone = torch.cat([policy(collate(Packer(1, replay=True)([row])[0])).logprobs_M for row in pack.rows])
    torch.testing.assert_close(shared, alone, atol=1e-5, rtol=1e-5)


SHAPE = ExpertShape(depth=3, layers=(0, 2), experts=4, top_k=2)


@pytest.mark.parametrize(("recorded", "columns"), [(6, (0, 2)), (4, (0, 1))])
def test_engines_record_every_layer_or_those_with_experts(recorded: int, columns: tuple[int, ...]) -> None:
    assert tuple(SHAPE.columns(recorded)) == columns


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (np.zeros((3, 5), np.int16), "5 experts are recorded for a token; the model has 2 in each of 2 layers"),
        (np.zeros((3, 1, 2), np.int16), "2 experts are recorded"),
        (np.array([[0, 1, 0, 4]] * 3, np.int16), "not 2 of 4"),
        (np.array([[0, 1, 0, -1]] * 3, np.int16), "not 2 of 4"),
        (np.array([[-1] * 4, [0, 1, 0, 4], [0, 1, 2, 3]], np.int16), "not 2 of 4"),
        (np.array([[0, 1, 3, 3]] * 3, np.int16), "recorded twice"),
    ],
)
def test_a_record_that_cannot_be_the_models_is_refused_by_name(experts: np.ndarray, reason: str) -> None:
    made = replace(segment([1, 2, 3], [2]), extras={"routed_experts": experts})
    with pytest.raises(AlignmentError, match=f"group g, rollout g-r0: .*{reason}"):
        trainable(group("g", [record("g", 0, [made], 1.0)]), VOCABULARY, SHAPE)


def test_missing_experts_are_counted_or_refused() -> None:
    known = np.array([[-1, -1, -1, -1], [0, 1, 2, 3], [-1, -1, -1, -1]], np.int16)
    made = replace(segment([1, 2, 3], [1, 2]), extras={"routed_experts": known})
    bare = segment([1, 2, 3], [1, 2])
    assert (SHAPE.unrouted(made), SHAPE.unrouted(bare)) == (1, 2)
    for each in (made, bare):
        trainable(group("g", [record("g", 0, [each], 1.0)]), VOCABULARY, SHAPE)
        with pytest.raises(AlignmentError, match=r"have no recorded experts, and router\.replay is required"):
            trainable(group("g", [record("g", 0, [each], 1.0)]), VOCABULARY, SHAPE, all_routed=True)


def test_a_family_whose_choice_is_not_found_is_refused(tmp_path: Path) -> None:
    own = model_of("Qwen3Moe", FAMILIES["Qwen3Moe"][0])
    own.save_pretrained(tmp_path)
    rows, *_ = sampled(own, 4)
    policy = PolicyNetwork(load_model(tmp_path, torch.float32).eval())
    for layer in policy.model.model.layers:
        layer.mlp.gate.forward = lambda hidden: (None, hidden[:, :2], torch.zeros(len(hidden), 2, dtype=torch.long))
    with pytest.raises(ConfigError, match=r'set router\.replay = "off"'):
        loss_of(policy, rows, Packer(1000, replay=True))


def plain_router_loss(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Switch's load balance and ST-MoE's z-loss of one row, written from the papers with loops."""
    tokens, experts = logits.shape
    probabilities = torch.softmax(logits, -1)
    balance = torch.zeros(())
    for expert in range(experts):
        share = sum(int(expert in chosen[token].tolist()) for token in range(tokens)) / tokens
        balance = balance + share * probabilities[:, expert].mean()
    z = sum(torch.log(torch.exp(logits[token]).sum()) ** 2 for token in range(tokens)) / tokens
    return balance * experts / chosen.shape[1], z  # type: ignore[return-value]


def test_router_losses_are_the_papers_and_do_not_depend_on_packing(tmp_path: Path) -> None:
    own = model_of("Qwen3Moe", FAMILIES["Qwen3Moe"][0])
    own.save_pretrained(tmp_path)
    rows, *_ = sampled(own, 4)
    policy = PolicyNetwork(load_model(tmp_path, torch.float32).eval(), routers_move=True)
    loss, found = RouterLoss(balance=0.3, z=0.02), []
    for packer in (Packer(1, replay=True), Packer(1000, share=True, replay=True)):
        total = torch.zeros(())
        for pack in packer(rows):
            batch = collate(pack, len(rows))
            choices = policy(batch).choices
            assert len(choices) == 2
            plain = torch.zeros(())
            for logits, chosen in choices:
                for place in batch.places:
                    balance, z = plain_router_loss(logits[place], chosen[place])
                    plain = plain + (0.3 * balance + 0.02 * z) / 2
            torch.testing.assert_close(loss(choices, batch.places), plain, atol=1e-6, rtol=1e-5)
            total = total + loss(choices, batch.places) / batch.update_rows
        total.backward()
        found.append((total.detach(), gradients(policy.model)))
    (alone, apart), (packed, together) = found
    torch.testing.assert_close(alone, packed, atol=1e-6, rtol=1e-5)
    for name, gradient in apart.items():
        torch.testing.assert_close(gradient, together[name], atol=1e-5, rtol=1e-4, msg=name)
    even = torch.zeros(8, 4), torch.tensor([[0, 1], [2, 3]] * 4)
    assert RouterLoss(balance=1.0)([even], [torch.arange(8)]) == pytest.approx(1.0)
