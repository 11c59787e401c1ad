"""The engine's HTTP contract, against a real process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import typer
from typer.testing import CliRunner

from rolltap.engine.__main__ import run
from rolltap.engine.model import CausalModel
from rolltap.engine.server import ModelServerSettings, build
from rolltap.errors import ConfigError
from rolltap.trainer_client.model.weights import digest_of_folder

PROMPT = [40, 300, 41, 500, 42, 600, 43]
GENERATE = "/inference/v1/generate"


async def post(engine: aiohttp.ClientSession, path: str, body: Any = None) -> Any:
    async with engine.post(path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def generate(engine: aiohttp.ClientSession, ids: list[int] = PROMPT, **sampling: Any) -> dict[str, Any]:
    body = {"token_ids": ids, "sampling_params": {"logprobs": 0, "ignore_eos": True, **sampling}}
    return (await post(engine, GENERATE, body))["choices"][0]


async def events(reply: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    assert reply.headers["content-type"].startswith("text/event-stream")
    async for line in reply.content:
        if line.startswith(b"data: "):
            yield line[6:].strip() if line.startswith(b"data: [") else json.loads(line[6:])


def stream_body(ids: list[int] = PROMPT, **sampling: Any) -> dict[str, Any]:
    return {"token_ids": ids, "stream": True, "sampling_params": {"logprobs": 0, "ignore_eos": True, **sampling}}


def ids_of(pieces: list[Any]) -> list[int]:
    return [token for piece in pieces for token in piece["token_ids"]]


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def expected(model: CausalModel, prompt: list[int], output: list[int], temperature: float = 1.0) -> torch.Tensor:
    """The log-probs [T] of `output` by one forward over everything."""
    ids = torch.tensor([prompt + output])
    with torch.no_grad():
        logprobs = torch.log_softmax(model.network(ids).logits[0, :-1] / temperature, -1)
    return logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]


def assert_close(choice: dict[str, Any], model: CausalModel, prompt: list[int], temperature: float = 1.0) -> None:
    want = expected(model, prompt, choice["token_ids"], temperature)
    assert (torch.tensor(logprobs_of(choice)) - want).abs().max() < 1e-4


async def test_log_probs_are_the_models(engine: aiohttp.ClientSession, model: CausalModel) -> None:
    """Many requests of different lengths and temperatures at once, with prefixes in common."""
    prompts = [PROMPT[: 1 + n % 7] + list(range(100, 100 + 13 * n)) for n in range(40)]
    wanted = [0.7 + 0.1 * (n % 5) for n in range(40)]
    jobs = [generate(engine, p, max_tokens=20, temperature=t) for p, t in zip(prompts, wanted, strict=True)]
    for choice, prompt, temperature in zip(await asyncio.gather(*jobs), prompts, wanted, strict=True):
        assert len(choice["token_ids"]) == 20
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 20}]
        assert_close(choice, model, prompt, temperature)


async def test_a_cut_distribution_comes_with_the_ids_that_it_left(
    engine: aiohttp.ClientSession, model: CausalModel
) -> None:
    """Normalised over its mask, each log-prob is the model's; whole and streamed masks are the same."""
    cut = {"max_tokens": 20, "seed": 3, "top_p": 0.8, "top_k": 5, "temperature": 0.9}
    choice, plain, greedy = await asyncio.gather(
        generate(engine, **cut), generate(engine, max_tokens=3), generate(engine, max_tokens=3, temperature=0, top_k=5)
    )
    assert plain["sampling_mask"] is None
    assert greedy["sampling_mask"] is None
    ids, masks = choice["token_ids"], choice["sampling_mask"]
    assert [token in mask for token, mask in zip(ids, masks, strict=True)] == [True] * 20
    assert {len(mask) for mask in masks} <= {1, 2, 3, 4, 5}
    with torch.no_grad():
        logits_TV = model.network(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1] / 0.9
    for token, mask, logits_V, logprob in zip(ids, masks, logits_TV, logprobs_of(choice), strict=True):
        assert float(logits_V[token] - logits_V[mask].logsumexp(0)) == pytest.approx(logprob, abs=1e-4)
    async with engine.post(GENERATE, json=stream_body(**cut)) as reply:
        pieces = [event["choices"][0] async for event in events(reply) if isinstance(event, dict)]
    assert [mask for piece in pieces for mask in piece["sampling_mask"]] == masks


async def test_a_seed_repeats_and_no_seed_does_not(engine: aiohttp.ClientSession) -> None:
    first, second, other, free = await asyncio.gather(
        generate(engine, max_tokens=30, seed=5),
        generate(engine, max_tokens=30, seed=5),
        generate(engine, max_tokens=30, seed=6),
        generate(engine, max_tokens=30),
    )
    assert first["token_ids"] == second["token_ids"]
    assert len({tuple(c["token_ids"]) for c in (first, other, free)}) == 3


