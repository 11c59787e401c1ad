"""The consumers of datasets: the layout that each one takes, and the oldest release of `datasets` that reads a file.

`datasets` before 4.7 has one type for each column. So it gives every object all names of the others, as nulls, or fails
where one name has two types; and it knows no Arrow column of JSON. From 4.7 on it reads a file of JSON Lines with such
objects with ten decimals. A text is read exactly by all releases from 4.0 on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters.base import Container, Exporter
from rolltap.reconstructor.exporters.writers import OBJECT_MESSAGES
from rolltap.wording import did_you_mean

ANY_TEXT, ANY_JSON = "4.0", "4.7"

OBJECTS_IN_JSONL = frozenset({"transitions", "atif", "harbor", "verifiers", "nemo-gym", "skyrl-rl"})
"""Formats whose rows hold objects of no common type in JSON Lines."""


OBJECT, TEXT = {"arguments": "object"}, {"arguments": "text"}

NEEDS_A_READER = frozenset({"sft", "preference", "kto"})
"""Formats of messages with tool calls, whose arguments no one form suits all: a chat template that takes objects fails
on a text or encodes it twice, and `datasets` before 4.7 invents nulls in objects. So nobody gets either by default."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """A trainer's layouts: the formats that it reads, the first one its own, each with its options.

    `setting` is what it must be told.
    """

    formats: Mapping[str, Mapping[str, str]]
    container: Container | None = None
    setting: str = ""


CONSUMERS: Mapping[str, Consumer] = {
    "axolotl": Consumer({"sft": TEXT}, setting="type: chat_template, message_field_training: weight"),
    "datasets-4.0": Consumer({"sft": TEXT, "preference": TEXT, "kto": TEXT}),
    "llama-factory": Consumer(
        {"sharegpt": {}}, setting="formatting: sharegpt, columns messages: conversations, system, tools"
    ),
    "ms-swift": Consumer({"sft": {**TEXT, "mark": "loss", "reasoning": "tags"}}),
    "trl": Consumer({"sft": {**OBJECT, "targets": "split"}, "preference": OBJECT, "kto": OBJECT}),
    "unsloth": Consumer({"sft": {**TEXT, "targets": "split"}, "preference": TEXT, "kto": TEXT}),
    "verl": Consumer({"sft": OBJECT}, container="parquet", setting="data.custom_cls.name=RecordedMessagesDataset"),
}


def consumer_named(name: str) -> Consumer:
    if name not in CONSUMERS:
        raise DatasetError(f"--for: no consumer {name!r}; known: {', '.join(CONSUMERS)}{did_you_mean(name, CONSUMERS)}")
    return CONSUMERS[name]


def layout(format: str, consumer: str, options: Mapping[str, str]) -> tuple[str, dict[str, str], Container | None]:
    """The format, its options and the container that `consumer` reads; "" stands for its own format, or for none.

    `DatasetError` for a format that the consumer does not read, and for one of `NEEDS_A_READER` that names neither a
    consumer nor the form of arguments.
    """
    if consumer:
        reader = consumer_named(consumer)
        chosen = format or next(iter(reader.formats))
        if chosen not in reader.formats:
            raise DatasetError(f"--for {consumer} reads {', '.join(reader.formats)}, not {chosen}")
        return chosen, {**reader.formats[chosen], **options}, reader.container
    if format in NEEDS_A_READER and "arguments" not in options:
        readers = ", ".join(name for name, one in CONSUMERS.items() if format in one.formats)
        raise DatasetError(
            f"--format {format}: who reads the files? Tool calls have no form that suits all: name one of "
            f"--for {readers}; or --option arguments=object (datasets 4.7 and later, chat templates) or arguments=text"
        )
    return format or "trajectories", dict(options), None


def layouts(formats: Iterable[str]) -> list[str]:
    """What a browser chooses from: the formats, one that needs a reader once for each: `sft for trl`."""
    readers = {name: [reader for reader, one in CONSUMERS.items() if name in one.formats] for name in NEEDS_A_READER}
    return [
        choice
        for name in formats
        for choice in ([f"{name} for {one}" for one in readers[name]] if name in readers else [name])
    ]


def least_datasets(exporter: Exporter, container: Container) -> str:
    """The least release of `datasets` that reads the files as they were written."""
    in_lines = container == "jsonl" and exporter.name in OBJECTS_IN_JSONL
    return ANY_JSON if in_lines or OBJECT_MESSAGES & set(exporter.schema().values()) else ANY_TEXT
