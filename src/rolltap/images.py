"""Images in prompts: how many tokens stand for one, by the rule of the model's own processor.

A model folder's processor configuration has the rule. Each square of `merge` by `merge` patches is one placeholder
token.

* Qwen2-VL's, which Qwen2.5-VL, Qwen3-VL and Qwen3.5 share: an image is resized to whole patches between two numbers of
  pixels.
* InternVL's (transformers' own format): an image is cut into square tiles, as many as fit its proportions best, and of
  several there is a small picture of the whole behind them.

Pillow, an extra, reads the files; nothing here computes pixels for a model.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from cachetools import LRUCache

from rolltap.errors import ConfigError, InvalidRequest
from rolltap.extras import install_line
from rolltap.types import PromptImage

RESIZING = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
TILING = ("GotOcr2ImageProcessor", "GotOcr2ImageProcessorFast", "GotOcr2ImageProcessorPil")
"""The image processors with Qwen2-VL's and with InternVL's rule, as a folder names them."""

TILING_MODEL = "InternVLProcessor"
"""The processor that uses such tiles, and writes ids around them; others of them write other ids."""

RESIZED, TILED = "<|image_pad|>", "<IMG_CONTEXT>"
PLACEHOLDERS = (RESIZED, TILED)
"""The tokens that stand for an image, or for a part of one, in the families of these processors."""
AROUND_TILES = ("<img>", "</img>")

MOST_RATIO = 200
"""A longer side relative to the shorter one is refused, as by the processor."""

MOST_PIXELS = 1 << 26
"""A larger image is refused before it is decoded: its file may be small."""

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
ORIENTATION = 0x0112
"""The EXIF tag that says how a camera was held. Engines and trainers turn the image accordingly."""

SIDEWAYS = 5
"""From this orientation on, width and height change places."""

CACHED_CHARACTERS = 64_000_000
"""Limit of the cache of read images, in characters of their URLs. A history repeats its images in every request."""

CACHED_IMAGES = 50_000
"""Limit of what is known of images by their URLs' hashes: the histories of many sessions are longer than the cache."""


@dataclass(frozen=True, slots=True)
class ImageRule(ABC):
    """Which ids stand for an image: `before`, the placeholder `token` for each `merge` by `merge` patches, `after`."""

    token: int
    merge: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @staticmethod
    def of(folder: Path) -> ImageRule | None:
        """The rule of a model's folder; None if it has no image processor that is known here.

        Raises `ConfigError` for a damaged file.
        """
        settings = _processor(folder)
        try:
            if settings.get("image_processor_type") in RESIZING:
                return ResizedRule.read(folder, settings)
            is_tiled = settings.get("image_processor_type") in TILING and _processor_class(folder) == TILING_MODEL
            return TiledRule.read(folder, settings) if is_tiled else None
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"{folder}: its image processor's settings can't be read: {error}") from error

    @abstractmethod
    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """The patches of an image of this size, as (frames or tiles, rows, columns). Raises `InvalidRequest` for one
        that the processor refuses."""

    def tokens(self, grid: tuple[int, int, int]) -> int:
        """The number of placeholders of an image with this grid."""
        frames, rows, columns = grid
        return frames * rows * columns // self.merge**2


@dataclass(frozen=True, slots=True)
class ResizedRule(ImageRule):
    """Qwen2-VL's rule. `least`, `most`: pixels of a resized image."""

    patch: int = 14
    least: int = 56 * 56
    most: int = 28 * 28 * 1280

    @classmethod
    def read(cls, folder: Path, settings: Mapping[str, Any]) -> ResizedRule | None:
        token = _added_tokens(folder).get(RESIZED)
        if token is None:
            return None
        size = settings.get("size") or {}
        return cls(
            token,
            int(settings.get("merge_size", 2)),
            patch=int(settings.get("patch_size", 14)),
            least=int(settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56),
            most=int(settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280),
        )

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        if max(width, height) > MOST_RATIO * min(width, height):
            raise InvalidRequest(f"an image has {width} x {height} pixels: a side is over {MOST_RATIO} times the other")
        factor = self.patch * self.merge
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor * factor > self.most:
            scale = math.sqrt(height * width / self.most)
            rows = max(1, math.floor(height / scale / factor))
            columns = max(1, math.floor(width / scale / factor))
        elif rows * columns * factor * factor < self.least:
            scale = math.sqrt(self.least / (height * width))
            rows, columns = math.ceil(height * scale / factor), math.ceil(width * scale / factor)
        return 1, rows * self.merge, columns * self.merge


