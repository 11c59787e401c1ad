"""vLLM's token API. The embedded engine and the scripted one serve it, too.

The client uses `/inference/v1/generate`, the only route with weight versions. If the server answers 403 (started
without `--enable-scale-out`) or 404 (an older release), it uses `/v1/completions` with a prompt of ids. Weights are
reloaded from a folder that the server can read (`VLLM_SERVER_DEV_MODE=1`).
Source: vLLM 0.32, `vllm/entrypoints/`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rolltap.contract.trainer import TokenScores
from rolltap.decoding import convert
from rolltap.errors import EngineRefused, EngineUnavailable
from rolltap.proxy.engines import probing
from rolltap.proxy.engines.base import EngineFacts, PauseMode, SampleRequest, ScoreRequest, Take
from rolltap.proxy.engines.http import EngineHttp, ListedModel
from rolltap.proxy.engines.receivers import VllmReceiver
from rolltap.proxy.engines.retries import DEFAULT_RETRIES, Retries, retried_sample
from rolltap.proxy.engines.vllm_wire import CompletionOutput, GenerateOutput, prompt_scores
from rolltap.settings import EngineSettings

PAUSE_MODES: dict[PauseMode, str] = {"keep": "keep", "drain": "wait", "abort": "abort"}
CLOSED = (403, 404, 405)
ASKED, RESUMED = 8, 5
"""Requests at once, which a load balancer would not send to one server; tries to reach the one that it paused."""


class DeviceConfig(msgspec.Struct):
    device: str = ""


class VllmConfig(msgspec.Struct):
    device_config: DeviceConfig


class ServerInfo(msgspec.Struct):
    """`/server_info?config_format=json`, a development route as those for weights are."""

    vllm_config: VllmConfig


class VllmEngine:
    """A client of one server."""

    def __init__(self, name: str, settings: EngineSettings, *, retries: Retries = DEFAULT_RETRIES) -> None:
        self.name, self.kind = name, settings.kind
        self._http = EngineHttp(name, settings)
        self.receiver = VllmReceiver(name, self._http, whole=settings.kind == "rolltap")
        self._retries = retries
        self._grammars = settings.kind == "rolltap"
        self._takes_images = settings.kind == "vllm"
        self._output: type[GenerateOutput] = GenerateOutput
        self._knows_budgets = False

    async def probe(self) -> EngineFacts:
        models = await self._http.models()
        self._output = GenerateOutput
        probed = await probing.probe_sampling(self.sample, models)
        behind = await probing.servers_behind(self._http)
        info = await self._http.optional("GET", "/weight_info")
        budgets = probed.mode == "processed" and await self._takes_budgets(models)
        notes = [probed.problem] if probed.problem else []
        if self._output is CompletionOutput:
            notes.append("no weight versions with the tokens, and no images: start vLLM with --enable-scale-out")
        if behind:
            notes += [probing.no_push(behind), probing.set_sticky("sticky_least_loaded")]
        elif info is None:
            notes.append("weights can't be pushed: start vLLM with VLLM_SERVER_DEV_MODE=1")
        if probed.mode == "raw":
            notes.append("log-probs are those before temperature: start vLLM with --logprobs-mode processed_logprobs")
        elif not budgets and not self._grammars:
            notes.append("thinking is not ended at a request's budget: start vLLM with --reasoning-parser")
        return EngineFacts(
            kind=self.kind,
            url=self._http.base,
            models=tuple(model.id for model in models),
            max_context=probing.smallest_context(models),
            weight_versions=probed.weight_versions,
            weight_updates=info is not None and not behind,
            logprobs_mode=probed.mode,
            notes=tuple(notes),
            grammars=self._grammars,
            states_weights=probing.stated_version(info) is not None,
            images=self._takes_images and self._output is GenerateOutput,
            budgets=budgets,
        )

    async def _takes_budgets(self, models: Sequence[ListedModel]) -> bool:
        """Whether it ends thinking at a budget. A server that does not know the field takes whatever stands there."""
        if self._grammars or not await probing.takes_budget(self.sample, models, 1):
            return False
        if not self._knows_budgets:
            self._knows_budgets = not await probing.takes_budget(self.sample, models, probing.NO_BUDGET)
        return self._knows_budgets

    async def served_weights(self) -> int | None:
        return await probing.served_version(self._http, probing.VLLM)

    async def weights_digest(self) -> str:
        return await probing.served_digest(self._http)

    async def tokenize(self, text: str, model: str) -> list[int] | None:
        return await probing.server_tokens(self._http, text, model)

    async def sample(self, request: SampleRequest, take: Take) -> None:
        await retried_sample(self.name, request, self._attempt, take, self._retries)

    async def score(self, request: ScoreRequest) -> TokenScores:
        """Scores by `/v1/completions`, which every server offers: the prompt's log-probs, and one token to drop."""
        body = {
            "request_id": request.id,
            "model": request.model,
            "prompt": request.token_ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "top_k": 1,  # a server with --return-sampling-mask refuses requests without
            "prompt_logprobs": request.top_logprobs,
        }
        return prompt_scores(self.name, request, await self._http.bytes("POST", "/v1/completions", body))

    async def pause(self, mode: PauseMode) -> None:
        await probing.refuse_router(self._http)
        await self._http.json("POST", f"/pause?mode={PAUSE_MODES[mode]}")
        await self._check_all_paused()

    async def _paused(self) -> set[bool]:
        """Whether the servers behind the URL are paused, as they say."""
        requests = (self._http.optional("GET", "/is_paused") for _ in range(ASKED))
        answers = await asyncio.gather(*requests, return_exceptions=True)
        return {answer.get("is_paused") is True for answer in answers if isinstance(answer, dict)}

    async def _check_all_paused(self) -> None:
        """Raises `EngineRefused` if another server than the paused one answers, and resumes that one: a load balancer
        would give the weights to one server and their version to another."""
        if False not in await self._paused():
            return
        for _ in range(RESUMED):  # each time another server may answer
            await asyncio.gather(*(self.resume() for _ in range(ASKED)))
            if True not in await self._paused():
                break
        raise EngineRefused(
            f"engine {self.name}: weights can't be pushed through a load balancer: not all servers behind it were "
            "paused; list them in the engine's `url`, separated by commas",
            http_status=501,
        )

    async def resume(self) -> None:
        await self._http.json("POST", "/resume")

    async def load_weights(self, path: str, version: int, adapter: str = "") -> None:
        """Loads weights between `pause` and `resume`.

        Empties the prefix cache of the old weights if the server has such a route; running requests are computed again
        from their tokens."""
        await probing.refuse_router(self._http)
        if adapter:
            await self._load_adapter(path, adapter)
        else:
            await self._check_reload(path)
            body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            await self._http.json("POST", "/collective_rpc", body)
        await self._http.optional("POST", "/reset_prefix_cache?reset_running_requests=true")
        await self._http.json("POST", "/update_weight_version", {"new_version": str(version)})

    async def _check_reload(self, path: str) -> None:
        """Raises `EngineRefused` where vLLM would reload wrongly without an error: on a CPU its head is packed at the
        start, and a head that shares the embedding's weights is not packed again. `path` may not be readable here; then
        nothing is known of it."""
        try:
            config = msgspec.json.decode(await asyncio.to_thread(Path(path, "config.json").read_bytes))
        except (OSError, msgspec.DecodeError):
            return
        if not isinstance(config, dict) or config.get("tie_word_embeddings") is not True:
            return
        info = await self._http.optional("GET", "/server_info?config_format=json")
        try:
            on_a_cpu = convert(info, ServerInfo).vllm_config.device_config.device == "cpu"
        except msgspec.ValidationError:  # another release's
            return
        if on_a_cpu:
            raise EngineRefused(
                f"engine {self.name}: a CPU build of vLLM reloads tied embeddings wrongly; start it with a folder "
                "whose config.json has tie_word_embeddings: false and whose weights have the head"
            )

    async def _load_adapter(self, path: str, name: str) -> None:
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        try:
            await self._http.bytes("POST", "/v1/load_lora_adapter", body)
        except (EngineRefused, EngineUnavailable) as error:
            if error.http_status is None or error.http_status in (502, 503, 504):
                raise  # the server may take it at another time
            flags = "; start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            hint = flags if error.message.endswith("Not Found") else ""
            message = f"{error.message}; adapter {name!r} serves as before{hint}"
            raise EngineRefused(message, http_status=error.http_status) from error

    async def close(self) -> None:
        await self._http.close()

    async def _attempt(self, request: SampleRequest, take: Take) -> None:
        output = self._output
        try:
            await output(self.name, request).sample(self._http, take)
        except EngineRefused as error:
            if output is CompletionOutput or error.http_status not in CLOSED or "model" in error.message.lower():
                raise
            self._output = CompletionOutput
            await CompletionOutput(self.name, request).sample(self._http, take)
