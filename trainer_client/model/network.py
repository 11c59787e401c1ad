"""The network of a policy: it takes a batch and returns the log-probs of its trained tokens.

Wraps a causal language model of transformers. Logits are computed only where a trained token is predicted, in pieces
that are computed again in the backward pass, so the logits of a pack never exist at once. Shapes: `N` tokens of the
pack, `U` places that predict, `M` trained tokens, `S` states that are projected, `E` hidden width, `V` vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rolltap.errors import CheckpointMismatch, ConfigError
from rolltap.token_masks import ids_of
from rolltap.trainer_client.data.collate import Batch
from rolltap.trainer_client.data.step import ValueHead
from rolltap.trainer_client.model import architectures, attention
from rolltap.trainer_client.model.routing import Choice, Mixture
from rolltap.trainer_client.model.vision import has_places, inputs_with_images, load_processor, sees

PIECE_BYTES = 256 << 20
"""Largest size of one piece of float32 logits, in bytes."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """The outputs at a batch's trained tokens. `entropy_M`, in nats, has a gradient only if a recipe needs it.

    `values` [M] are the heads' outputs by name, from the state before each token. `choices` has the routers' choices of
    each layer of a mixture, if routers have a loss.
    """

    logprobs_M: Tensor
    entropy_M: Tensor
    values: Mapping[str, Tensor] = field(default_factory=dict)
    choices: tuple[Choice, ...] = ()


class PolicyNetwork(nn.Module):
    """`model`, and the log-probs of its trained tokens at each token's sampling temperature and over its sampling mask.

    `heads` are not part of `model`: they are never pushed. With `entropy_moves`, the entropy has a gradient. Recorded
    experts are replayed unless `replay` is False. With `routers_move`, predictions include the routers' choices.
    """

    def __init__(
        self,
        model: Any,
        *,
        heads: Mapping[str, ValueHead] | None = None,
        entropy_moves: bool = False,
        routers_move: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.mixture = Mixture(model)
        self.routers_move = routers_move
        self.entropy_moves = entropy_moves
        self._text = model.config.get_text_config()
        self.heads = nn.ModuleDict({name: _zeros(self._text.hidden_size) for name in heads or {}})
        self._detached = {name for name, head in (heads or {}).items() if not head.moves_policy}
        self._logits = LogitsHead(model)

    def forward(self, batch: Batch, replay: bool = True) -> Predictions:
        if self.routers_move:
            with self.mixture.choices() as choices:
                hidden_UE = self._hidden(batch, replay=replay)
            predictions = self._predict(hidden_UE, batch)
            return dataclasses.replace(predictions, choices=tuple(choices.values()))
        return self._predict(self._hidden(batch, replay=replay), batch)

    def _hidden(self, batch: Batch, *, replay: bool) -> Tensor:
        """The hidden states [U, E] that predict the trained tokens."""
        positions, in_images = batch.position_ids_N, batch.image_positions_3N
        if in_images is not None and has_places(self.model.config):  # the family counts places in images (M-RoPE)
            positions = in_images
        with self.mixture.replaying(batch.experts_NX if replay else None):
            hidden_NE = self.model.get_decoder()(
                **self._inputs(batch),
                position_ids=positions.unsqueeze(-2),
                use_cache=False,
                layout=attention.Layout.of(batch.spans, batch.token_ids_N.device),
            ).last_hidden_state[0]
        return hidden_NE[batch.sources_U]

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        if not batch.images:
            return {"input_ids": batch.token_ids_N.unsqueeze(0)}
        if not sees(self.model.config):
            raise ConfigError(f"{self.model.config.model_type} is a model of text, and the rows' prompts show images")
        return inputs_with_images(self.model, self.model.image_processor, batch)

    def _predict(self, hidden_UE: Tensor, batch: Batch) -> Predictions:
        """The predictions. Tokens of one place share its logits if none has its own sampling and they fit one piece."""
        piece = max(1, PIECE_BYTES // (4 * self._text.vocab_size))
        sampling: tuple[Tensor | None, ...] = (batch.temperatures_M, batch.masks_MK, batch.mask_rows_M)
        sets = MaskSets(batch.mask_table, self._text.vocab_size)
        values = {name: self._value(name, hidden_UE)[batch.states_M] for name in self.heads}
        if all(one is None for one in sampling) and len(hidden_UE) <= piece:
            logprobs_M, entropy_U = self._read(hidden_UE, batch.targets_M, sets, None, None, None, batch.states_M)
            return Predictions(logprobs_M, entropy_U[batch.states_M], values)
        hidden_ME = hidden_UE[batch.states_M]
        if len(hidden_ME) <= piece:
            return Predictions(*self._read(hidden_ME, batch.targets_M, sets, *sampling), values)
        columns: list[Sequence[Any]] = [hidden_ME.split(piece), batch.targets_M.split(piece)]
        columns.append([sets] * len(columns[0]))
        for one in sampling:
            columns.append([None] * len(columns[0]) if one is None else one.split(piece))
        predictions = [checkpoint(self._read, *parts, use_reentrant=False) for parts in zip(*columns, strict=True)]
        logprobs, entropies = zip(*predictions, strict=True)
        return Predictions(torch.cat(logprobs), torch.cat(entropies), values)

    def _value(self, name: str, hidden_UE: Tensor) -> Tensor:
        head = self.heads[name]
        input_UE = hidden_UE.detach() if name in self._detached else hidden_UE
        return head(input_UE.to(next(head.parameters()).dtype)).squeeze(-1).float()

    def _read(
        self,
        hidden_SE: Tensor,
        targets_M: Tensor,
        sets: MaskSets,
        temperatures_S: Tensor | None,
        masks_SK: Tensor | None,
        mask_rows_S: Tensor | None,
        states_M: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [M] of the targets, and entropies [S].

        State `states_M[m]` predicts token m; without `states_M`, state m does, and S is M.
        """
        logits_SV = self._logits(hidden_SE)
        if temperatures_S is not None:
            logits_SV = logits_SV / temperatures_S.unsqueeze(-1)
        if masks_SK is not None:
            first_S1 = masks_SK[:, :1]
            ids_SK = torch.where(masks_SK < 0, first_S1.clamp(min=0), masks_SK)
            inside_SV = torch.zeros_like(logits_SV, dtype=torch.bool).scatter(-1, ids_SK, True) | (first_S1 < 0)
            logits_SV = logits_SV.masked_fill(~inside_SV, torch.finfo(logits_SV.dtype).min)  # -inf: the entropy is NaN
        if mask_rows_S is not None:
            logits_SV = logits_SV.masked_fill(~sets.inside(mask_rows_S), torch.finfo(logits_SV.dtype).min)
        total_S = torch.logsumexp(logits_SV, dim=-1)
        if states_M is None:
            logprobs_M = logits_SV.gather(-1, targets_M.unsqueeze(-1)).squeeze(-1) - total_S
        else:
            logprobs_M = logits_SV[states_M, targets_M] - total_S[states_M]
        with torch.set_grad_enabled(self.entropy_moves and torch.is_grad_enabled()):
            expected_S = (torch.softmax(logits_SV, dim=-1) * logits_SV).sum(-1)
            entropy_S = total_S - expected_S
        return logprobs_M, entropy_S


