"""A training run as a process: its ranks, its signals, its sinks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

import torch

from rolltap.errors import ConfigError, EngineUnavailable, StoreUnavailable
from rolltap.tokenizer import download_hint
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.lease.folder import locked, run_id
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.run.loop import Trainer
from rolltap.trainer_client.run.sinks import Terminal, open_sinks
from rolltap.trainer_client.run.worker import RankWorker, follow
from rolltap.trainer_client.settings import TrainerSettings

FIRST_CONTACT_S = 5.0
"""Seconds that a server without an answer is tried at the start: its URL may be wrong."""


def run(settings: TrainerSettings) -> None:
    """Trains with `settings`. SIGTERM and SIGINT end the run after the current step."""
    if not (settings.model / "config.json").is_file():
        raise ConfigError(
            f"--model {settings.model} is not a model's folder: it has no config.json{download_hint(settings.model)}"
        )
    if settings.compute.threads:
        torch.set_num_threads(settings.compute.threads)
    torch.manual_seed(settings.seed)
    ranks = Ranks.of_environment(settings.compute.device)
    if ranks.lead:
        _lead(settings, ranks)
    else:
        with _signals_to(signal.SIG_IGN):  # torchrun forwards its signals to every rank; only the lead reacts
            follow(RankWorker(settings, ranks, None), ranks)
    ranks.leave()


def _lead(settings: TrainerSettings, ranks: Ranks) -> None:
    with suppress(StoreUnavailable, EngineUnavailable):  # the server answers: the run waits for it patiently, later
        TrainerClient(settings.url, settings.key, settings.name, patience=FIRST_CONTACT_S).policy(settings.policy)
    client = TrainerClient(settings.url, settings.key, settings.name, run=run_id(settings.out))
    with ExitStack() as stack:
        stack.enter_context(locked(settings.out))
        terminal = Terminal()
        sinks = [terminal, *open_sinks(settings.report.sinks, settings.out, settings.report.project, settings.name)]
        for sink in sinks:
            stack.callback(sink.close)
        trainer = Trainer(settings, client, ranks, sinks, terminal.say)

        def stop(*_: Any) -> None:
            trainer.stopping = True

        with _signals_to(stop):
            trainer.run()
        if trainer.stopping:
            terminal.say(f"stopped after step {trainer.step}; the same command goes on from there")


@contextmanager
def _signals_to(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    """SIGTERM and SIGINT go to `handler` meanwhile; only a main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {kind: signal.signal(kind, handler) for kind in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for kind, former in before.items():
            if former is not None:  # None: set by something else than Python
                signal.signal(kind, former)
