"""Images in token mode: in four dialects, over turns, and what is refused. Prompts are compared with transformers'."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rolltap import wire
from rolltap.calllog.codec import part_hash
from rolltap.contract.admin import FinishRollout, NewReward
from rolltap.contract.trainer import Lease, LeaseRequest
from rolltap.engine.scripted import ScriptedEngine, ScriptedReply, ToolUse, say
from rolltap.errors import ConfigError
from rolltap.images import ImageRule
from rolltap.ledger.groups import GroupSpec
from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.settings import load_settings
from rolltap.tokenizer import HubTokenizer
from rolltap.trainer_client.adapters.rows import rows_of
from rolltap.trainer_client.recipes import make_recipe
from rolltap.types import BreakReason, Flaw, RolloutStatus, Task

from ..harnesses.house import House, house_settings, opened, served
from ..vision import FAMILIES, PROCESSORS, data_url, picture, vision_folder

RED, BLUE = picture(150, 90), picture(150, 90, (10, 40, 250))
WIDE = picture(300, 40, kind="JPEG")
WORDS = "What is in this picture?"
ODD = ScriptedReply(say="A red square, I think.", split="odd")


def expected(folder: Path, messages: Sequence[dict[str, Any]], files: Sequence[bytes]) -> list[int]:
    """The ids of transformers' tokenizer, template and image processor."""
    write = written_tiles if folder.name == "internvl" else written_patches
    placeholder = "<IMG_CONTEXT>" if folder.name == "internvl" else "<|image_pad|>"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text: Any = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    pieces = text.split(placeholder)
    assert len(pieces) == len(files) + 1
    text = pieces[0]
    for image, piece in zip(files, pieces[1:], strict=True):
        text += write(folder, Image.open(io.BytesIO(image)).convert("RGB")) + piece
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def written_patches(folder: Path, image: Image.Image) -> str:
    options: Any = {"merge_size": 2, **PROCESSORS[folder.name]}
    grid = Qwen2VLImageProcessorPil(**options)(image)["image_grid_thw"][0]
    return "<|image_pad|>" * (int(np.prod(grid)) // 4)


def written_tiles(folder: Path, image: Image.Image) -> str:
    processor: Any = GotOcr2ImageProcessorPil.from_pretrained(folder)
    tiles = len(processor(image, crop_to_patches=True)["pixel_values"])
    return f"<img>{'<IMG_CONTEXT>' * 4 * tiles}</img>"


@asynccontextmanager
async def seeing(
    folder: Path, family: str, *turns: ScriptedReply | str, wire: str = "vllm", begins: str = "", **policy: Any
) -> AsyncIterator[House]:
    """`begins`: what the chat template begins each reply with."""
    model = vision_folder(family, folder / family)
    config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    opening = "{{- '<|im_start|>assistant\\n"
    before, found, after = config["chat_template"].rpartition(opening)
    config["chat_template"] = f"{before}{found}{begins}{after}"
    (model / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    async with (
        ScriptedEngine(say(*turns), model, wire=wire) as engine,
        opened(engine, folder, **{"tokenizer": model, "family": "", **policy}) as home,
    ):
        yield home


class Talker:
    """A client of the agent plane with the key of a session of its own."""

    def __init__(self, home: House, session: Any) -> None:
        self.home, self.session = home, session
        self.headers = {"Authorization": f"Bearer {session.endpoint.key}"}

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession(headers=self.headers) as http,
            http.post(f"{self.home.urls['agent']}{path}", json=body) as answer,
        ):
            return answer.status, await answer.json()

    async def chat(self, messages: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        status, answer = await self.post("/v1/chat/completions", {"model": "tiny", "messages": list(messages), **more})
        assert status == 200, answer
        return answer["choices"][0]["message"]

    async def rows(self) -> Sequence[Any]:
        return await self.home.app.services.call_log.rows(self.session.session_id)


async def talker(home: House) -> Talker:
    return Talker(home, await home.open())


def chat_body(image: bytes) -> tuple[str, Any]:
    content = [{"type": "text", "text": WORDS}, {"type": "image_url", "image_url": {"url": data_url(image)}}]
    return "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": content}]}


def responses_body(image: bytes) -> tuple[str, Any]:
    content = [{"type": "input_text", "text": WORDS}, {"type": "input_image", "image_url": data_url(image)}]
    return "/v1/responses", {"model": "tiny", "input": [{"role": "user", "content": content}]}


