"""One step's gradient against a plain implementation, and against itself over other packings, rows and trunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rolltap.contract.trainer import LeasedGroup
from rolltap.token_masks import FREE, MaskWriter
from rolltap.trainer_client.data.collate import collate
from rolltap.trainer_client.data.packing import Pack, PackedRow, Packer
from rolltap.trainer_client.data.scoring import Normalise
from rolltap.trainer_client.model.loss import PolicyLoss, RatioKind
from rolltap.trainer_client.model.network import PolicyNetwork, Predictions
from rolltap.types import Segment

from .making import VOCABULARY, config, group, network, random_group, random_segment, record, rows_of, segment

GROUPS = [random_group(f"g{index}", [1.0, 0.0, 0.25, 0.5], seed=index) for index in range(3)]
LOSS = PolicyLoss(0.2, 0.28)


def gradient(
    policy: PolicyNetwork,
    groups: Sequence[LeasedGroup],
    packer: Packer,
    normalise: Normalise = "token",
    loss: PolicyLoss = LOSS,
) -> Tensor:
    """The gradient of a step by our parts, as one vector."""
    policy.zero_grad()
    for pack in packer(rows_of(groups, normalise=normalise, length=30)):
        batch = collate(pack)
        loss(policy(batch), batch).loss.backward()
    return _flat(policy)


def _flat(policy: PolicyNetwork) -> Tensor:
    return torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None])


def reference_gradient(policy: PolicyNetwork, groups: Sequence[LeasedGroup]) -> Tensor:
    """GRPO's token mean as a reader would write it: a rollout at a time, eager attention, whole logits."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_config(config(), attn_implementation="eager")
    plain.load_state_dict(policy.model.state_dict())
    losses, tokens = [], 0
    for one in groups:
        rewards = torch.tensor([member.reward for member in one.rollouts])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for member, advantage in zip(one.rollouts, advantages, strict=True):
            for part in member.trajectory.segments:
                ids = torch.from_numpy(part.token_ids.astype(np.int64)).unsqueeze(0)
                logprobs = torch.log_softmax(plain(ids).logits[0, :-1], -1)
                picked = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
                ratio = (picked - torch.from_numpy(part.logprobs[1:].copy())).exp()
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                mask = torch.from_numpy(part.loss_mask[1:].copy())
                losses.append(-(gain * mask).sum())
                tokens += int(mask.sum())
    (torch.stack(losses).sum() / tokens).backward()
    named = dict(plain.named_parameters())
    return torch.cat([named[name].grad.flatten() for name, _ in policy.model.named_parameters()])  # type: ignore[union-attr]


def branching(seed: int) -> LeasedGroup:
    """Rollouts with branches: some rows share a trunk in the middle of sampled tokens, some are equal."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCABULARY, 30).tolist()
    records = []
    for index in range(4):
        first = random_segment(rng, prompt, 30)
        again = random_segment(rng, first.token_ids[:50].tolist(), 12)
        other = random_segment(rng, rng.integers(0, VOCABULARY, 8).tolist(), 9)
        records.append(record("b", index, [first, again, other], float(index % 3)))
    twin = records[0].trajectory.segments[0]
    records.append(record("b", 4, [twin], 2.5))
    return group("b", records)


def test_one_grpo_step_equals_a_plain_implementation() -> None:
    policy = network()
    torch.testing.assert_close(
        gradient(policy, GROUPS, Packer(10_000, share=True)), reference_gradient(policy, GROUPS), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("budget", [60, 150, 10_000])
def test_packing_and_shared_trunks_change_no_gradient(share: bool, budget: int) -> None:
    policy, groups = network(), [*GROUPS, branching(1)]
    alone = gradient(policy, groups, Packer(1))
    assert alone.abs().max() > 1e-3
    packed = gradient(policy, groups, Packer(budget, share=share))
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("share", [False, True])
def test_gspo_is_the_same_in_any_packing(share: bool) -> None:
    policy, groups = network(), [*GROUPS, branching(1)]
    loss = PolicyLoss(0.02, 0.02, ratio="sequence")
    alone = gradient(policy, groups, Packer(1, whole=True), "rollout", loss)
    packed = gradient(policy, groups, Packer(10_000, share=share, whole=True), "rollout", loss)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-4)


def in_rows(part: Segment, cut: int) -> list[Segment]:
    """The same trained tokens in two rows: the second has the first's tokens as its prompt."""
    trained = np.flatnonzero(part.loss_mask)
    early, late = trained[trained < cut], trained[trained >= cut]
    rows = []
    for ids, places in ((part.token_ids[:cut], early), (part.token_ids, late)):
        made = segment(ids.tolist(), places.tolist())
        logprobs = np.where(made.loss_mask, part.logprobs[: len(ids)], 0).astype(np.float32)
        rows.append(Segment(made.token_ids, made.loss_mask, logprobs, made.versions, ()))
    return rows


