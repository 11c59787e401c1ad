"""Who reads the files: the layout that each consumer takes, and the least release of `datasets` that reads a file.

`datasets` before 4.8 has one type for each column. So it gives every object all names of the others, as nulls, or fails
where one name has two types; and it knows no Arrow column of JSON. A text is read exactly by all releases from 4.0 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters.base import Container, Exporter

ANY_TEXT, ANY_JSON = "4.0", "4.8"

OBJECTS_IN_JSONL = frozenset({"trajectories", "transitions", "atif", "harbor", "verifiers", "nemo-gym", "skyrl-rl"})
"""Formats whose rows hold objects of no common type in JSON Lines."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """A trainer's layout: the format, its options and the container. `setting` is what it must be told."""

    format: str
    options: Mapping[str, str] = field(default_factory=dict)
    container: Container | None = None
    setting: str = ""


CONSUMERS: Mapping[str, Consumer] = {
    "axolotl": Consumer("sft", {"arguments": "text"}, setting="type: chat_template, message_field_training: weight"),
    "datasets-4.0": Consumer("sft", {"arguments": "text"}),
    "llama-factory": Consumer(
        "sharegpt", setting="formatting: sharegpt, columns messages: conversations, system, tools"
    ),
    "ms-swift": Consumer("sft", {"arguments": "text", "mark": "loss"}),
    "trl": Consumer("sft", {"targets": "split"}),
    "unsloth": Consumer("sft", {"arguments": "text", "targets": "split"}),
    "verl": Consumer("sft", container="parquet", setting="data.custom_cls.name=RecordedMessagesDataset"),
}


def consumer_named(name: str) -> Consumer:
    if name not in CONSUMERS:
        raise DatasetError(f"--for: no consumer {name!r}; known: {', '.join(CONSUMERS)}")
    return CONSUMERS[name]


def least_datasets(exporter: Exporter, container: Container) -> str:
    """The least release of `datasets` that reads the files as they were written."""
    in_lines = container == "jsonl" and exporter.name in OBJECTS_IN_JSONL
    return ANY_JSON if in_lines or "messages" in exporter.schema().values() else ANY_TEXT