async def test_a_stream_says_what_the_whole_reply_says(engine: aiohttp.ClientSession) -> None:
    whole = await generate(engine, max_tokens=40, seed=9)
    async with engine.post(GENERATE, json=stream_body(max_tokens=40, seed=9)) as reply:
        chunks = [chunk async for chunk in events(reply)]
    assert chunks.pop() == b"[DONE]"
    pieces = [chunk["choices"][0] for chunk in chunks]
    assert ids_of(pieces) == whole["token_ids"]
    assert [value for piece in pieces for value in logprobs_of(piece)] == pytest.approx(logprobs_of(whole), abs=1e-5)
    assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1]["finish_reason"] == "length"
    assert pieces[-1]["weight_versions"] == whole["weight_versions"]


async def test_stop_tokens_end_a_reply_and_are_in_it(engine: aiohttp.ClientSession, model: CausalModel) -> None:
    free = await generate(engine, max_tokens=30, seed=3)
    stop = free["token_ids"][10]
    cut = await generate(engine, max_tokens=30, seed=3, stop_token_ids=[stop])
    assert cut["token_ids"] == free["token_ids"][: free["token_ids"].index(stop) + 1]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)


async def test_the_models_own_end_token_stops(engine: aiohttp.ClientSession, model_folder: Path) -> None:
    ends = json.loads((model_folder / "generation_config.json").read_text())["eos_token_id"]
    body = {"token_ids": PROMPT, "sampling_params": {"seed": 1, "temperature": 3.0}}
    choice = (await post(engine, GENERATE, body))["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert [token in ends for token in choice["token_ids"]].index(True) == len(choice["token_ids"]) - 1
    assert choice["logprobs"] is None


async def test_several_choices_differ_and_repeat_by_seed(engine: aiohttp.ClientSession) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"n": 3, "max_tokens": 8, "seed": 2, "ignore_eos": True}}
    replies = [await post(engine, GENERATE, body) for _ in range(2)]
    ids = [[choice["token_ids"] for choice in reply["choices"]] for reply in replies]
    assert ids[0] == ids[1]
    assert len({tuple(choice) for choice in ids[0]}) == 3
    assert [choice["index"] for choice in replies[0]["choices"]] == [0, 1, 2]
    assert replies[0]["usage"]["completion_tokens"] == 24


async def test_top_log_probs_are_the_likeliest(engine: aiohttp.ClientSession) -> None:
    choice = await generate(engine, max_tokens=5, logprobs=3, temperature=0.0)
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3
        assert entry["top_logprobs"][0]["token_id"] == token


async def test_completions_give_ids_text_and_log_probs(engine: aiohttp.ClientSession, model: CausalModel) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "logprobs": 1, "return_token_ids": True, "seed": 4, "ignore_eos": True}
    whole = (await post(engine, "/v1/completions", body))["choices"][0]
    assert whole["prompt_token_ids"] == PROMPT
    assert isinstance(whole["text"], str)
    want = expected(model, PROMPT, whole["token_ids"])
    assert whole["logprobs"]["token_logprobs"] == pytest.approx(want.tolist(), abs=1e-4)
    async with engine.post("/v1/completions", json={**body, "stream": True}) as reply:
        chunks = [chunk["choices"][0] async for chunk in events(reply) if chunk != b"[DONE]"]
    assert ids_of(chunks) == whole["token_ids"]
    assert [chunk["prompt_token_ids"] for chunk in chunks] == [PROMPT] + [None] * (len(chunks) - 1)
    assert chunks[-1]["finish_reason"] == "length"


async def test_new_weights_in_mid_reply_give_two_spans(
    engine: aiohttp.ClientSession, model: CausalModel, other_folder: Path
) -> None:
    """Every token's log-prob is that of the weights its span names, over all tokens before it."""
    async with engine.post(GENERATE, json=stream_body(max_tokens=800)) as reply:
        stream = events(reply)
        pieces = [(await anext(stream))["choices"][0]]
        await post(engine, "/pause?mode=keep")
        assert (await (await engine.get("/is_paused")).json()) == {"is_paused": True}
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(other_folder)}}
        assert await post(engine, "/collective_rpc", rpc) == {"results": [None]}
        await post(engine, "/update_weight_version", {"new_version": "7"})
        await post(engine, "/resume")
        pieces += [chunk["choices"][0] async for chunk in stream if chunk != b"[DONE]"]
    ids = ids_of(pieces)
    old, new = pieces[-1]["weight_versions"]
    assert (old["version"], old["start"], new["version"], new["end"]) == ("default", 0, "7", 800)
    assert 0 < old["end"] == new["start"] < 800
    got = torch.tensor([value for piece in pieces for value in logprobs_of(piece)])
    cut = old["end"]
    assert (got[:cut] - expected(model, PROMPT, ids)[:cut]).abs().max() < 1e-4
    assert (got[cut:] - expected(CausalModel.load(other_folder), PROMPT, ids)[cut:]).abs().max() < 1e-3
    said = await (await engine.get("/weight_info")).json()
    assert (said["weight_version"], said["weight_digest"]) == ("7", digest_of_folder(other_folder))