class MaskSets:
    """The sets of ids in a batch's table of masks, for a model with `vocabulary` ids."""

    def __init__(self, table: NDArray[np.int32] | None, vocabulary: int) -> None:
        self._table = table
        self._vocabulary = vocabulary

    def inside(self, rows_S: Tensor) -> Tensor:
        """Whether each id is in each row's set, [S, V]."""
        assert self._table is not None
        distinct, set_S = rows_S.cpu().unique(return_inverse=True)
        inside_DV = torch.zeros(len(distinct), self._vocabulary, dtype=torch.bool)
        for inside_V, row in zip(inside_DV, distinct.tolist(), strict=True):
            ids = ids_of(row, self._table)
            inside_V[slice(None) if ids is None else torch.from_numpy(ids.astype(np.int64))] = True
        return inside_DV.to(rows_S.device)[set_S.to(rows_S.device)]


class LogitsHead:
    """Turns hidden states [S, E] into logits [S, V] in float32, scaled and capped like the model's own."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._scale = architectures.logit_scale(model.config)
        self._cap: float | None = getattr(model.config, "final_logit_softcapping", None)

    def __call__(self, hidden_SE: Tensor) -> Tensor:
        logits_SV = self._model.get_output_embeddings()(hidden_SE).float()
        if self._scale != 1.0:
            logits_SV = logits_SV * self._scale
        return logits_SV if self._cap is None else self._cap * torch.tanh(logits_SV / self._cap)


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """The causal language model of a Hugging Face folder, with our attention, checked against its own.

    `CheckpointMismatch` if the folder has no such model, `ConfigError` if packed training can't compute it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    attention.register()
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise _no_model(folder, error) from error
    architectures.check_config(config)
    kind = AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM
    try:
        loaded: Any = kind.from_pretrained(
            folder,
            config=architectures.without_noise(config),
            dtype=dtype,
            attn_implementation=architectures.attentions(config),
            output_loading_info=True,
        )
    except KeyError as error:
        raise ConfigError(f"{config.model_type}: it doesn't take an attention of ours ({error})") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise _no_model(folder, error) from error
    model, loading = loaded
    if loading["missing_keys"]:  # transformers would initialise them at random
        raise _no_model(folder, f"it has no {', '.join(sorted(loading['missing_keys']))}")
    if sees(config):
        model.image_processor = load_processor(folder)
    architectures.switch_noise_off(model)
    architectures.check_model(model, LogitsHead(model))
    return model


def _no_model(folder: Path, reason: object) -> CheckpointMismatch:
    return CheckpointMismatch(f"{folder} is not a folder of a causal language model: {str(reason).splitlines()[0]}")


def _zeros(width: int) -> nn.Linear:
    head = nn.Linear(width, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
