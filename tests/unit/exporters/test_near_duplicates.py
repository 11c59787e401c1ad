"""`--near-duplicates` and `--push`."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import huggingface_hub
import numpy as np
import pytest

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.cleaning import NearDuplicates
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query

from .test_record import run, store  # noqa: F401  # the fixture
from .world import World, lines, says, user


def words(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return [f"w{chance.randrange(5000)}" for _ in range(count)]


def similarity(first: list[str], second: list[str]) -> float:
    """What MinHash estimates: the share of runs of five words in both."""
    runs = [{tuple(text[i : i + 5]) for i in range(len(text) - 4)} for text in (first, second)]
    return len(runs[0] & runs[1]) / len(runs[0] | runs[1])


def content(text: list[str], as_ids: bool) -> Any:
    """As a row of a message or of a token format holds it."""
    return np.array([int(word[1:]) for word in text]) if as_ids else {"content": " ".join(text)}


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("changed", [1, 4, 12, 60])
def test_rows_are_near_where_they_share_enough_runs(changed: int, as_ids: bool):
    for seed in range(10):
        text = words(400, seed)
        other = list(text)
        for place in random.Random(seed).sample(range(400), changed):
            other[place] = "w9999"
        true = similarity(text, other)
        rows = [content(each, as_ids) for each in (text, other)]
        near = NearDuplicates(0.8)
        assert not near.knows(rows[0])
        if abs(true - 0.8) > 0.15:
            assert near.knows(rows[1]) == (true > 0.8), true


def test_the_manifest_counts_them(world: World, tmp_path: Path):
    items = []
    for number, tail in enumerate(["done", "finished", "quite another matter"]):
        script = world.script(f"s{number}")
        text = " ".join(words(200, number // 2))
        script.ask([user(text)], says(tail))
        items.append(script.item(reward=1.0, task=f"t{number}"))
    for format in ("sft", "sft-tokens"):
        query = Query(container="jsonl", near=0.8)
        with DatasetWriter(tmp_path / format, exporter_named(format), query) as writer:
            writer.add(items[:1])
            writer.add(items[1:])
            manifest = writer.finish()
        assert (manifest["rows"], manifest["near_duplicates_left_out"]) == (2, 1)
        rows = lines(tmp_path / format / "train-00000-of-00001.jsonl")
        assert [row["session_id"] for row in rows] == ["s0", "s2"]


def test_a_similarity_that_is_none_is_named():
    with pytest.raises(DatasetError, match=r"from 0.5 to 1, not 9"):
        NearDuplicates(9)


class Hub:
    """What a hub is told."""

    calls: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def create_repo(self, repo_id: str, **options: Any) -> None:
        self.calls.append((repo_id, options))

    def upload_folder(self, **options: Any) -> Any:
        files = sorted(path.name for path in Path(options["folder_path"]).iterdir())
        self.calls.append((options["repo_id"], {"files": files, "repo_type": options["repo_type"]}))
        return SimpleNamespace(commit_url="the address")


def test_a_dataset_is_pushed_where_a_token_is_set(
    store: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    code, output = run(store, tmp_path / "out", "-f", "sft", "--option", "arguments=object", "--push", "me/mine")
    assert (code, "no token" in output, (tmp_path / "out").exists()) == (1, True, False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_mine")
    code, output = run(store, tmp_path / "out", "-f", "sft", "--option", "arguments=object", "--push", "me/mine")
    assert code == 0, output
    assert "pushed: the address" in output
    assert Hub.calls == [
        ("me/mine", {"repo_type": "dataset", "private": True, "exist_ok": True}),
        ("me/mine", {"files": ["README.md", "manifest.json", "train-00000-of-00001.jsonl"], "repo_type": "dataset"}),
    ]