@pytest.mark.parametrize("normalise", ["token", "rollout", "constant"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_splitting_a_rollout_into_more_rows_changes_no_gradient(normalise: Normalise, ratio: RatioKind) -> None:
    policy = network()
    split = [
        group(
            one.group.id,
            [
                record(one.group.id, index, in_rows(member.trajectory.segments[0], 22 + index % 3), member.reward)
                for index, member in enumerate(one.rollouts)
            ],
        )
        for one in GROUPS
    ]
    packer, loss = Packer(10_000, whole=ratio == "sequence"), PolicyLoss(ratio=ratio)
    torch.testing.assert_close(
        gradient(policy, split, packer, normalise, loss),
        gradient(policy, GROUPS, packer, normalise, loss),
        atol=1e-5,
        rtol=1e-4,
    )


def test_logits_in_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = network()
    whole = gradient(policy, GROUPS, Packer(10_000))
    monkeypatch.setattr("rolltap.trainer_client.model.network.PIECE_BYTES", 4 * VOCABULARY * 7)
    torch.testing.assert_close(gradient(policy, GROUPS, Packer(10_000)), whole, atol=1e-6, rtol=1e-5)


def test_tokens_that_share_a_place_share_its_logits_and_have_each_its_own_loss() -> None:
    """Two rollouts said the same with other rewards: the places are projected once, the gradient is that of two."""
    policy, said = network(), random_segment(np.random.default_rng(5), range(20), 40)
    rows = [PackedRow.uniform(said, 0, 0, 1.0, 0.1), PackedRow.uniform(said, 1, 1, -0.5, 0.3)]

    def gradient_of(packer: Packer) -> Tensor:
        policy.zero_grad()
        for pack in packer(rows):
            batch = collate(pack)
            places = 1 if packer.share else 2
            assert len(batch.sources_U) * 2 == len(batch.targets_M) * places
            LOSS(policy(batch), batch).loss.backward()
        return _flat(policy)

    torch.testing.assert_close(gradient_of(Packer(10_000, share=True)), gradient_of(Packer(10_000)))


def test_gradient_checkpointing_changes_nothing() -> None:
    plain, spared = network(), network()
    spared.model.activation_checkpointing_enable({"use_reentrant": False})
    spared.train()
    packer = Packer(10_000, share=True)
    torch.testing.assert_close(gradient(spared, GROUPS, packer), gradient(plain, GROUPS, packer), atol=1e-6, rtol=1e-5)


def masked_group(*, share: float) -> LeasedGroup:
    """Rollouts a `share` of whose tokens were drawn from 1 to 6 ids, the sampled one among them."""
    rng = np.random.default_rng(5)
    one = random_group("m", [1.0, 0.0, 0.25, 0.5], seed=5)
    for member in one.rollouts:
        (part,) = member.trajectory.segments
        table = np.full((len(part), 6), -1, np.int32)
        for place in np.flatnonzero(part.loss_mask):
            if rng.random() < share:
                ids = np.union1d(rng.integers(0, VOCABULARY, rng.integers(0, 6)), part.token_ids[place])
                table[place, : len(ids)] = ids
        object.__setattr__(part, "extras", {"sampling_mask": table, "temperature": np.full(len(part), 0.8, np.float32)})
    return one


def as_of_grammars(one: LeasedGroup) -> LeasedGroup:
    """The same group with its masks in the form of a grammar's."""
    rollouts = []
    for member in one.rollouts:
        (part,) = member.trajectory.segments
        writer, rows = MaskWriter(), np.full(len(part), FREE, np.int32)
        for place, mask in enumerate(part.extras["sampling_mask"]):
            if (mask >= 0).any():
                bits = np.zeros(VOCABULARY, np.uint8)
                bits[mask[mask >= 0]] = 1
                rows[place] = writer.add(np.packbits(bits, bitorder="little").view(np.int32))
        extras = {"temperature": part.extras["temperature"], "mask_rows": rows, "mask_table": writer.take()}
        trajectory = replace(member.trajectory, segments=(replace(part, extras=extras),))
        rollouts.append(replace(member, trajectory=trajectory))
    return replace(one, rollouts=tuple(rollouts))


@pytest.mark.parametrize("form", ["lists", "grammars"])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_log_probs_are_over_the_ids_that_a_token_was_drawn_from(
    share: float, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside whole logits of which only the mask's are normalised: values, entropy and gradients, in any packing."""
    from transformers import AutoModelForCausalLM

    policy, one = network(), masked_group(share=share)
    plain = AutoModelForCausalLM.from_config(config(), attn_implementation="eager")
    plain.load_state_dict(policy.model.state_dict())
    wanted, entropies = [], []
    for member in one.rollouts:
        (part,) = member.trajectory.segments
        logits = plain(torch.from_numpy(part.token_ids.astype(np.int64)).unsqueeze(0)).logits[0] / 0.8
        for place in np.flatnonzero(part.loss_mask):
            mask = part.extras["sampling_mask"][place]
            ids = mask[mask >= 0].tolist() or list(range(VOCABULARY))
            logprobs = torch.log_softmax(logits[place - 1][ids], -1)
            wanted.append(logprobs[ids.index(part.token_ids[place])])
            entropies.append(-(logprobs.exp() * logprobs).sum())
    torch.stack(wanted).sum().backward()
    named = dict(plain.named_parameters())
    expected = torch.cat([named[name].grad.flatten() for name, _ in policy.model.named_parameters()])  # type: ignore[union-attr]
    for packer in (Packer(1), Packer(10_000), Packer(10_000, share=True)):
        for piece in (7, 1000):
            monkeypatch.setattr("rolltap.trainer_client.model.network.PIECE_BYTES", 4 * VOCABULARY * piece)
            policy.zero_grad()
            packs = packer(rows_of([one if form == "lists" else as_of_grammars(one)]))
            predictions = [policy(collate(pack)) for pack in packs]
            torch.cat([each.logprobs_M for each in predictions]).sum().backward()
            torch.testing.assert_close(_flat(policy), expected, atol=1e-5, rtol=1e-4)
            order = [row.rollout for pack in packs for row in pack.rows]
            by_rollout = dict(zip(order, _by_row(packs, predictions), strict=True))
            read = [by_rollout[rollout] for rollout in sorted(by_rollout)]
            torch.testing.assert_close(torch.cat([each[0] for each in read]), torch.stack(wanted), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(
                torch.cat([each[1] for each in read]), torch.stack(entropies), atol=1e-4, rtol=1e-3
            )


def _by_row(packs: Sequence[Pack], predictions: Sequence[Predictions]) -> list[tuple[Tensor, Tensor]]:
    """Log-probs and entropies of each row."""
    rows: list[tuple[Tensor, Tensor]] = []
    for pack, predicted in zip(packs, predictions, strict=True):
        sizes = [int(row.segment.loss_mask.sum()) for row in pack.rows]
        rows += zip(predicted.logprobs_M.split(sizes), predicted.entropy_M.split(sizes), strict=True)
    return rows


def test_log_probs_are_at_the_temperature_that_a_segment_carries() -> None:
    """At temperature 2 they are those of halved logits; a call of the segment that says none was sampled at 1."""
    policy = network()
    rows = rows_of([random_group("own", [1.0, 0.0, 0.25, 0.5])])  # changed below
    (pack,) = Packer(10_000)(rows)
    batch = collate(pack)
    assert batch.temperatures_M is None
    plain = policy(batch).logprobs_M
    for row in rows[:-1]:
        extra = np.where(row.segment.loss_mask, np.float32(2.0), np.float32(0.0))
        extra[np.flatnonzero(row.segment.loss_mask)[0]] = np.nan
        object.__setattr__(row.segment, "extras", {"temperature": extra})
    (pack,) = Packer(10_000)(rows)
    batch = collate(pack)
    warm = policy(batch).logprobs_M
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(0.5)
    halved = policy(batch).logprobs_M
    at_two = batch.temperatures_M == 2.0
    assert 0 < int(at_two.sum()) < len(at_two)
    torch.testing.assert_close(warm[~at_two], plain[~at_two])
    batch = replace(batch, temperatures_M=None)
    torch.testing.assert_close(policy(batch).logprobs_M[at_two], warm[at_two])
    assert not torch.allclose(halved[at_two], warm[at_two])
