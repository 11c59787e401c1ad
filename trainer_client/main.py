"""A training run as a process: its ranks, its signals, its sinks."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from typing import Any

import torch

from rolltap.errors import ConfigError
from rolltap.trainer_client.client import TrainerClient
from rolltap.trainer_client.loop import Trainer
from rolltap.trainer_client.ranks import Ranks
from rolltap.trainer_client.settings import TrainerSettings
from rolltap.trainer_client.sinks import Terminal, open_sinks


def run(settings: TrainerSettings) -> None:
    """Trains as `settings` say. SIGTERM and SIGINT end the run after the step under way."""
    if settings.compute.threads:
        torch.set_num_threads(settings.compute.threads)
    torch.manual_seed(settings.seed)
    ranks = Ranks.of_environment(settings.compute.device)
    if ranks.size > 1:
        raise ConfigError("the loop trains in one process: start `rolltap train` without torchrun")
    client = TrainerClient(settings.url, settings.key, settings.name)
    with ExitStack() as stack:
        sinks = [Terminal(), *open_sinks(settings.report.sinks, settings.out, settings.report.project, settings.name)]
        for sink in sinks:
            stack.callback(sink.close)
        trainer = Trainer(settings, client, ranks, sinks)
        _stop_on_signals(trainer)
        trainer.run()


def _stop_on_signals(trainer: Trainer) -> None:
    def stop(*_: Any) -> None:
        trainer.stopping = True

    if threading.current_thread() is threading.main_thread():
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, stop)
