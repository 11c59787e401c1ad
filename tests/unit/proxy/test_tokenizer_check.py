"""An engine whose tokenizer is not the policy's is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolltap.engine.scripted import ScriptedEngine, say
from rolltap.engine.tiny import FOLDER
from rolltap.errors import EngineTimeout
from rolltap.proxy.app import Rolltap
from rolltap.proxy.call.engine_watch import check_tokenizer, tokenizer_difference
from rolltap.tokenizer import HubTokenizer

from .test_weights_check import settings_of, status_of_call, until


def altered(folder: Path, change: str) -> Path:
    """The tiny model's tokenizer with two tokens swapped: added ones, or ordinary ones."""
    folder.mkdir()
    for path in FOLDER.glob("*.json*"):
        (folder / path.name).write_bytes(path.read_bytes())
    value: Any = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if change == "added":
        one, two = value["added_tokens"][:2]
        one["content"], two["content"] = two["content"], one["content"]
    else:
        vocabulary = value["model"]["vocab"]
        vocabulary["H"], vocabulary["e"] = vocabulary["e"], vocabulary["H"]
    (folder / "tokenizer.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


class Server:
    """A server with a tokenizer; one that is `shy` parses no added tokens, one that is `mute` has no route."""

    name = "main"

    def __init__(self, folder: Path, kind: str = "") -> None:
        self._tokenizer, self._kind = HubTokenizer(folder), kind

    async def tokenize(self, text: str, model: str) -> list[int] | None:
        if self._kind == "mute":
            return None
        return self._tokenizer.encode(text) if self._kind == "shy" else self._tokenizer.encode_as_is(text)


@pytest.mark.parametrize("change", ["added", "ordinary"])
async def test_a_tokenizer_with_two_tokens_swapped_is_another_one(tmp_path: Path, change: str) -> None:
    ours = HubTokenizer(FOLDER)
    difference = await tokenizer_difference(Server(altered(tmp_path / "other", change)), ours, "m")
    assert difference.startswith("engine main has another tokenizer than the policy's: ")


@pytest.mark.parametrize("kind", ["", "shy", "mute"])
async def test_the_same_tokenizer_passes_whatever_the_server_parses(kind: str) -> None:
    assert await tokenizer_difference(Server(FOLDER, kind), HubTokenizer(FOLDER), "m") == ""


async def test_an_engine_with_another_tokenizer_is_refused_at_start_and_after_it_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rolltap.proxy.call.engine_watch.PROBE_AGAIN_S", 0.02)
    other = altered(tmp_path / "other", "added")
    engine = ScriptedEngine(say("yes"), other, wire="vllm")
    async with engine, Rolltap.running(settings_of(tmp_path / "data", engine)) as app:
        assert await status_of_call(app) == 503
        assert "engine main has another tokenizer" in app.policies["p"].wrong_tokenizer
        engine.model.writer.tokenizer.inner = HubTokenizer(FOLDER)._tokenizer
        await until(lambda: not app.policies["p"].wrong_tokenizer)
        assert await status_of_call(app) == 200
        engine.model.writer.tokenizer.inner = HubTokenizer(other)._tokenizer
        await until(lambda: app.policies["p"].wrong_tokenizer != "")
        assert await status_of_call(app) == 503
    assert "its calls are refused" in caplog.text


async def test_an_engine_that_does_not_say_its_tokenizer_now_stays_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is busy: that no answer came says nothing about its tokens."""
    asked: list[str] = []

    async def silent(http: object, method: str, path: str, *args: object, **options: object) -> object:
        asked.append(path)
        raise EngineTimeout(f"engine main: {path} took over 10 s")

    engine = ScriptedEngine(say("yes"), altered(tmp_path / "other", "added"), wire="vllm")
    async with engine, Rolltap.running(settings_of(tmp_path / "data", engine)) as app:
        policy = app.policies["p"]
        assert policy.wrong_tokenizer
        monkeypatch.setattr("rolltap.proxy.engines.http.EngineHttp.optional", silent)
        await check_tokenizer(policy)
        assert asked == ["/tokenize"]
        assert await status_of_call(app) == 503
