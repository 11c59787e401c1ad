"""Runs the endpoint as a process."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

import torch

from rolltap.errors import ConfigError
from rolltap.tokenizer import download_hint
from rolltap.trainer_client.endpoint.app import KEY_PREFIX, TinkerEndpoint
from rolltap.trainer_client.endpoint.model import BaseModelInfo
from rolltap.trainer_client.endpoint.saved import Library
from rolltap.trainer_client.lease.folder import locked
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.settings import TrainerSettings

KEY_FILE = "tinker-key"


def run(settings: TrainerSettings, name: str, address: tuple[str, int], key: str, models: int, samplers: int) -> None:
    """Serves the base model of `settings` until a signal stops the process.

    Prints the environment variables that clients need once the port accepts connections. Raises `ConfigError` if the
    model's folder, the key or the address is unusable, or under torchrun.
    """
    if not (settings.model / "config.json").is_file():
        raise ConfigError(
            f"--model {settings.model} is not a model's folder: it has no config.json{download_hint(settings.model)}"
        )
    if settings.compute.threads:
        torch.set_num_threads(settings.compute.threads)
    base = BaseModelInfo(name or str(settings.model.resolve()), settings, Ranks.of_environment(settings.compute.device))
    if base.ranks.size > 1:
        raise ConfigError("this service runs in one process, not under torchrun")
    with locked(settings.out), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        key = key or kept_key(settings.out)
        endpoint = TinkerEndpoint(base, Library(settings.out), key, models=models, samplers=samplers)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(f"can't listen on {address[0]}:{address[1]} ({error}); set another --port") from error
        listener.listen(1024)
        host, port = listener.getsockname()[:2]
        print(f"export TINKER_BASE_URL=http://{host}:{port}")
        print(f"export TINKER_API_KEY={key}")
        print(f"# base model: {base.name}", flush=True)
        endpoint.serve(listener)


def kept_key(out: Path) -> str:
    """The key in the folder `out`. The first start creates its file, which only the owner can read."""
    path = out / KEY_FILE
    if not path.exists():
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "w") as writer:
            writer.write(KEY_PREFIX + secrets.token_urlsafe(32))
    return path.read_text(encoding="utf-8").strip()
