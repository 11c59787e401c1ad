"""A small random model in a folder, and an engine process that serves it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
import torch

from rolltap.engine.model import CausalModel
from rolltap.engine.tiny import tokenizer as tiny
from rolltap.engine.tiny.make import head, initialise, save, shape

torch.set_num_threads(1)  # threads that spin on a shared machine cost more than they give


def write_model(folder: Path, seed: int) -> Path:
    """The tiny network with random weights, its tokenizer with it."""
    folder.mkdir()
    tokenizer = tiny.train(tiny.corpus(head()))
    tiny.save(tokenizer, folder)
    ids = tokenizer.get_vocab()
    config = shape(tokenizer.get_vocab_size(), ids[tiny.END], ids[tiny.END_OF_TEXT])
    save(initialise(config, seed), config, folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", seed=1)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network with other weights."""
    return write_model(tmp_path_factory.mktemp("models") / "other", seed=2)


@pytest.fixture
def model(model_folder: Path) -> CausalModel:
    return CausalModel.load(model_folder)


@pytest.fixture(scope="session")
def start_engine() -> Iterator[Callable[..., str]]:
    """Starts engine processes; each call gives a URL."""
    processes: list[subprocess.Popen[str]] = []

    def start(folder: Path, *options: str) -> str:
        command = [sys.executable, "-m", "rolltap.engine", "--model", str(folder), "--port", "0", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        processes.append(process)
        assert process.stdout is not None
        return process.stdout.readline().strip()

    yield start
    for process in processes:
        process.terminate()
    for process in processes:
        process.communicate(timeout=60)


@pytest.fixture(scope="session")
def engine_url(start_engine: Callable[..., str], model_folder: Path) -> str:
    return start_engine(model_folder, "--name", "tiny", "--context", "3000")


@pytest.fixture
async def engine(engine_url: str, model_folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the engine, which has the first weights again after the test."""
    async with aiohttp.ClientSession(engine_url) as client:
        yield client
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(model_folder)}}
        for path, json in (
            ("/abort_requests", {}),
            ("/collective_rpc", body),
            ("/update_weight_version", {"new_version": "default"}),
            ("/resume", {}),
        ):
            async with client.post(path, json=json) as reply:
                assert reply.status == 200, await reply.text()
