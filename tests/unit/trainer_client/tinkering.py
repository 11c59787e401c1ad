"""Our Tinker-compatible endpoint on a free port, and the SDK's own clients of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import uvicorn
from tinker import types

from rolltap.trainer_client.endpoint.app import TinkerEndpoint
from rolltap.trainer_client.endpoint.model import BaseModelInfo, TrainedModel
from rolltap.trainer_client.endpoint.saved import Library
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.settings import load_trainer_settings

KEY = "tml-0123456789abcdefghij"


@dataclass(slots=True, eq=False)
class Service:
    """A running endpoint: its parts in this process, its URL, and the clients that a test made."""

    endpoint: TinkerEndpoint
    url: str
    model: Path
    clients: list[tinker.ServiceClient] = field(default_factory=list)

    def client(self) -> tinker.ServiceClient:
        self.clients.append(tinker.ServiceClient(base_url=self.url, api_key=KEY))
        return self.clients[-1]

    def train(self, rank: int = 0, **options: Any) -> tinker.TrainingClient:
        """A new client with a model in training; rank 0 trains all weights."""
        service = self.client()
        return service.create_lora_training_client(str(self.model), rank=rank, seed=1, **options).result()

    def trained(self, client: tinker.TrainingClient) -> TrainedModel:
        """What the service holds for a client."""
        model = self.endpoint.sessions.run(client.model_id).model
        assert model is not None
        return model

    def close_clients(self) -> None:
        while self.clients:
            self.clients.pop().close("success").result()


@contextmanager
def serving(model: Path, out: Path, name: str = "", **limits: int) -> Iterator[Service]:
    settings = load_trainer_settings(None, key="", policy="tinker", model=model, out=out)
    base = BaseModelInfo(name or str(model), settings, Ranks.of_environment("cpu"))
    endpoint = TinkerEndpoint(base, Library(out), KEY, **limits)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        server = uvicorn.Server(uvicorn.Config(endpoint.app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        service = Service(endpoint, f"http://127.0.0.1:{listener.getsockname()[1]}", model)
        try:
            yield service
        finally:
            try:
                service.close_clients()  # one that is left sends heartbeats, and logs that nobody answers, for ever
            finally:
                server.should_exit = True
                thread.join()


def datum(ids: list[int], **inputs: Any) -> types.Datum:
    """`ids` shifted by one; every input is one value or an array over the targets."""
    targets = np.array(ids[1:], np.int64)
    arrays = {name: np.broadcast_to(np.float32(value), targets.shape).copy() for name, value in inputs.items()}
    loss_inputs: Any = {"target_tokens": targets, **arrays}
    return types.Datum(types.ModelInput.from_ints(ids[:-1]), loss_inputs)
