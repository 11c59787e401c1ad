"""How many tokens stand for an image, where they are in a prompt, and where two prompts differ in their images."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from rolltap.errors import InvalidRequest
from rolltap.images import MOST_RATIO, ImageReader, ImageRule, ReadImage, ResizedRule, TiledRule
from rolltap.types import NO_DIFFERENCE, PromptImage, images_differ_at
from tests.vision import TILE_TOKENS, data_url, picture, vision_folder

PAD = 9
QWEN2_5 = ResizedRule(PAD, 2, patch=14, least=3136, most=1_003_520)
QWEN3 = ResizedRule(PAD, 2, patch=16, least=65_536, most=16_777_216)
Parts = list[tuple[list[int], int, str]]
sides = st.integers(1, 5000)
ids = st.lists(st.integers(0, PAD - 1), max_size=5)
shown = st.lists(st.tuples(ids, st.integers(1, 9), st.sampled_from("abc")), max_size=4)


@given(sides, sides, st.sampled_from([QWEN2_5, QWEN3]))
def test_an_image_has_the_grid_of_transformers_processor(width: int, height: int, rule: ResizedRule):
    if max(width, height) > MOST_RATIO * min(width, height):
        with pytest.raises(InvalidRequest):
            rule.grid(width, height)
        return
    resized = smart_resize(height, width, rule.patch * rule.merge, rule.least, rule.most)
    assert rule.grid(width, height) == (1, resized[0] // rule.patch, resized[1] // rule.patch)


@given(sides, sides, st.integers(1, 3), st.integers(3, 12), st.sampled_from([56, 448]))
def test_an_image_has_the_tiles_of_transformers_processor(width: int, height: int, fewest: int, most: int, side: int):
    processor = GotOcr2ImageProcessorPil(
        crop_to_patches=True, min_patches=fewest, max_patches=most, size={"height": side, "width": side}
    )
    rule = TiledRule(PAD, 2, side=side, fewest=fewest, most=most)
    tiles = processor.get_number_of_image_patches(height, width)
    assert rule.grid(width, height) == (tiles, 32, 32)
    assert rule.tokens(rule.grid(width, height)) == 256 * tiles


@pytest.mark.parametrize("size", [(60, 60), (60, 130), (150, 40), (400, 390)])
def test_a_tiled_image_has_the_ids_of_transformers_processor(tmp_path: Path, size: tuple[int, int]):
    """The whole prompt, by the processor of text and images."""
    folder = vision_folder("internvl", tmp_path)
    rule = ImageRule.of(folder)
    assert isinstance(rule, TiledRule)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for name, token in zip(("start_image", "end_image", "context_image", "video"), TILE_TOKENS, strict=True):
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    images = GotOcr2ImageProcessorPil.from_pretrained(folder)
    width, height = size
    tiles = images.get_number_of_image_patches(height, width, {"crop_to_patches": True})
    names: Any = SimpleNamespace(
        start_image_token="<img>", end_image_token="</img>", image_token="<IMG_CONTEXT>", image_seq_length=4
    )
    written = InternVLProcessor.replace_image_token(names, {"num_patches": [tiles]}, 0)
    reader = ImageReader(rule)
    image = reader.read(data_url(picture(width, height)))
    expanded = reader.expanded([5, rule.token, 6], [image], 10)
    assert expanded is not None
    assert expanded[0] == [5, *tokenizer.encode(written, add_special_tokens=False), 6]
    (placed,) = expanded[1]
    assert (placed.start, placed.end - placed.start) == (12, 4 * tiles)
    located = reader.located(expanded[0], [image])
    assert located is not None
    assert [each.start for each in located] == [2]


def test_tiles_of_another_processor_have_no_rule(tmp_path: Path):
    folder = vision_folder("internvl", tmp_path)
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = folder / name
        path.write_text(path.read_text().replace("InternVLProcessor", "GotOcr2Processor"))
    assert ImageRule.of(folder) is None


def written(parts: Parts, end: list[int]) -> tuple[list[int], list[ReadImage]]:
    """What a template writes, and its images."""
    images = [ReadImage(name, (1, 2, 2 * count), count) for _, count, name in parts]
    return [token for before, _, _ in parts for token in (*before, 8, PAD)] + [8, *end], images


@given(shown, ids, st.integers(0, 50))
def test_expanded_images_are_where_they_are_said_to_be(
    parts: list[tuple[list[int], int, str]], end: list[int], offset: int
):
    template, images = written(parts, end)
    reader = ImageReader(QWEN2_5)
    expanded = reader.expanded(template, images, offset)
    assert expanded is not None
    whole, placed = expanded
    assert [each.digest for each in placed] == [each.digest for each in images]
    for each, image in zip(placed, images, strict=True):
        assert whole[each.start - offset : each.end - offset] == [PAD] * image.tokens
    kept = [token for at, token in enumerate(whole) if not any(each.start < at + offset < each.end for each in placed)]
    assert kept == template
    moved = tuple(PromptImage(each.start - offset, each.end - offset, each.grid, each.digest) for each in placed)
    assert reader.located(whole, images) == moved
    assert reader.expanded(template, [*images, ReadImage("z", (1, 2, 2), 1)]) is None
    assert reader.located(whole, [*images, ReadImage("z", (1, 2, 2), 1)]) is None
    if images:
        assert reader.expanded(template, images[:-1]) is None
        assert reader.located(whole, images[:-1]) is None


@given(shown, shown)
def test_prompts_differ_from_the_first_image_on_that_is_another(left: Parts, right: Parts):
    reader = ImageReader(QWEN2_5)
    images, others = ((reader.expanded(*written(parts, [])) or ([], ()))[1] for parts in (left, right))
    at = images_differ_at(images, others)
    assert (at == NO_DIFFERENCE) == (images == others)
    before = [[image for image in each if image.start < at] for each in (images, others)]
    assert before[0] == before[1]
    if at != NO_DIFFERENCE:
        assert at in {image.start for image in (*images, *others)}


def test_a_camera_held_sideways_has_a_turned_image(tmp_path: Path):
    from PIL import Image

    reader = ImageReader(QWEN2_5)
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "a.jpg"
    Image.new("RGB", (200, 100)).save(path, exif=exif)
    assert reader.read(data_url(path.read_bytes(), "image/jpeg")).grid == QWEN2_5.grid(100, 200)


@pytest.mark.parametrize("cut", [10, 40, 60, 90])
def test_a_damaged_file_is_refused(cut: int):
    with pytest.raises(InvalidRequest):
        ImageReader(QWEN2_5).read(data_url(picture(60, 60)[:cut]))


def test_a_folder_without_a_known_processor_has_no_rule(tmp_path: Path):
    folder = vision_folder("qwen3_vl", tmp_path)
    rule = ImageRule.of(folder)
    assert isinstance(rule, ResizedRule)
    assert rule == ResizedRule(rule.token, 2, patch=16, least=64 * 64, most=160 * 160)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "SiglipImageProcessor"}')
    assert ImageRule.of(folder) is None
    (folder / "preprocessor_config.json").unlink()
    assert ImageRule.of(folder) is None
    (folder / "processor_config.json").write_text(
        '{"image_processor": {"image_processor_type": "Qwen2VLImageProcessor"}}'
    )
    assert ImageRule.of(folder).most == 28 * 28 * 1280  # type: ignore[union-attr]


def test_histories_longer_than_the_cache_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of long sessions of screenshots: each request has all images again."""
    monkeypatch.setattr("rolltap.images.CACHED_CHARACTERS", 1000)
    urls = [data_url(picture(60, 60, (shade, 0, 0))) for shade in range(5)]
    assert sum(map(len, urls)) > 1000 > 4 * max(map(len, urls))
    reader = ImageReader(QWEN2_5)
    decoded: list[str] = []
    measured = reader._measured
    monkeypatch.setattr(reader, "_measured", lambda url: (decoded.append(url), measured(url))[1])
    read = [[reader.read(url).digest for url in urls] for _ in range(3)]
    assert decoded == urls
    assert read[0] == read[1] == read[2]
    assert len(set(read[0])) == len(urls)
