"""Pushes: the weights of step N become the engines' version N, from a folder or straight over a process group.

Without a folder the group is made for each push (`rolltap.weight_group`). Who does what: the server pauses the engines
and tells them which group to join and which tensors come; this side, rank 0, sends them. It sends from a process of its
own, which gets the tensors through a pipe. gloo and NCCL can't be told to give up, and may end the process that waits
in them: a push that broke is over when that process is killed, its peers learn it by their connections, and the trainer
lives. The process is kept from push to push.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, BinaryIO, Literal, TextIO

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rolltap.contract.trainer import Bucket, PauseMode, Transfer
from rolltap.errors import EngineError, TrainerError, WeightsLost
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.model.weights import digest_of_folder, digest_of_tensors
from rolltap.trainer_client.settings import PushSettings
from rolltap.weight_group import Rendezvous, WeightGroup, dtype_of

log = logging.getLogger("rolltap.trainer")

BUCKET_BYTES = 512 << 20
"""How much an engine holds at most, beside its weights, before it loads what came (vLLM, SGLang)."""

ATTEMPTS = 2
"""How often a push is tried: the second goes without the replicas that the first was lost with."""


def push_folder(
    client: TrainerClient, policy: str, folder: Path, version: int, mode: PauseMode, *, adapter: bool = False
) -> None:
    """The policy's engines take over the weights in `folder`, a model's or an adapter's, as `version`.

    If they can't, the old version serves on, and the error says why.
    """
    digest = digest_of_folder(folder)
    with updating(client, policy, mode):
        client.push(policy, os.path.abspath(folder), version, digest=digest, adapter=adapter)


@contextmanager
def updating(client: TrainerClient, policy: str, mode: PauseMode) -> Iterator[None]:
    """The policy's engines are paused meanwhile and go on afterwards.

    After `WeightsLost` they stay paused until the next push of all weights: what they hold is no version's.
    """
    client.begin_update(policy, mode)
    try:
        yield
    except WeightsLost:
        raise
    except BaseException:
        client.finish_update(policy)
        raise
    client.finish_update(policy)


class WeightSender:
    """The process that sends, from `device`. The lead's."""

    def __init__(self, settings: PushSettings, device: torch.device) -> None:
        self._settings = settings
        self._device = device
        self._backend: Literal["gloo", "nccl"] = settings.backend or ("nccl" if device.type == "cuda" else "gloo")
        self._process: subprocess.Popen[bytes] | None = None

    def push(
        self, client: TrainerClient, policy: str, weights: Mapping[str, Tensor], version: int, mode: PauseMode
    ) -> None:
        """The policy's engines take over `weights`, on the CPU, as `version`. The last try's error says what serves."""
        digest = digest_of_tensors(weights)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with updating(client, policy, mode):
                    self._send(client, policy, weights, WeightsName(version, digest))
                return
            except EngineError as error:
                if attempt == ATTEMPTS:
                    raise
                log.warning("policy %s: version %s was not taken over, trying again: %s", policy, version, error)

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _send(self, client: TrainerClient, policy: str, weights: Mapping[str, Tensor], name: WeightsName) -> None:
        group = f"rolltap-{uuid.uuid4().hex[:12]}"
        buckets = tuple(_buckets(weights))
        ranks = client.ranks(policy)
        request = SendRequest(
            Rendezvous("127.0.0.1", self._settings.port, group, 1 + ranks, self._backend, self._settings.timeout_s),
            str(self._device),
            buckets,
        )
        pipes = self._sender_process()
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        try:
            port = self._open_group(pipes.stdin, pipes.stdout, request)
            feeder = threading.Thread(target=_feed, args=(pipes.stdin, weights), daemon=True)
            feeder.start()
            client.receive(policy, self._transfer(client, request, name, port))
            feeder.join()
            if not pipes.stdout.readline():
                self.close()
        except BaseException:
            self.close()
            raise

    def _open_group(self, stdin: IO[bytes], stdout: IO[bytes], request: SendRequest) -> int:
        """Has the process open the group of `request`; returns the port at which it waits for the others."""
        try:
            stdin.write(json.dumps(asdict(request)).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise TrainerError("the process that sends weights has died") from None
        line = stdout.readline()
        if not line:
            raise TrainerError(f"the process that sends weights could not open port {request.rendezvous.port}")
        return int(line)

    def _transfer(self, client: TrainerClient, request: SendRequest, name: WeightsName, port: int) -> Transfer:
        rendezvous = request.rendezvous
        return Transfer(
            version=name.version,
            digest=name.digest,
            address=self._settings.address,
            port=port,
            group=rendezvous.name,
            world_size=rendezvous.world_size,
            backend=self._backend,
            timeout_s=rendezvous.timeout_s,
            buckets=list(request.buckets),
            **client.caller,
        )

    def _sender_process(self) -> subprocess.Popen[bytes]:
        """The process. It leads a session, so a terminal's interrupt does not reach it in the middle of a push."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        return self._process


@dataclass(frozen=True, slots=True)
class WeightsName:
    """What a set of weights goes by."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class SendRequest:
    """What the process is to send: the bytes of the buckets' tensors follow, without anything between them."""

    rendezvous: Rendezvous
    device: str
    buckets: tuple[Bucket, ...]


def _buckets(weights: Mapping[str, Tensor]) -> Iterator[Bucket]:
    """The weights in their order, in parts of at most `BUCKET_BYTES` or one tensor."""
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights.items():
        if part and size + tensor.nbytes > BUCKET_BYTES:
            yield _bucket(part)
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    if part:
        yield _bucket(part)


def _bucket(part: Sequence[tuple[str, Tensor]]) -> Bucket:
    return Bucket(
        [name for name, _ in part],
        [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
        [list(tensor.shape) for _, tensor in part],
    )


def _feed(pipe: IO[bytes], weights: Mapping[str, Tensor]) -> None:
    """Writes the weights' bytes; stops where the process has died, which the server's answer tells of."""
    try:
        for tensor in weights.values():
            pipe.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        pipe.flush()
    except (BrokenPipeError, ValueError):
        return


# The process


def main() -> None:
    """Sends what it is ordered to until its standard input ends. Standard output is for its answers only."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while line := sys.stdin.buffer.readline():
        _carry_out(_request_of(line), sys.stdin.buffer, answers)


def _request_of(line: bytes) -> SendRequest:
    fields = json.loads(line)
    buckets = tuple(Bucket(**bucket) for bucket in fields["buckets"])
    return SendRequest(Rendezvous(**fields["rendezvous"]), fields["device"], buckets)


def _carry_out(request: SendRequest, source: BinaryIO, answers: TextIO) -> None:
    rendezvous = request.rendezvous
    store = TCPStore(
        rendezvous.address, rendezvous.port, is_master=True, timeout=rendezvous.timeout, wait_for_workers=False
    )
    print(store.port, file=answers, flush=True)
    with WeightGroup(rendezvous, 0, store) as group:
        for bucket in request.buckets:
            for dtype, shape in zip(bucket.dtypes, bucket.shapes, strict=True):
                group.broadcast(_read(source, dtype_of(dtype), shape).to(request.device))
    print("sent", file=answers, flush=True)


def _read(source: BinaryIO, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The next tensor; ends the process where the trainer has died."""
    tensor = torch.empty(shape, dtype=dtype)
    space = tensor.reshape(-1).view(torch.uint8).numpy().data
    if source.readinto(space) < len(space):  # type: ignore[attr-defined]  # a BufferedReader fills it
        sys.exit("the trainer died while it pushed")
    return tensor


if __name__ == "__main__":
    main()