def messages_body(image: bytes) -> tuple[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data_url(image).partition(",")[2]}
    content = [{"type": "text", "text": WORDS}, {"type": "image", "source": source}]
    return "/v1/messages", {"model": "tiny", "max_tokens": 99, "messages": [{"role": "user", "content": content}]}


def gemini_body(image: bytes) -> tuple[str, Any]:
    blob = {"inlineData": {"mimeType": "image/png", "data": data_url(image).partition(",")[2]}}
    return "/v1beta/models/tiny:generateContent", {"contents": [{"role": "user", "parts": [{"text": WORDS}, blob]}]}


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_dialects_image_is_in_the_prompt_as_the_processor_would_write_it(tmp_path: Path, family: str):
    bodies = [write(RED) for write in (chat_body, responses_body, messages_body, gemini_body)]
    content = [{"type": "text", "text": WORDS}, {"type": "image"}]
    async with seeing(tmp_path, family, ODD) as home:
        ids = expected(tmp_path / family, [{"role": "user", "content": content}], [RED])
        for path, body in bodies:
            client = await talker(home)
            status, answer = await client.post(path, body)
            assert status == 200, answer
            (row,) = await client.rows()
            assert row.prompt_ids.tolist() == ids
            (image,) = row.intent.images
            assert image.digest == part_hash(RED).hex()
            assert set(ids[image.start : image.end]) == {ids[image.start]}
            assert image.end - image.start == ids.count(ids[image.start]) == np.prod(image.grid) // 4
            assert "tool_media" not in row.intent.shape.unapplied
        log = home.app.services.call_log
        assert await log.images([part_hash(RED).hex(), "00" * 32]) == {part_hash(RED).hex(): RED}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shown_at", [0, 1, 2])