async def test_reused_prefixes_do_not_outlive_their_weights(engine: aiohttp.ClientSession, other_folder: Path) -> None:
    prompt = list(range(200, 290))
    await generate(engine, prompt, max_tokens=2)
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(other_folder)}}
    await post(engine, "/collective_rpc", rpc)
    assert_close(await generate(engine, prompt, max_tokens=10), CausalModel.load(other_folder), prompt)


async def test_a_prefix_seen_before_is_reused(engine: aiohttp.ClientSession, model: CausalModel) -> None:
    prompt = list(range(300, 390))
    first = await generate(engine, prompt, max_tokens=10)
    longer = [*prompt, *first["token_ids"], 5, 6, 7]
    body = {"token_ids": longer, "sampling_params": {"max_tokens": 4, "logprobs": 0, "ignore_eos": True}}
    reply = await post(engine, GENERATE, body)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) + 9
    assert_close(reply["choices"][0], model, longer)


@pytest.mark.parametrize("damage", ["missing", "shape"])
async def test_weights_that_do_not_load_leave_the_old_ones(
    engine: aiohttp.ClientSession, model: CausalModel, tmp_path: Path, damage: str
) -> None:
    if damage == "shape":
        from safetensors.torch import save_file

        state = {name: torch.zeros(2, 2) for name in model.network.state_dict()}
        save_file(state, tmp_path / "model.safetensors")
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
    async with engine.post("/collective_rpc", json=rpc) as reply:
        error = (await reply.json())["error"]
        assert reply.status == 400
    assert "the weights in use stay" in error["message"]
    assert str(tmp_path) in error["message"]
    assert_close(await generate(engine, max_tokens=5), model, PROMPT)


async def test_abort_by_id_ends_that_request_only(engine: aiohttp.ClientSession) -> None:
    async with (
        engine.post(GENERATE, json={**stream_body(max_tokens=2500), "request_id": "one"}) as first,
        engine.post(GENERATE, json={**stream_body(max_tokens=500), "request_id": "two"}) as second,
    ):
        one, two = events(first), events(second)
        await anext(one)
        assert (await post(engine, "/inference/v1/abort_requests", {"request_ids": ["one"]}))["aborted"] == 1
        last = [chunk["choices"][0] async for chunk in one if chunk != b"[DONE]"][-1]
        assert last["finish_reason"] == "abort"
        assert 0 < last["weight_versions"][0]["end"] < 2500
        others = [chunk["choices"][0] async for chunk in two if chunk != b"[DONE]"]
    assert others[-1]["finish_reason"] == "length"


async def test_pause_abort_ends_what_runs_and_holds_what_comes(engine: aiohttp.ClientSession) -> None:
    running = asyncio.create_task(generate(engine, max_tokens=2900))
    await until(engine, "num_requests_running", 1)
    await post(engine, "/pause?mode=abort")
    assert (await running)["finish_reason"] == "abort"
    held = asyncio.create_task(generate(engine, max_tokens=3))
    await until(engine, "num_requests_waiting", 1)
    await post(engine, "/resume")
    assert (await held)["finish_reason"] == "length"


async def test_pause_wait_lets_what_runs_finish(engine: aiohttp.ClientSession) -> None:
    running = asyncio.create_task(generate(engine, max_tokens=600))
    await until(engine, "num_requests_running", 1)
    pausing = asyncio.create_task(post(engine, "/pause?mode=wait"))
    assert (await running)["finish_reason"] == "length"
    assert await pausing == {"status": "paused"}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_its_slot(engine_url: str, engine: Any, stream: bool) -> None:
    async with aiohttp.ClientSession(engine_url) as leaver:
        body = {**stream_body(max_tokens=2900), "stream": stream}
        leaving = asyncio.create_task(leaver.post(GENERATE, json=body))
        await until(engine, "num_requests_running", 1)
        leaving.cancel()
        if stream and leaving.done() and not leaving.cancelled():
            leaving.result().close()
    await until(engine, "num_requests_running", 0)
    assert 'finished_reason="abort"' in await (await engine.get("/metrics")).text()


