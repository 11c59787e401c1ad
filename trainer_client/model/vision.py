"""Images of a batch as inputs of the text model's layers, for models of text and images.

An image's features replace the embeddings of its placeholders, at the places on record: a placeholder that the model
sampled itself is text, as it is for the engine. Pixels are the model folder's own image processor's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rolltap.errors import AlignmentError, ConfigError
from rolltap.images import pixels_of
from rolltap.trainer_client.data.collate import Batch

WITH_PLACES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
TILED = frozenset({"internvl"})
"""Families of models that are trained with images: those whose positions count places in an image, and those that cut
it into tiles."""


def sees(config: Any) -> bool:
    return config.model_type in WITH_PLACES | TILED


def has_places(config: Any) -> bool:
    """Whether its positions count frames, rows and columns of an image."""
    return config.model_type in WITH_PLACES


def load_processor(folder: Path) -> Any:
    """The image processor of a model's folder; `ConfigError` if it has none."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{folder}: its image processor can't be loaded: {str(error).splitlines()[0]}") from error


def inputs_with_images(model: Any, processor: Any, batch: Batch) -> dict[str, Any]:
    """What the text model's layers get instead of ids: embeddings [1, N, E], and features for its first layers where
    the family has them (Qwen3-VL)."""
    device = batch.token_ids_N.device
    embeddings_1NE = model.get_input_embeddings()(batch.token_ids_N.unsqueeze(0))
    if has_places(model.config):
        pixels, grids = zip(*(_pixels(processor, image.file, image.grid) for image in batch.images), strict=True)
        features = model.model.get_image_features(torch.cat(pixels).to(device), torch.cat(grids).to(device))
        embedded = features.pooler_output
    else:
        tiles = torch.cat([_tiles(processor, image.file, image.grid) for image in batch.images])
        features = model.model.get_image_features(tiles.to(device))
        embedded = list(features.pooler_output)
    places_V = torch.cat([torch.arange(image.start, image.start + image.tokens) for image in batch.images]).to(device)
    seen_VE = torch.cat(embedded).to(embeddings_1NE.dtype)
    inputs: dict[str, Any] = {"inputs_embeds": embeddings_1NE.index_copy(1, places_V, seen_VE.unsqueeze(0))}
    deeper = getattr(features, "deepstack_features", None)
    if deeper is not None:
        seen_N = torch.zeros_like(batch.token_ids_N, dtype=torch.bool).index_fill(0, places_V, True)
        inputs["visual_pos_masks"] = seen_N.unsqueeze(0)
        inputs["deepstack_visual_embeds"] = [torch.cat(list(layer)) for layer in deeper]
    return inputs


def _pixels(processor: Any, file: bytes, grid: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """The patches of an image's file and their grid [1, 3], which must be the recorded one."""
    inputs = processor(images=[pixels_of(file)], return_tensors="pt")
    _check(inputs["image_grid_thw"][0].tolist(), grid, "patches")
    return inputs["pixel_values"], inputs["image_grid_thw"]


def _tiles(processor: Any, file: bytes, grid: tuple[int, int, int]) -> Tensor:
    """The tiles of an image's file, which must be as many as on record."""
    inputs = processor(images=[pixels_of(file)], crop_to_patches=True, return_tensors="pt")
    _check([len(inputs["pixel_values"]), *grid[1:]], grid, "tiles")
    return inputs["pixel_values"]


def _check(own: list[int], grid: tuple[int, int, int], what: str) -> None:
    if tuple(own) != tuple(grid):
        raise AlignmentError(
            f"the model's image processor makes {own} {what} of an image, and {list(grid)} are on record: trainer and "
            "policy need the same preprocessor_config.json"
        )
