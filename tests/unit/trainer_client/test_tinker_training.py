"""The unmodified `tinker` SDK trains on our endpoint: gradients and steps are our trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from rolltap.engine.tiny import FOLDER
from rolltap.trainer_client.data.collate import collate
from rolltap.trainer_client.data.packing import PackedRow, Packer
from rolltap.trainer_client.model.learner import Learner
from rolltap.trainer_client.model.loss import PolicyLoss
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.settings import load_trainer_settings
from rolltap.types import Segment

from .making import segment
from .tinkering import Service, datum, serving

ADAM = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.01)
"""An epsilon that tells a gradient of rounding from a real one."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(FOLDER, tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    yield running
    running.close_clients()


@pytest.fixture(scope="module")
def plain() -> Any:
    """transformers' own model, with the endpoint's first weights."""
    return AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="eager")


def rollouts(seed: int = 0) -> list[tuple[Segment, float]]:
    """Rows that begin alike, with log-probs near the model's, and an advantage each."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(10, 800, 24).tolist()
    rows = []
    for number in range(4):
        ids = [*prompt, *rng.integers(10, 800, 6 + number).tolist()]
        part = segment(ids, range(24, len(ids)))
        noise = np.where(part.loss_mask, rng.normal(-6.7, 0.4, len(ids)), 0).astype(np.float32)
        rows.append((Segment(part.token_ids, part.loss_mask, noise, part.versions, ()), float(rng.normal())))
    return rows


def data_of(rows: list[tuple[Segment, float]]) -> list[types.Datum]:
    return [
        datum(
            part.token_ids.tolist(),
            logprobs=part.logprobs[1:],
            advantages=np.where(part.loss_mask, advantage, 0.0)[1:],
        )
        for part, advantage in rows
    ]


def our_learner(out: Path, rank: int) -> Learner:
    """Our trainer's own, with the adapters that the endpoint begins with where there are some."""
    lora = {"rank": rank, "targets": ("mlp", "attention", "unembedding")}
    settings = load_trainer_settings(None, key="", policy="p", model=FOLDER, out=out, lora=lora)
    torch.manual_seed(1)
    return Learner(FOLDER, settings, Ranks.of_environment("cpu"))


def our_gradient(learner: Learner, rows: list[tuple[Segment, float]]) -> float:
    """Adds the clipped policy gradient of our loop's own packs and loss; the loss."""
    packed = [PackedRow.uniform(part, at, at, advantage, 1.0) for at, (part, advantage) in enumerate(rows)]
    total = 0.0
    for pack in Packer(10_000, share=True)(packed):
        batch = collate(pack)
        loss = PolicyLoss(0.2, 0.2)(learner.predict(batch), batch).loss
        learner.backward(loss)
        total += float(loss.detach())
    return total


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in learner.model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("rank", [0, 4])
def test_gradients_and_steps_are_our_trainers(service: Service, tmp_path: Path, rank: int) -> None:
    """Two steps, of all weights and of adapters on every linear layer."""
    client, ours = service.train(rank), our_learner(tmp_path, rank)
    theirs = service.trained(client).learner
    for step in range(2):
        rows = rollouts(step)
        output = client.forward_backward(data_of(rows), "ppo").result()
        loss = our_gradient(ours, rows)
        pairs = [(gradient, gradients(theirs)[name]) for name, gradient in gradients(ours).items()]
        furthest = max(float((one - other).abs().max()) for one, other in pairs)
        largest = max(float(one.abs().max()) for one, _ in pairs)
        print(
            f"rank {rank}, step {step}: loss {loss:.6f} and {output.metrics['loss:sum']:.6f}, "
            f"{len(pairs)} gradients up to {largest:.2f}, at most {furthest:.1e} apart"
        )
        assert len(pairs) == len(gradients(theirs))
        assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
        for one, other in pairs:
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        norm = client.optim_step(ADAM).result().metrics
        assert norm == {"grad_norm": pytest.approx(ours.clip(torch.inf), rel=1e-4)}
        ours.apply_with(lr=1e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.01)
        for name, weight in ours.model.named_parameters():
            torch.testing.assert_close(weight, dict(theirs.model.named_parameters())[name], atol=1e-5, rtol=1e-4)


