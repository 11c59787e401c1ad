"""The embedded engine behind a proxy: tokens/s, pushes of all weights, and the versions of a call that a push meets."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import torch
from safetensors.torch import load_file

from rolltap.demo.stack import Stack
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.lease.push import WeightSender, push_folder
from rolltap.trainer_client.settings import PushSettings

from .shapes import Sizes

POLICY = "served"
PROMPT = list(range(40, 104))


@dataclass(frozen=True)
class Rate:
    """Sampled tokens/s of `at_once` calls that begin together, with their short prompts."""

    at_once: int
    tokens: int
    seconds: float
    tokens_per_s: float


@dataclass(frozen=True)
class Push:
    """`seconds` from the request to the policy's new version, of which sampling stood still for `gap_s` at most.

    `before` and `after` are the tokens of one call under the version that it began with and under the pushed one.
    """

    way: str
    gigabytes: float
    seconds: float
    gap_s: float
    before: int
    after: int


def measure(sizes: Sizes, device: torch.device) -> Iterator[Rate | Push]:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        first, second = (sizes.served.folder(work / f"model-{seed}", device, seed) for seed in (0, 1))
        if device.type == "cuda":
            torch.cuda.empty_cache()
        (work / "stack").mkdir()
        options = ("--context", str(sizes.served.longest), "--slots", str(max(sizes.at_once)))
        policies: dict[str, dict[str, object]] = {POLICY: {"pin": {"temperature": 1.0}}}
        with Stack(work / "stack", first, policies, family="", engine_options=options) as stack:
            url = f"{stack.engine_url('engine')}/inference/v1/generate"
            asyncio.run(_sample(url, 1, sizes.sampled))  # warms up
            for count in sizes.at_once:
                started = time.monotonic()
                asyncio.run(_sample(url, count, sizes.sampled))
                seconds, tokens = time.monotonic() - started, count * sizes.sampled
                yield Rate(count, tokens, seconds, tokens / seconds)
            yield from _pushes(sizes, stack, second, url)


async def _sample(url: str, count: int, tokens: int) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as client:

        async def one(at: int) -> int:
            body = {"token_ids": [*PROMPT, at], "sampling_params": {"max_tokens": tokens, "ignore_eos": True}}
            async with client.post(url, json=body) as reply:
                (choice,) = (await reply.json())["choices"]
                return len(choice["token_ids"])

        if await asyncio.gather(*map(one, range(count))) != [tokens] * count:
            raise RuntimeError("the engine ended a call early")


def _pushes(sizes: Sizes, stack: Stack, folder: Path, url: str) -> Iterator[Push]:
    client = TrainerClient(stack.trainer_url, stack.keys["trainer"], "trainer", run="gpu")
    client.rewind(0, {POLICY: client.policy(POLICY).version})
    state = load_file(folder / "model.safetensors")
    settings = PushSettings(backend="gloo")  # type: ignore[call-arg]  # NCCL wants a card for each of its ranks
    sender = WeightSender(settings, torch.device("cpu"))

    def from_folder(version: int) -> None:
        push_folder(client, POLICY, folder, version, "keep")

    def over_group(version: int) -> None:
        sender.push(client, POLICY, state, version, "keep")

    ways = (("folder", from_folder), ("process group, its first", over_group), ("process group", over_group))
    try:
        for version, (way, push) in enumerate(ways, client.policy(POLICY).version + 1):
            yield asyncio.run(_met_by(url, sizes, way, push, version, sum(one.nbytes for one in state.values())))
    finally:
        sender.close()


async def _met_by(url: str, sizes: Sizes, way: str, push: Callable[[int], None], version: int, size: int) -> Push:
    """A push while one call samples. The call is long enough to see its end; some tokens later it is cancelled."""
    arrivals: list[float] = []
    spans: list[dict[str, Any]] = []
    started = pushed = 0.0
    left = 16
    pushing: asyncio.Task[None] | None = None
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": sizes.served.longest - len(PROMPT), "ignore_eos": True},
        "stream": True,
    }
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as client,
        client.post(url, json=body) as reply,
    ):
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
            arrivals.append(time.monotonic())
            spans = choice.get("weight_versions") or spans
            if pushing is None and len(arrivals) == 8:
                started = time.monotonic()
                pushing = asyncio.create_task(asyncio.to_thread(push, version))
            if pushing is not None and pushing.done() and not pushed:
                pushing.result()
                pushed = time.monotonic() - started
            if pushed and (left := left - 1) == 0:
                break
    if pushing is None:
        raise RuntimeError("the call ended before the push began")
    if not pushed:
        await pushing
        pushed = time.monotonic() - started
    counts = {span["version"]: span["end"] - span["start"] for span in spans}
    after = counts.pop(str(version), 0)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    return Push(way, size / 1e9, pushed, max(gaps), sum(counts.values()), after)