@dataclass(frozen=True, slots=True)
class TiledRule(ImageRule):
    """InternVL's rule. `side`: of a tile, in pixels; `rows`: its rows of patches; `fewest`, `most`: tiles."""

    side: int = 448
    rows: int = 32
    fewest: int = 1
    most: int = 12

    @classmethod
    def read(cls, folder: Path, settings: Mapping[str, Any]) -> TiledRule | None:
        added, merge = _added_tokens(folder), 2
        if not {TILED, *AROUND_TILES} <= added.keys():
            return None
        processor = folder / SETTINGS[1]  # of text and images
        tokens = int((_read(processor) if processor.is_file() else {}).get("image_seq_length", 256))
        size = settings["size"]
        if size["height"] != size["width"] or math.isqrt(tokens) ** 2 != tokens:
            raise ValueError(f"tiles of {size} pixels with {tokens} tokens are no squares")
        before, after = ((added[token],) for token in AROUND_TILES)
        return cls(
            added[TILED],
            merge,
            before,
            after,
            side=int(size["height"]),
            rows=merge * math.isqrt(tokens),
            fewest=int(settings.get("min_patches") or 1),
            most=int(settings.get("max_patches") or 12),
        )

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        columns, rows = self._layout(width, height)
        tiles = columns * rows
        return tiles + (tiles > 1), self.rows, self.rows

    def _layout(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of tiles: the proportions nearest to the image's; of equal ones the most tiles that are not
        over twice the image's area."""
        best, least = (1, 1), math.inf
        for columns, rows in _layouts(self.fewest, self.most):
            off = abs(width / height - columns / rows)
            if off < least or (off == least and width * height > 0.5 * self.side**2 * columns * rows):
                best, least = (columns, rows), off
        return best


@cache
def _layouts(fewest: int, most: int) -> list[tuple[int, int]]:
    """All columns and rows of so many tiles, the fewest first."""
    sides = range(1, most + 1)
    return sorted(
        ((columns, rows) for columns in sides for rows in sides if fewest <= columns * rows <= most),
        key=lambda layout: layout[0] * layout[1],
    )


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image that a model takes: see `PromptImage`."""

    digest: str
    grid: tuple[int, int, int]
    tokens: int


class ImageReader:
    """Reads the images of prompts. None is decoded twice while its hash is known."""

    def __init__(self, rule: ImageRule) -> None:
        self.rule = rule
        self._by_url: LRUCache[str, _Known] = LRUCache(CACHED_CHARACTERS, getsizeof=lambda known: known.characters)
        self._by_hash: LRUCache[bytes, _Known] = LRUCache(CACHED_IMAGES)
        self._lock = Lock()  # long prompts are made in threads

    def read(self, url: str) -> ReadImage:
        """The image of a data URL. Raises `InvalidRequest` for another URL, or a file that is no image."""
        with self._lock:
            known = self._by_url.get(url)
        if known is None:
            known = self._by_its_hash(url)
            if len(url) < CACHED_CHARACTERS // 4:
                with self._lock:
                    self._by_url[url] = known
        if known.image is None:
            raise InvalidRequest(known.problem)
        return known.image

    def expanded(
        self, ids: list[int], images: Sequence[ReadImage], offset: int = 0
    ) -> tuple[list[int], tuple[PromptImage, ...]] | None:
        """`ids` with the placeholders of each image in the place of the one that the template wrote, and the images'
        places if the first id is token `offset`. None if the template wrote another number.
        """
        token = self.rule.token
        whole: list[int] = []
        placed: list[PromptImage] = []
        start = 0
        for image in images:
            try:
                at = ids.index(token, start)
            except ValueError:
                return None
            whole += [*ids[start:at], *self.rule.before]
            first = offset + len(whole)
            whole += [*[token] * image.tokens, *self.rule.after]
            placed.append(PromptImage(first, first + image.tokens, image.grid, image.digest))
            start = at + 1
        rest = ids[start:]
        return None if token in rest else ([*whole, *rest], tuple(placed))

    def located(self, ids: Sequence[int], images: Sequence[ReadImage]) -> tuple[PromptImage, ...] | None:
        """The images' places in a prompt that an upstream has made; None if it does not hold exactly these."""
        token, placed, at = self.rule.token, list[PromptImage](), 0
        for image in images:
            while at < len(ids) and ids[at] != token:
                at += 1
            end = at
            while end < len(ids) and ids[end] == token:
                end += 1
            if end - at != image.tokens:
                return None
            placed.append(PromptImage(at, end, image.grid, image.digest))
            at = end
        return None if token in ids[at:] else tuple(placed)

    def _by_its_hash(self, url: str) -> _Known:
        digest = hashlib.sha256(url.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            known = self._by_hash.get(digest)
        if known is None:
            try:
                known = _Known(len(url), self._measured(url))
            except InvalidRequest as error:
                known = _Known(len(url), None, error.message)
            with self._lock:
                self._by_hash[digest] = known
        return known

    def _measured(self, url: str) -> ReadImage:
        data = file_of(url)
        with opened(data) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise InvalidRequest(f"an image has {width} x {height} pixels; at most {MOST_PIXELS} are read")
            try:
                image.load()  # an engine would refuse a damaged file after the call is on record
                is_sideways = image.getexif().get(ORIENTATION, 1) >= SIDEWAYS
            except Exception as error:  # whatever a decoder raises
                raise InvalidRequest(f"an image is damaged: {error}") from error
        grid = self.rule.grid(height, width) if is_sideways else self.rule.grid(width, height)
        return ReadImage(hashlib.sha256(data).hexdigest(), grid, self.rule.tokens(grid))


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a URL of so many characters: its image, or why it is none."""

    characters: int
    image: ReadImage | None
    problem: str = ""


def file_of(url: str) -> bytes:
    """The bytes of a data URL. Raises `InvalidRequest` for another URL."""
    head, comma, data = url.partition(",")
    if not comma or not head.lower().startswith("data:"):
        raise InvalidRequest("this policy takes images as data URLs only: data:image/png;base64,...")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"an image is not base64: {error}") from error


def opened(data: bytes) -> Any:
    """Pillow's image of a file, not decoded yet. Raises `InvalidRequest` if it is no image of a known format."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `MOST_PIXELS` is lower
            return Image.open(io.BytesIO(data), formats=FORMATS)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise InvalidRequest(f"an image can't be read as {', '.join(FORMATS)}: {error}") from error


def pixels_of(data: bytes) -> Any:
    """Pillow's image of a file as engines read it: turned upright, what is transparent white, in RGB."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(opened(data))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        shown = image.convert("RGBA")
        image = Image.new("RGB", shown.size, (255, 255, 255))
        image.paste(shown, mask=shown.getchannel("A"))
    return image.convert("RGB")


def unknown_processor(folder: Path) -> str:
    """Why images of the model in `folder` can't be shown, if it has an image processor; empty if it has none."""
    name = _processor_class(folder) or _processor(folder).get("image_processor_type")
    return f"rolltap does not know how many tokens {name} puts for an image" if name else ""


def lacks_pillow() -> str:
    """What to install before images can be read; empty if they can."""
    if find_spec("PIL") is not None:
        return ""
    return f"images need Pillow: {install_line('images')}"


SETTINGS = ("preprocessor_config.json", "processor_config.json")


def _processor(folder: Path) -> dict[str, Any]:
    """The image processor's settings; empty if the folder has none."""
    for name in SETTINGS:
        if (folder / name).is_file():
            settings = _read(folder / name)
            return settings.get("image_processor", settings)
    return {}


def _processor_class(folder: Path) -> str:
    names = (_read(folder / name).get("processor_class") for name in SETTINGS if (folder / name).is_file())
    return next((name for name in names if name), "")


def _added_tokens(folder: Path) -> dict[str, int]:
    return {token["content"]: token["id"] for token in _read(folder / "tokenizer.json").get("added_tokens") or ()}


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in a file; `ConfigError` if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{str(path)!r} holds no JSON object")
    return value