def test_log_probs_are_of_every_target_whatever_it_weighs(service: Service, plain: Any) -> None:
    client, ids = service.train(), list(range(20, 40))
    forward = client.forward([datum(ids, weights=0.0), datum(ids[:9], weights=1.0)], "cross_entropy").result()
    with torch.no_grad():
        logits = plain(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    whole, part = (one["logprobs"].to_numpy() for one in forward.loss_fn_outputs)
    np.testing.assert_allclose(whole, expected, atol=1e-4)
    np.testing.assert_allclose(part, expected[:8], atol=1e-4)
    assert forward.metrics["loss:sum"] == pytest.approx(-expected[:8].sum(), rel=1e-5)
    with pytest.raises(tinker.RequestFailedError, match="there is no gradient"):
        client.optim_step(ADAM).result()


LOSSES = {
    "cross_entropy": (lambda lp, old, a: -lp * a, {}),
    "importance_sampling": (lambda lp, old, a: -(lp - old).exp() * a, {}),
    "ppo": (
        lambda lp, old, a: -torch.minimum((lp - old).exp() * a, (lp - old).exp().clamp(0.9, 1.1) * a),
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    ),
    "cispo": (lambda lp, old, a: -(lp - old).exp().clamp(0.8, 1.2).detach() * lp * a, {}),
    "dro": (lambda lp, old, a: -(lp * a - 0.5 * 0.1 * (lp - old) ** 2), {"beta": 0.1}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_is_the_documented_sum(service: Service, plain: Any, name: str) -> None:
    formula, config = LOSSES[name]
    client = service.train()
    rows = rollouts(7)
    data, total = [], torch.zeros(())
    for part, advantage in rows:
        weights = np.where(part.loss_mask, advantage, 0.0)[1:]
        inputs = {"advantages": weights, "logprobs": part.logprobs[1:]}
        data.append(datum(part.token_ids.tolist(), **({"weights": weights} if name == "cross_entropy" else inputs)))
        ids = torch.from_numpy(part.token_ids.astype(np.int64))
        logprobs = plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        total = total + formula(logprobs, torch.from_numpy(part.logprobs[1:]), torch.from_numpy(weights).float()).sum()
    plain.zero_grad()
    total.backward()
    output = client.forward_backward(data, name, config).result()  # type: ignore[arg-type]
    assert output.metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-4)
    theirs = gradients(service.trained(client).learner)
    for weight, parameter in plain.named_parameters():
        torch.testing.assert_close(theirs[weight], parameter.grad, atol=1e-3, rtol=1e-3)


def test_a_distribution_over_targets_is_learned(service: Service) -> None:
    """Two targets a token, most of them nothing: the SDK sends them sparse."""
    client = service.train()
    targets, weights = torch.zeros(12, 8, dtype=torch.int64), torch.zeros(12, 8)
    targets[3, :2], weights[3, :2] = torch.tensor([30, 40]), torch.tensor([0.75, 0.25])
    both = types.Datum(types.ModelInput.from_ints([*range(20, 32)]), {"target_tokens": targets, "weights": weights})  # type: ignore[dict-item]
    assert both.loss_fn_inputs["weights"].sparse_crow_indices is not None
    output = client.forward([both], "cross_entropy").result()
    logprobs = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert logprobs.shape == (12, 8)
    assert output.metrics["loss:sum"] == pytest.approx(-0.75 * logprobs[3, 0] - 0.25 * logprobs[3, 1], rel=1e-5)


def test_a_custom_loss_runs_in_the_client(service: Service) -> None:
    client = service.train(2)
    model = service.trained(client).learner

    def squares(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return sum((one**2).sum() for one in logprobs), {}  # type: ignore[return-value]

    before = client.forward_backward_custom([datum([*range(30, 50)], weights=1.0)], squares).result()
    assert gradients(model)
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    after = client.forward_backward_custom([datum([*range(30, 50)], weights=1.0)], squares).result()
    assert after.metrics["loss:sum"] < before.metrics["loss:sum"]


@pytest.mark.parametrize("rank", [0, 4])
def test_a_saved_state_goes_on_as_if_nothing_had_been(service: Service, rank: int) -> None:
    """With the optimiser; and without it, the weights alone."""
    client = service.train(rank)

    def step(of: tinker.TrainingClient, seed: int) -> None:
        of.forward_backward(data_of(rollouts(seed)), "importance_sampling")
        of.optim_step(ADAM).result()

    def weights(of: tinker.TrainingClient) -> dict[str, torch.Tensor]:
        return service.trained(of).learner.weights()

    fresh = client.save_state("fresh").result()
    step(client, 0)
    path = client.save_state("one").result().path
    assert path == f"tinker://{client.model_id}/weights/one"
    saved = {name: weight.clone() for name, weight in weights(client).items()}
    step(client, 1)
    resumed = service.client().create_training_client_from_state_with_optimizer(path).result()
    plain = service.client().create_training_client_from_state(path).result()
    for name, weight in weights(plain).items():
        torch.testing.assert_close(weight, saved[name], atol=0, rtol=0)
    step(resumed, 1)
    step(plain, 1)
    expected = weights(client)
    for name, weight in weights(resumed).items():
        torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=1e-5)
    assert any(not torch.allclose(weight, expected[name], atol=1e-6) for name, weight in weights(plain).items())
    first = service.client().create_training_client_from_state_with_optimizer(fresh.path).result()
    step(first, 0)
    for name, weight in weights(first).items():
        torch.testing.assert_close(weight, saved[name], atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
def test_a_state_of_other_layers_is_refused_and_what_is_saved_goes_on(service: Service) -> None:
    """As one of another rank is: else the model, and what is said of it, would differ."""
    narrow, whole = service.train(4, train_unembed=False), service.train(4)
    other = narrow.save_state("narrow").result().path
    own = whole.save_state("before").result().path
    with pytest.raises(tinker.RequestFailedError, match="train_unembed is False there and True in this model"):
        whole.load_state(other).result()
    whole.load_state_with_optimizer(own).result()
    whole.forward_backward(data_of(rollouts(0)), "importance_sampling")
    whole.optim_step(ADAM).result()
    after = whole.save_state("after").result().path
    for opened in (
        service.client().create_training_client_from_state(after).result(),
        service.client().create_training_client_from_state_with_optimizer(after).result(),
    ):
        assert service.trained(opened).metadata.train_unembed
        weights = service.trained(opened).learner.adapters()
        for name, weight in service.trained(whole).learner.adapters().items():
            torch.testing.assert_close(weights[name], weight, atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
@pytest.mark.parametrize(("rank", "other"), [(0, 4), (4, 0)])
def test_a_state_of_all_weights_is_not_one_of_adapters(service: Service, rank: int, other: int) -> None:
    own, path = service.train(rank), service.train(other).save_state("of-the-other").result().path
    with pytest.raises(tinker.RequestFailedError, match=f"other weights: rank is {other} there and {rank} in this"):
        own.load_state(path).result()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "loss_fn_inputs has target_tokens; this loss takes target_tokens, weights"),
    "more": ({"weights": 1.0, "mask": 1.0}, "loss_fn_inputs has mask, target_tokens, weights"),
    "short": ({"weights": np.ones(5, np.float32)}, r"weights: its shape is \[5\]; model_input has 9 tokens"),
    "nan": ({"weights": np.nan}, "weights has values that are not finite"),
    "long": ({"target_tokens": np.ones(12, np.int64), "weights": np.ones(12, np.float32)}, r"its shape is \[12\]"),
    "foreign": ({"target_tokens": np.full(9, 880), "weights": 1.0}, "out of the vocabulary of 880"),
    "floats": ({"target_tokens": np.ones(9, np.float32), "weights": 1.0}, "target_tokens has ids"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named_and_makes_no_step(service: Service, case: str) -> None:
    """The step that was sent with it fails, too; what the good one before it gathered is dropped; the next is made."""
    inputs, message = BAD[case]
    client, good = service.train(2), datum([*range(30, 40)], weights=1.0)
    learner = service.trained(client).learner
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    arrays = {name: np.broadcast_to(value, (9,)) if np.ndim(value) == 0 else value for name, value in inputs.items()}
    bad = types.Datum(
        good.model_input,
        {
            "target_tokens": good.loss_fn_inputs["target_tokens"],
            **{
                name: types.TensorData.from_numpy(np.asarray(value, None if name == "target_tokens" else np.float32))
                for name, value in arrays.items()
            },
        },
    )
    sent = [client.forward_backward([good], "cross_entropy"), client.forward_backward([good, bad], "cross_entropy")]
    step = client.optim_step(ADAM)
    sent[0].result()
    with pytest.raises(tinker.RequestFailedError, match=f"datum 1: .*{message}") as caught:
        sent[1].result()
    assert caught.value.category is types.RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match="no step: a forward_backward that belongs to it failed"):
        step.result()
    assert all(torch.equal(weight, before[name]) for name, weight in learner.weights().items())
    client.forward_backward([good], "cross_entropy")
    client.optim_step(ADAM).result()


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("gspo", None, "'gspo' is not computed here; known: cross_entropy, importance_sampling, ppo, cispo, dro"),
        ("custom", None, "a custom loss runs in the client"),
        ("ppo", {"epsilon": 0.2}, "ppo has no 'epsilon'; known: clip_low_threshold, clip_high_threshold"),
        ("dro", {"beta": "much"}, "beta is 'much', no number"),
    ],
)
def test_losses_that_are_not_there_are_refused(service: Service, loss: Any, config: Any, message: str) -> None:
    client = service.train(2)
    with pytest.raises(tinker.RequestFailedError, match=message):
        client.forward([datum([*range(30, 40)], advantages=1.0, logprobs=-1.0)], loss, config).result()


@pytest.mark.parametrize(
    "adam", [{"learning_rate": np.nan}, {"learning_rate": -1.0}, {"learning_rate": 1e-3, "beta2": 1.0}]
)
def test_a_step_that_would_spoil_the_weights_is_not_made(service: Service, adam: dict[str, float]) -> None:
    client = service.train(2)
    learner = service.trained(client).learner
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    client.forward_backward([datum([*range(30, 40)], weights=1.0)], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match=r"no step: (AdamParams are|adam_params)"):
        client.optim_step(types.AdamParams(**adam)).result()
    assert all(torch.equal(weight, before[name]) for name, weight in learner.weights().items())
    assert not gradients(learner)


def test_an_infinite_gradient_is_dropped(service: Service) -> None:
    client = service.train(2)
    client.forward_backward([datum([*range(30, 40)], weights=1e38)], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match="the loss is inf"):
        client.optim_step(ADAM).result()
    client.forward_backward([datum([*range(30, 40)], weights=1.0)], "cross_entropy").result()
    client.optim_step(ADAM).result()
