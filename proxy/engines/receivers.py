"""Receivers of weights that a trainer sends over a process group: they call the servers' own endpoints.

The tensors go from the trainer to the engine; only the calls come from here. A server first joins the group, which
changes no weights, and then receives. If the transfer breaks off then, the server holds a mix of two versions and must
not serve before a push of all weights (`WeightsLost`). The embedded engine receives into a copy, so it keeps the old
ones.

Sources: vLLM 0.32, `vllm/distributed/weight_transfer/`; SGLang 0.5.23, `srt/managers/scheduler_components/`.
"""

from __future__ import annotations

from typing import Any, Protocol

from rolltap.contract.trainer import Transfer
from rolltap.errors import EngineError, EngineProtocolError, EngineRefused, WeightsLost
from rolltap.proxy.engines.http import EngineHttp

LEAVE_VLLM, LEAVE_SGLANG = "/shutdown_weight_transfer_engine", "/destroy_weights_update_group"


class Receiver(Protocol):
    """One or several servers that a trainer can send weights to. Use it between `pause` and `resume` of the engine."""

    async def ranks(self) -> int:
        """The number of processes that would receive now; `EngineRefused` says what the server lacks."""
        ...

    async def holds(self, version: int) -> bool:
        """Whether the server reports that it has the weights of `version`."""
        ...

    async def join(self, transfer: Transfer, first_rank: int = 1) -> None:
        """Joins the trainer's group; the server's processes have ranks from `first_rank` on. After an `EngineError` the
        old weights serve."""
        ...

    async def receive(self, transfer: Transfer) -> None:
        """Receives and serves the trainer's weights, and leaves the group in any case. `WeightsLost` if the transfer
        broke off; after any other `EngineError` the old weights serve."""
        ...


class VllmReceiver:
    """vLLM's weight transfer API, with the backend of `rolltap.engine.vllm_plugin`; the embedded engine has it too.

    `whole`: the server takes over all weights or none.
    """

    def __init__(self, name: str, http: EngineHttp, *, whole: bool) -> None:
        self._name = name
        self._http = http
        self._whole = whole

    async def ranks(self) -> int:
        answer = await self._http.optional("GET", "/get_world_size")
        if answer is None:
            raise EngineRefused(
                f"engine {self._name} receives no weights: start vLLM with VLLM_SERVER_DEV_MODE=1 and "
                '--weight-transfer-config \'{"backend": "rolltap"}\'',
                http_status=501,
            )
        return _count(self._name, answer, "world_size")

    async def holds(self, version: int) -> bool:
        return _says(await self._http.json("GET", "/weight_info"), version)

    async def join(self, transfer: Transfer, first_rank: int = 1) -> None:
        info = {**_meeting(transfer, first_rank), "timeout_s": transfer.timeout_s}
        try:
            await self._post("/init_weight_transfer_engine", {"init_info": info}, transfer)
        except EngineError as error:
            self._http.soon(LEAVE_VLLM, None)
            raise _not_joined(self._name, error) from error

    async def receive(self, transfer: Transfer) -> None:
        try:
            await self._post("/start_weight_update", None, transfer)
            for bucket in transfer.buckets:
                info = {"names": bucket.names, "dtype_names": bucket.dtypes, "shapes": bucket.shapes}
                await self._post("/update_weights", {"update_info": info}, transfer)
            await self._post("/finish_weight_update", {"weight_version": str(transfer.version)}, transfer)
            await self._http.optional("POST", "/reset_prefix_cache?reset_running_requests=true")
            await self._http.optional("POST", LEAVE_VLLM)
        except BaseException as error:
            self._http.soon(LEAVE_VLLM, None)
            if not isinstance(error, EngineError):
                raise
            if self._whole:
                raise EngineError(f"engine {self._name} did not receive the weights: {error}") from error
            raise _lost(self._name, error) from error

    async def _post(self, path: str, body: Any, transfer: Transfer) -> None:
        await self._http.json("POST", path, body, timeout_s=transfer.timeout_s)


class SglangReceiver:
    """SGLang's `/update_weights_from_distributed`. Its data-parallel servers take no part (`dp_size` over 1)."""

    def __init__(self, name: str, http: EngineHttp) -> None:
        self._name = name
        self._http = http

    async def ranks(self) -> int:
        return _count(self._name, await self._http.json("GET", "/server_info"), "tp_size")

    async def holds(self, version: int) -> bool:
        return _says(await self._http.json("GET", "/model_info"), version)

    async def join(self, transfer: Transfer, first_rank: int = 1) -> None:
        try:
            await self._post("/init_weights_update_group", _meeting(transfer, first_rank), transfer)
        except EngineError as error:
            raise _not_joined(self._name, error) from error

    async def receive(self, transfer: Transfer) -> None:
        """Version and cache change with the last bucket. Releases before 0.5.23 lack the calls of begin and end."""
        last = len(transfer.buckets) - 1
        try:
            begun = await self._http.optional("POST", "/begin_weight_update", {}) is not None
            for at, bucket in enumerate(transfer.buckets):
                body = {
                    "names": bucket.names,
                    "dtypes": bucket.dtypes,
                    "shapes": bucket.shapes,
                    "group_name": transfer.group,
                    "flush_cache": at == last,
                    "weight_version": str(transfer.version) if at == last else None,
                }
                await self._post("/update_weights_from_distributed", body, transfer)
            if begun:
                await self._post("/end_weight_update", {}, transfer)
            await self._post(LEAVE_SGLANG, {"group_name": transfer.group}, transfer)
        except BaseException as error:
            self._http.soon("/end_weight_update", {})
            self._http.soon(LEAVE_SGLANG, {"group_name": transfer.group})
            if not isinstance(error, EngineError):
                raise
            raise _lost(self._name, error) from error

    async def _post(self, path: str, body: Any, transfer: Transfer) -> None:
        answer = await self._http.json("POST", path, body, timeout_s=transfer.timeout_s)
        if not answer.get("success"):
            raise EngineError(f"{path}: {answer.get('message')}")


def _meeting(transfer: Transfer, first_rank: int) -> dict[str, Any]:
    """The group, in the words of SGLang, which the vLLM plugin takes over."""
    return {
        "master_address": transfer.address,
        "master_port": transfer.port,
        "rank_offset": first_rank,
        "world_size": transfer.world_size,
        "group_name": transfer.group,
        "backend": transfer.backend,
    }


def _count(name: str, answer: Any, field: str) -> int:
    count = answer.get(field) if isinstance(answer, dict) else None
    if not isinstance(count, int) or count < 1:
        raise EngineProtocolError(f"engine {name} does not say how many processes it has ({field})")
    return count


def _says(answer: Any, version: int) -> bool:
    return isinstance(answer, dict) and answer.get("weight_version") == str(version)


def _not_joined(name: str, error: EngineError) -> EngineError:
    return EngineError(f"engine {name} did not join the trainer's group: {error}; the old weights serve")


def _lost(name: str, error: EngineError) -> WeightsLost:
    return WeightsLost(f"engine {name} holds weights of two versions, and waits for a whole push: {error}")
