"""Tinker under the contract suite: the unmodified SDK and our own service of its kind, which makes real steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import tinker
import torch

from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed
from rolltap.trainer_client.adapters.tinker_service import TinkerSettings, TinkerTrainer
from rolltap.trainer_client.endpoint.saved import folder_of

from ..unit.trainer_client.making import VOCABULARY
from ..unit.trainer_client.plane import KEY
from ..unit.trainer_client.tinkering import Service, serving
from .driver import Killed, Run, Seen, TrainedToken, tokens_of


class Watched:
    """A client of the SDK's that notes what it sends and the first gradient, and dies before a chosen step."""

    def __init__(self, client: tinker.TrainingClient, service: Service, die_at: int | None, seen: Seen) -> None:
        self._client, self._service, self._dies_in, self._seen = client, service, die_at, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def forward_backward(self, data: list[tinker.Datum], loss: Any, config: dict[str, float]) -> Any:
        self._seen.tokens.append([token for datum in data for token in tokens_in(datum)])
        self._sent = self._client.forward_backward(data, loss, config)
        return self._sent

    def optim_step(self, params: tinker.AdamParams) -> Any:
        self._sent.result()
        if not self._seen.gradient:
            weights = dict(self._service.trained(self._client).learner.model.named_parameters())
            self._seen.gradient = {name: one.grad.clone() for name, one in weights.items() if one.grad is not None}
        if self._dies_in is not None:
            self._dies_in -= 1
            if self._dies_in == 0:
                raise Killed
        return self._client.optim_step(params)


def tokens_in(datum: tinker.Datum) -> list[TrainedToken]:
    targets, logprobs = (datum.loss_fn_inputs[name].to_numpy() for name in ("target_tokens", "logprobs"))
    whole = np.append(datum.model_input.to_ints(), targets[-1])
    return tokens_of(whole, np.append(False, logprobs != 0), np.append(0.0, logprobs))


class TinkerService:
    spends_steps = False
    normalise, advantage = "token", "dr_grpo"

    def run(self, run: Run) -> Seen:
        settings = FeedSettings("policy", run.groups, run.out / "weights", wait=0.2)
        feed = open_feed(run.url, KEY, settings, trainer="theirs", out=run.out)
        seen = Seen([], {}, {})
        config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.15}
        chosen = TinkerSettings(VOCABULARY, run.steps, self.advantage, loss_config=config)
        torch.manual_seed(0)
        with serving(run.model, run.out / "service") as service:

            def opened(state: str | None) -> Watched:
                """All weights are trained, as our trainer does without adapters."""
                if state is None:
                    client = service.train(rank=0)
                else:
                    client = service.client().create_training_client_from_state_with_optimizer(state).result()
                return Watched(client, service, run.die_at, seen)

            TinkerTrainer(opened, feed, chosen, partial(folder_of, run.out / "service")).train()
        return seen