async def test_a_placeholder_that_the_model_samples_is_no_image(tmp_path: Path, family: str, shown_at: int):
    """The engine would want an image for it in every later call."""
    folder = vision_folder(family, tmp_path / "model" / family)
    rule, tokenizer = ImageRule.of(folder), HubTokenizer(folder)
    assert rule is not None
    ids = (*tokenizer.encode("red "), rule.token, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    replies, begins = (ScriptedReply(ids=ids), "two", "three"), tokenizer.convert_tokens_to_ids("<|im_start|>")
    async with (
        ScriptedEngine(lambda prompt: replies[(prompt.ids.count(begins) - 2) // 2], folder) as engine,
        opened(engine, tmp_path, tokenizer=folder, family="") as home,
    ):
        client = await talker(home)
        history: list[dict[str, Any]] = []
        for turn in range(3):
            _, body = chat_body(RED if turn == shown_at else BLUE)
            history += body["messages"] if turn >= shown_at else [{"role": "user", "content": "Go."}]
            history.append(await client.chat(history))
        rows = await client.rows()
    assert [len(row.intent.images) for row in rows] == [max(0, turn - shown_at + 1) for turn in range(3)]
    assert [row.completion.flaw for row in rows] == [Flaw.IDS_UNKNOWN, None, None]
    assert rows[1].intent.break_.reason is BreakReason.IDS_UNKNOWN
    assert rows[2].intent.break_ is None
    for row in rows:
        placeholders = sum(image.end - image.start for image in row.intent.images)
        assert row.prompt_ids.tolist().count(rule.token) == placeholders


async def test_a_conversation_with_images_keeps_its_tokens_and_stores_each_file_once(tmp_path: Path):
    look = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    called = ScriptedReply(call=(ToolUse("look", {}),), split="odd")
    async with seeing(tmp_path, "qwen3_vl", called, ODD, ODD) as home:
        client = await talker(home)
        history: list[Any] = [{"role": "user", "content": "Look."}]
        reply = await client.chat(history, tools=look)
        picture_part = {"type": "image_url", "image_url": {"url": data_url(RED)}}
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": [picture_part]}
        history += [reply, result]
        history += [await client.chat(history, tools=look)]
        wide_part = {"type": "image_url", "image_url": {"url": data_url(WIDE, "image/jpeg")}}
        history += [{"role": "user", "content": [wide_part, {"type": "text", "text": "And here?"}, picture_part]}]
        await client.chat(history, tools=look)
        rows = await client.rows()
        assert [row.intent.break_ for row in rows] == [None, None, None]
        for row, before in zip(rows[1:], rows, strict=False):
            context = np.concatenate([before.prompt_ids, before.completion.output_ids])
            assert row.prompt_ids[: len(context)].tolist() == context.tolist()
            assert row.intent.shared == len(context)
        assert [[image.digest for image in row.intent.images] for row in rows] == [
            [],
            [part_hash(RED).hex()],
            [part_hash(file).hex() for file in (RED, WIDE, RED)],
        ]
        assert rows[1].intent.shape.unapplied == ()
        entries = [each for each in home.engine.journal.entries if each.session == client.session.session_id]
        assert [entry.extends for entry in entries] == [None, True, True]
        sent = await home.app.services.call_log.request(rows[2].intent.id)
        assert data_url(WIDE, "image/jpeg").encode() in sent.items[-1]
        assert sent.items[-1].count(data_url(RED).encode()) == 1
    stored = (tmp_path / "data" / "rolltap.db").read_bytes()
    assert data_url(WIDE)[60:].encode() not in stored
    assert stored.count(WIDE[20:-20]) <= 1  # a part is compressed, if that makes it smaller


async def test_another_image_of_the_same_size_is_an_edit(tmp_path: Path):
    def asking(image: bytes) -> dict[str, Any]:
        return chat_body(image)[1]["messages"][0]

    async with seeing(tmp_path, "qwen2_5_vl", "One.", "Two.", "Three.", "Four.") as home:
        client = await talker(home)
        history: list[Any] = [{"role": "user", "content": "Look."}]
        history.append(await client.chat(history))
        reply = await client.chat([*history, asking(RED)])
        await client.chat([*history, asking(BLUE), reply, {"role": "user", "content": "Sure?"}])
        await client.chat([*history, asking(RED), reply, {"role": "user", "content": "Sure?"}])
        _, first, edited, continued = await client.rows()
        assert edited.prompt_ids[: len(first.prompt_ids)].tolist() == first.prompt_ids.tolist()
        assert edited.intent.break_.reason is BreakReason.HISTORY_EDITED
        assert edited.intent.shared < first.intent.images[0].start
        assert edited.intent.images[0].digest == part_hash(BLUE).hex()
        assert (continued.intent.break_, continued.intent.parent_id) == (None, first.intent.id)


async def test_an_image_between_other_words_is_another_request(tmp_path: Path):
    text, image = chat_body(RED)[1]["messages"][0]["content"]
    async with seeing(tmp_path, "qwen2_5_vl", "One.", "Two.") as home:
        client = await talker(home)
        await client.chat([{"role": "user", "content": [text, image]}])
        await client.chat([{"role": "user", "content": [image, text]}])
        first, second = await client.rows()
        assert sorted(first.prompt_ids) == sorted(second.prompt_ids)
        assert second.prompt_ids.tolist() != first.prompt_ids.tolist()


async def test_an_unknown_image_processor_is_named(tmp_path: Path):
    model = vision_folder("internvl", tmp_path / "internvl")
    for path in (model / "preprocessor_config.json", model / "processor_config.json"):
        path.write_text(path.read_text().replace("InternVLProcessor", "Idefics3Processor"))
    async with (
        ScriptedEngine(say("Hi."), model) as engine,
        opened(engine, tmp_path, tokenizer=model, family="") as home,
    ):
        client = await talker(home)
        status, answer = await client.post(*chat_body(RED))
        assert (status, "Idefics3Processor" in answer["error"]["message"]) == (400, True), answer


async def test_what_the_model_cannot_be_shown_is_refused_or_a_line(tmp_path: Path):
    remote = {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}
    broken = {"type": "image_url", "image_url": {"url": data_url(RED[: len(RED) // 2])}}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    async with seeing(tmp_path, "qwen3_vl", "One.", "Two.") as home:
        client = await talker(home)
        for part, word in ((remote, "data URL"), (broken, "damaged")):
            body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
            status, answer = await client.post("/v1/chat/completions", body)
            assert (status, word in answer["error"]["message"]) == (400, True), answer
            result = {"role": "tool", "tool_call_id": "c1", "content": [part]}
            await client.chat(
                [{"role": "user", "content": "Look."}, {"role": "assistant", "tool_calls": [call]}, result]
            )
        rows = [row for row in await client.rows() if len(row.prompt_ids)]
        assert [row.intent.images for row in rows] == [(), ()]
        assert all("tool_media" in row.intent.shape.unapplied for row in rows)


@pytest.mark.parametrize(
    ("wire", "kind", "words"),
    [
        ("sglang", "sglang", "engine main (sglang) takes no images"),
        ("vllm-completions", "vllm", "engine main (vllm) takes no images with token"),
        ("vllm", "rolltap", "engine main (rolltap) takes no images"),
    ],
)
async def test_an_engine_without_images_is_named(tmp_path: Path, wire: str, kind: str, words: str):
    model = vision_folder("qwen3_vl", tmp_path / "qwen3_vl")
    async with ScriptedEngine(say("Hi."), model, wire=wire) as engine:
        values = dict(house_settings(tmp_path, engine.url, tokenizer=model, family=""))
        values["engines"] = {"main": {"url": engine.url, "kind": kind}}
        async with served(engine, load_settings(None, **values)) as home:
            client = await talker(home)
            await home.app.services.policies["tiny"].engine.probe()
            status, answer = await client.post(*chat_body(RED))
            assert (status, words in answer["error"]["message"]) == (400, True), answer


@pytest.mark.parametrize("named", [True, False])
async def test_a_chat_upstreams_images_are_found_if_the_policy_names_the_folder(tmp_path: Path, named: bool):
    model = vision_folder("qwen3_vl", tmp_path / "qwen3_vl")
    policy = {"engine": "main", "model": "scripted", "tokenizer": str(model) if named else ""}
    async with ScriptedEngine(say("One.", "Two."), model) as engine:
        engines = {"main": {"url": engine.url, "kind": "openai_compatible"}}
        values = {"data": tmp_path / "data", "engines": engines, "policies": {"tiny": policy}}
        async with served(engine, load_settings(None, **values)) as home:
            client = await talker(home)
            history = chat_body(RED)[1]["messages"]
            history.append(await client.chat(history))
            wide_part = {"type": "image_url", "image_url": {"url": data_url(WIDE, "image/jpeg")}}
            await client.chat([*history, {"role": "user", "content": [wide_part]}])
            rows = await client.rows()
            digests = [part_hash(image).hex() for image in (RED, WIDE)]
            found = [[image.digest for image in row.intent.images] for row in rows]
            assert found == ([digests[:1], digests] if named else [[], []])
            flaws = [row.completion.flaw for row in rows]
            assert (Flaw.IMAGES_UNKNOWN in flaws) is not named
            trajectory = reconstruct([row.call() for row in rows])
            assert bool(trajectory.segments) is named
            if named:
                assert rows[1].intent.shared > rows[0].intent.images[0].end
                assert await home.app.services.call_log.images(digests) == dict(zip(digests, (RED, WIDE), strict=True))


async def test_a_lease_has_the_files_and_adapters_and_exports_refuse_them(tmp_path: Path):
    async with seeing(tmp_path, "qwen2_5_vl", "One.", "Two.") as home:
        ledger, client = home.app.services.ledger, await talker(home)
        group = await ledger.groups.open(GroupSpec("tiny", 1, Task("task", "look")))
        rollout = (await ledger.rollouts.start(group.rollouts[0].id, client.session.session_id)).rollout
        history = chat_body(RED)[1]["messages"]
        history.append(await client.chat(history))
        await client.chat([*history, {"role": "user", "content": "Sure?"}])
        await ledger.rewards.append(NewReward(rollout.id, 1.0))
        await ledger.rollouts.finish(rollout.id, FinishRollout(RolloutStatus.SUCCEEDED, rollout.attempt))
        headers = {"Authorization": f"Bearer {home.app.settings.keys.trainer}"}
        body = {"trainer": "t", "policy": "tiny", "groups": 1, "wait": 20}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{home.urls['trainer']}/leases", json=body) as answer,
        ):
            assert answer.status == 200, await answer.text()
            lease = wire.unpack(await answer.read(), Lease)
        (leased,) = lease.groups
        (segment,) = leased.rollouts[0].trajectory.segments
        first, second = await client.rows()
        assert segment.images == first.intent.images == second.intent.images
        assert leased.images == {part_hash(RED).hex(): RED}
        with pytest.raises(ConfigError, match="show images"):
            rows_of(lease.groups, make_recipe("grpo", {}))
        session = await home.app.services.call_log.session(client.session.session_id)
        assert session is not None
        with DatasetWriter(tmp_path / "out", exporter_named("trl-grpo", {}), Query()) as writer:
            writer.add([ExportItem(session, leased.rollouts[0].trajectory, {}, {}, reward=1.0)])
            assert writer.finish()["skipped"] == {"its tokens stand for images": 1}


@pytest.mark.parametrize("frames", [0, 3])
async def test_frames_and_the_forced_beginning_of_replies_carry_no_loss(tmp_path: Path, frames: int):
    """ParaVT: a template opens `<think>` for the model, which crops twice in one turn; a lease and an export."""
    crops = tuple(ToolUse("crop_video", {"start": at, "end": at + 2}) for at in (0, 4))
    tools = [{"type": "function", "function": {"name": "crop_video", "parameters": {"type": "object"}}}]
    replies = (ScriptedReply(think="Look twice.", call=crops), ScriptedReply(think="Both red.", say="Red."))
    async with seeing(tmp_path, "qwen3_vl", *replies, begins="<think>\\n") as home:
        ledger, client = home.app.services.ledger, await talker(home)
        begins = HubTokenizer(tmp_path / "qwen3_vl").encode("<think>\n")
        group = await ledger.groups.open(GroupSpec("tiny", 1, Task("task", "look")))
        rollout = (await ledger.rollouts.start(group.rollouts[0].id, client.session.session_id)).rollout
        shown = [{"type": "image_url", "image_url": {"url": data_url(picture(40 + at, 40))}} for at in range(frames)]
        history: list[Any] = [{"role": "user", "content": [*shown, {"type": "text", "text": WORDS}]}]
        reply = await client.chat(history, tools=tools)
        results = [{"role": "tool", "tool_call_id": each["id"], "content": "red"} for each in reply["tool_calls"]]
        assert len(results) == 2
        last = await client.chat([*history, reply, *results], tools=tools)
        assert (last["content"], last["reasoning_content"].strip()) == ("Red.", "Both red.")
        rows = await client.rows()
        assert [row.intent.break_ for row in rows] == [None, None]
        assert [row.prompt_ids[-len(begins) :].tolist() for row in rows] == [begins] * 2
        await ledger.rewards.append(NewReward(rollout.id, 1.0))
        await ledger.rollouts.finish(rollout.id, FinishRollout(RolloutStatus.SUCCEEDED, rollout.attempt))
        (leased,) = (await ledger.trainers.lease(LeaseRequest("t", "tiny", 1))).groups
        (segment,) = leased.rollouts[0].trajectory.segments
        assert len(segment.images) == frames
        trained = segment.token_ids[segment.loss_mask].tolist()
        assert trained == [token for row in rows for token in row.completion.output_ids.tolist()]
        for row, span in zip(rows, segment.turns, strict=True):
            assert segment.token_ids[span.start - len(begins) : span.start].tolist() == begins
            assert span.end - span.start == len(row.completion.output_ids)
        session = await home.app.services.call_log.session(client.session.session_id)
        assert session is not None
        query = Query(container="jsonl")
        with DatasetWriter(tmp_path / "out", exporter_named("sft-tokens", {}), query) as writer:
            writer.add([ExportItem(session, leased.rollouts[0].trajectory, {}, {}, reward=1.0)])
            writer.finish()
    if not frames:
        (file,) = (tmp_path / "out").glob("**/*.jsonl")
        (line,) = file.read_text(encoding="utf-8").splitlines()
        assert [label for label in json.loads(line)["labels"] if label != -100] == trained


def of_user(image: bytes) -> list[dict[str, Any]]:
    return chat_body(image)[1]["messages"]


def of_tool(image: bytes) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    part = {"type": "image_url", "image_url": {"url": data_url(image)}}
    result = {"role": "tool", "tool_call_id": "c1", "content": [part]}
    return [{"role": "user", "content": "Look."}, {"role": "assistant", "tool_calls": [call]}, result]


@pytest.mark.parametrize("messages", [of_user, of_tool])
@pytest.mark.parametrize("media", ["describe", "refuse"])
@pytest.mark.parametrize("kind", ["vllm", "openai_compatible"])
async def test_other_calls_go_on_while_an_image_is_decoded(
    kind: str, media: str, messages: Callable[[bytes], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A file of a few kilobytes may be an image of millions of pixels."""
    begun, may_end = threading.Event(), threading.Event()
    model = vision_folder("qwen3_vl", tmp_path / "qwen3_vl")
    async with ScriptedEngine(say("Yes."), model) as engine:
        values = dict(house_settings(tmp_path, engine.url, tokenizer=model, family="", tool_media=media))
        values["engines"] = {"main": {"url": engine.url, "kind": kind}}
        async with served(engine, load_settings(None, **values)) as home:
            reader = home.app.services.policies["tiny"].source.images.reader  # type: ignore[attr-defined]
            decoded = reader._measured

            def measured(url: str) -> Any:
                begun.set()
                assert may_end.wait(20), "nobody else was answered"
                return decoded(url)

            monkeypatch.setattr(reader, "_measured", measured)
            looking, other = await talker(home), await talker(home)
            reply = asyncio.create_task(looking.chat(messages(picture(30, 30))))
            assert await asyncio.to_thread(begun.wait, 20)
            await other.chat([{"role": "user", "content": "Hello?"}])
            assert not reply.done()
            may_end.set()
            await reply
