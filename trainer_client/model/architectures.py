"""Which models can be trained packed: a check of the config, and a comparison with the model's own attention.

A model is trained correctly or refused with the reason. Layers of full and of sliding-window attention can be packed,
with a family's soft-capped scores, sinks and scaled logits. Layers that carry a state from token to token (linear
attention, in Qwen3-Next and Qwen3.5) can't hold a second row: each row of such a model is computed alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rolltap.errors import ConfigError
from rolltap.trainer_client.data.packing import TokenSpan
from rolltap.trainer_client.model import attention
from rolltap.trainer_client.model.vision import sees

PACKED = frozenset({"full_attention", "sliding_attention"})
RECURRENT = frozenset({"linear_attention"})

RANDOM_ROUTERS = frozenset({"phimoe"})
"""Families whose routers draw experts at random in training, by a number that also changes how they sample."""

NOISE = re.compile("drop|jitter")
"""Part of the names of numbers in configs and modules that make training passes random: dropout, jitter."""

LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""Rotary scalings that depend on the longest position of a forward pass: in a pack, it may be another row's."""

TRUNK, BRANCH = 6, 5
"""Tokens of the two rows that a loaded model is checked on: a common trunk, and a branch for each."""

TOLERANCE = 1e-2
"""Nats by which a log-prob may differ in the check: float32 stays below 1e-4 in all families that pack correctly."""


def rows_alone(config: Any) -> bool:
    """Whether each row needs a forward pass of its own."""
    return bool(_kinds(config) & RECURRENT)


def check_config(config: Any) -> None:
    """`ConfigError` for layers and positions that packed training can't compute."""
    if foreign := _kinds(config) - PACKED - RECURRENT:
        raise ConfigError(
            f"{config.model_type} has layers of {', '.join(sorted(foreign))}; training supports "
            f"{', '.join(sorted(PACKED | RECURRENT))}"
        )
    if config.model_type in RANDOM_ROUTERS:
        raise ConfigError(
            f"{config.model_type}: its routers draw experts at random in training, and without that they are not those "
            "that sample, so ratios would be wrong"
        )
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # some have one for each kind of layer
    scalings = {str(part.get("rope_type") or part.get("type") or "default") for part in parts}
    if by_length := scalings & LENGTH_DEPENDENT:
        raise ConfigError(
            f"{config.model_type} scales its rotary positions by {', '.join(sorted(by_length))}: they depend on the "
            "longest row of a pass, and engines settle that in ways of their own, so ratios would be wrong"
        )


def without_noise(config: Any) -> Any:
    """The config with its dropouts, layer drop and jitter at 0."""
    for part in {id(one): one for one in (config, config.get_text_config())}.values():
        _silence(part)
    return config


def switch_noise_off(model: nn.Module) -> None:
    """Sets dropouts, layer drop and jitter to 0 in all modules, also where a module's code sets the amount.

    Log-probs in training are then those of the engines, so a ratio of weights with themselves is 1.
    """
    for module in model.modules():
        _silence(module)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _silence(owner: Any) -> None:
    for name, value in list(vars(owner).items()):
        if NOISE.search(name) and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            setattr(owner, name, type(value)(0))


def logit_scale(config: Any) -> float:
    """The factor that the model applies to its logits (Granite divides them)."""
    return (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)


@torch.no_grad()
def check_model(model: Any, read: Callable[[Tensor], Tensor]) -> None:
    """Compares packed log-probs with those of the model's own attention, on a few tokens; `ConfigError` if they differ.

    It finds what configs don't say: position biases (ALiBi), layers that don't use transformers' attention interface,
    and noise, since the packed log-probs are computed in training mode. `read` turns hidden states into logits.
    """
    name, device = model.config.model_type, model.get_output_embeddings().weight.device
    text = model.config.get_text_config()
    if text is not model.config and not sees(model.config):
        raise ConfigError(
            f"{name} is a model of text and of something else (images, for instance), and training is for text: save "
            "its text model in a folder of its own, and train and serve that"
        )
    ids = torch.arange(TRUNK + 2 * BRANCH, device=device) * 7 % text.vocab_size
    rows = [ids[: TRUNK + BRANCH], torch.cat([ids[:TRUNK], ids[TRUNK + BRANCH :]])]
    training = model.training
    model.eval()
    try:
        with _own_attention(model):
            logits = [model(input_ids=row[None], use_cache=False).logits[0].float() for row in rows]
        packed = _packed(model.train(), rows, read)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{name}: its layers don't take a packed batch ({type(error).__name__}: {error})") from error
    finally:
        model.train(training)
    off = max(float((torch.log_softmax(own, -1) - one).abs().max()) for own, one in zip(logits, packed, strict=True))
    if not off <= TOLERANCE:
        raise ConfigError(
            f"{name}: packed log-probs differ from the model's own by {off:.2g} nats, so its ratios would be wrong; "
            "its attention has a part that packed training does not compute (position biases, for instance), or "
            "its passes in training are random"
        )


def _kinds(config: Any) -> set[str]:
    return set(getattr(config.get_text_config(), "layer_types", None) or ["full_attention"])


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(attentions(model.config))


def attentions(config: Any) -> Any:
    """The attention of a model's parts: ours, but for images, which are no rows of tokens."""
    return {"text_config": attention.NAME, "vision_config": "sdpa"} if sees(config) else attention.NAME


def _packed(model: Any, rows: list[Tensor], read: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The log-probs of all rows, computed like a training batch."""
    device = rows[0].device

    def logprobs(ids: Tensor, positions: Tensor, spans: list[TokenSpan]) -> Tensor:
        hidden = model.get_decoder()(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            layout=attention.Layout.of(spans, device),
        ).last_hidden_state[0]
        return torch.log_softmax(read(hidden), -1)

    if rows_alone(model.config):
        return [logprobs(row, torch.arange(len(row), device=device), [TokenSpan(0, len(row), 0)]) for row in rows]
    end = TRUNK + BRANCH
    spans = [TokenSpan(0, TRUNK, 0), TokenSpan(TRUNK, end, TRUNK, (0,)), TokenSpan(end, end + BRANCH, TRUNK, (0,))]
    branch = torch.arange(TRUNK, end, device=device)
    positions = torch.cat([torch.arange(TRUNK, device=device), branch, branch])
    pack = logprobs(torch.cat([rows[0], rows[1][TRUNK:]]), positions, spans)
    return [pack[:end], torch.cat([pack[:TRUNK], pack[end:]])]