async def until(engine: aiohttp.ClientSession, metric: str, value: int) -> None:
    """Waits until the engine itself reports `value`."""
    text = ""
    async with asyncio.timeout(20):
        while f"vllm:{metric} {float(value)}\n" not in text:
            text = await (await engine.get("/metrics")).text()


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (GENERATE, {"token_ids": []}, "token_ids", "length >= 1"),
        (GENERATE, {}, "token_ids", "required field"),
        (GENERATE, {"token_ids": [1, "a"]}, "token_ids[1]", "Expected `int`"),
        (GENERATE, {"token_ids": [1, -1]}, "token_ids[1]", ">= 0"),
        (GENERATE, {"token_ids": [1, 99999]}, "token_ids", "token_ids[1] is 99999"),
        (
            GENERATE,
            {"token_ids": [1] * 3000},
            None,
            "maximum context length is 3000 tokens. However, token_ids has 3000 input",
        ),
        (GENERATE, {"token_ids": [1], "sampling_params": {"top_p": 2}}, "sampling_params.top_p", "<= 1.0"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens", ">= 1"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"stop": ["x"]}}, "sampling_params.stop", "unknown field"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"stop_token_ids": [9999]}}, "stop_token_ids", "9999"),
        ("/v1/completions", {"prompt": "words"}, "prompt", "Expected `array`"),
        ("/v1/completions", {"prompt": [1], "echo": True}, "echo", "Invalid"),
        ("/collective_rpc", {"method": "exec", "kwargs": {"weights_path": "x"}}, "method", "exec"),
        ("/update_weight_version", {"new_version": 3}, "new_version", "Expected `str`"),
        ("/pause?mode=maybe", None, "mode", "'abort', 'wait', 'keep'"),
    ],
)
async def test_bad_input_names_the_field(
    engine: aiohttp.ClientSession, path: str, body: Any, param: str | None, words: str
) -> None:
    async with engine.post(path, json=body) as reply:
        error = (await reply.json())["error"]
        assert reply.status == 400
    assert (error["type"], error["code"], error["param"]) == ("BadRequestError", 400, param)
    assert words in error["message"]


async def test_what_is_not_json_or_not_there_is_said(engine: aiohttp.ClientSession) -> None:
    async with engine.post(GENERATE, data=b"{nope") as reply:
        assert (reply.status, "not JSON" in (await reply.json())["error"]["message"]) == (400, True)
    async with engine.post(GENERATE, json={"token_ids": [1], "model": "gpt"}) as reply:
        error = (await reply.json())["error"]
        assert (reply.status, error["param"]) == (404, "model")
        assert "serves `tiny`" in error["message"]
    async with engine.get("/v1/chat/completions") as reply:
        assert (reply.status, (await reply.json())["error"]["type"]) == (404, "NotFoundError")


async def test_it_says_what_it_serves(engine: aiohttp.ClientSession) -> None:
    (entry,) = (await (await engine.get("/v1/models")).json())["data"]
    assert (entry["id"], entry["max_model_len"]) == ("tiny", 3000)
    info = await (await engine.get("/server_info")).json()
    assert (info["logprobs_mode"], info["architecture"], info["dtype"]) == (
        "processed_logprobs",
        "Qwen3ForCausalLM",
        "float32",
    )
    assert (await engine.get("/health")).status == 200


@pytest.mark.acceptance
def test_a_port_in_use_or_a_folder_without_a_model_ends_with_one_line(
    model_folder: Path, engine_url: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "rolltap.engine", "--model", str(tmp_path), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    app = typer.Typer()
    app.command()(run)
    taken = CliRunner().invoke(app, ["--model", str(model_folder), "--port", engine_url.rsplit(":", 1)[1]])
    for code, output, words in (
        (done.returncode, done.stderr, "config.json"),
        (taken.exit_code, taken.output, "another --port"),
    ):
        assert code == 1
        assert output.count("\n") == 1
        assert words in output


@pytest.mark.parametrize(
    ("option", "message"),
    [({"dtype": "float16"}, "--dtype float16: float32 or bfloat16"), ({"device": "cuda:77"}, "--device cuda:77"),
     ({"device": "nonsense"}, "--device nonsense")],
)  # fmt: skip
def test_a_device_or_a_number_format_that_is_not_there_is_named(
    model_folder: Path, option: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(ModelServerSettings(model_folder, **option))


def test_bfloat16_is_close_to_float32(model_folder: Path) -> None:
    ids = list(range(3, 60))
    half, full = (CausalModel.load(model_folder, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    with torch.inference_mode():
        one, other = (torch.cat(list(model.score(ids))).log_softmax(-1) for model in (half, full))
    assert one.dtype == torch.float32
    assert (one - other).abs().mean() < 0.05
