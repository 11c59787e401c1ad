"""Files of rows: JSON Lines, Parquet and slime's format, in shards of about the same size.

Some values make a whole file of JSON unreadable for `datasets`, or another file, so they are refused (`check_values`).
Seen in all releases from 4.0 to 5.2: whole numbers past 64 bits are read as floats or refused ("Value is too big!"),
objects nested deeper than Arrow's schemas are refused, and a name with a NUL ends before it. Texts may hold anything.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from zipfile import ZipFile, ZipInfo

import msgspec
import numpy as np

from rolltap.errors import DatasetError, RowError
from rolltap.extras import install_line
from rolltap.reconstructor.exporters.base import Container

if TYPE_CHECKING:
    import pyarrow as pa


FLUSH_BYTES = 16 << 20

IMAGES = "list<image>"
"""The column type of images' files."""

IMAGE_FEATURE = {"_type": "List", "feature": {"_type": "Image"}}
"""The type of such a column in Parquet, as `datasets` from 4.0 on writes it to a file's metadata."""

MEDIA_TYPES = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
"""By how a file begins."""

MESSAGES = ("messages", "messages_text", "messages_parts", "messages_text_parts")
OBJECT_MESSAGES = frozenset({"messages", "messages_parts"})
OBJECTS = (*OBJECT_MESSAGES, "inferred")
"""The column types whose values are objects to readers; a `json` column is a text."""


class RowFile(Protocol):
    """One shard while it is written."""

    size: int  # bytes so far, approximate
    rows: int

    def write(self, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...

    def drop(self) -> None:
        """Closes the file, which will be removed."""
        ...


class JsonlFile:
    """One JSON object per line. Arrays become lists, NaN becomes null, and a `json` column is a text as in Parquet."""

    def __init__(self, path: Path, schema: Mapping[str, str]) -> None:
        self._file = path.open("wb")
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        self._texts = [name for name, kind in schema.items() if kind == "json"]
        self._objects = [name for name, kind in schema.items() if kind in OBJECT_MESSAGES]
        self._images = [name for name, kind in schema.items() if kind == IMAGES]
        self.size = 0
        self.rows = 0

    def write(self, values: Mapping[str, Any]) -> None:
        texts = {name: self._encoder.encode(values[name]).decode() for name in self._texts if values[name] is not None}
        images = {name: [_data_url(file) for file in values[name]] for name in self._images}
        values = {**values, **texts, **images}
        line = self._encoder.encode(values)
        check_line(line, values)
        if self._objects and FINE.search(line):
            check_decimals({name: values.get(name) for name in self._objects})
        self._file.write(line)
        self._file.write(b"\n")
        self.size += len(line) + 1
        self.rows += 1

    def close(self) -> None:
        self._file.close()

    def drop(self) -> None:
        self._file.raw.close()


class ParquetFile:
    """Columns by `TYPES`. Rows wait in memory until they fill a row group (`FLUSH_BYTES`)."""

    def __init__(self, path: Path, schema: Mapping[str, str]) -> None:
        self._path = path
        self._types = schema
        self._inferred = "inferred" in schema.values()
        self._columns: dict[str, list[Any]] = {name: [] for name in schema}
        self._waiting = 0
        self._writer: Any = None
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        self.size = 0
        self.rows = 0

    def write(self, values: Mapping[str, Any]) -> None:
        if extra := values.keys() - self._types.keys():
            raise RowError(f"columns {', '.join(sorted(extra))} are not in the format's schema")
        check_values({name: values.get(name) for name, kind in self._types.items() if kind in OBJECTS})
        cells = {name: self._cell(kind, values.get(name)) for name, kind in self._types.items()}
        self._check(cells)
        for name, cell in cells.items():
            self._columns[name].append(cell)
        weight = _weight(values)
        self.size += weight
        self._waiting += weight
        self.rows += 1
        if self._waiting >= FLUSH_BYTES and not self._inferred:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def drop(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _cell(self, kind: str, value: Any) -> Any:
        if value is None:
            return None
        if kind == "json":
            return self._encoder.encode(value).decode()
        if kind in MESSAGES:
            encoded, parts = kind in OBJECT_MESSAGES, kind.endswith("_parts")
            return [_message_struct(message, encoded=encoded, parts=parts) for message in value]
        return [{"bytes": file, "path": None} for file in value] if kind == IMAGES else value

    def _check(self, cells: Mapping[str, Any]) -> None:
        """Raises `RowError` if a cell is not of its column's type, so that it can't fail a whole row group."""
        arrow = _arrow()
        for name, kind in self._types.items():
            if kind == "inferred" or isinstance(cells[name], np.ndarray):
                continue
            try:
                arrow.scalar(cells[name], type=_type(arrow, kind))
            except (arrow.ArrowException, TypeError, ValueError) as error:
                raise RowError(f"{name} is not a Parquet {kind}: {error}") from error

    def _flush(self) -> None:
        arrow = _arrow()
        try:
            arrays = [_column(arrow, self._columns[name], kind) for name, kind in self._types.items()]
        except (arrow.ArrowInvalid, arrow.ArrowTypeError) as error:
            raise DatasetError(
                f"these rows don't fit one Parquet type ({error}); narrow --where, or write --container jsonl"
            ) from error
        images = {name: IMAGE_FEATURE for name, kind in self._types.items() if kind == IMAGES}
        features = json.dumps({"info": {"features": images}})
        table = arrow.table(arrays, list(self._types), metadata={"huggingface": features} if images else None)
        if self._writer is None:
            from pyarrow.parquet import ParquetWriter

            # For tokens and log-probs a dictionary takes three times as long and saves only 4% of the size.
            plain = [name for name, kind in self._types.items() if kind == "string"]
            arrays = any(kind.startswith("list<") for kind in self._types.values())
            options: Any = {"use_dictionary": plain if arrays else True}
            self._writer = ParquetWriter(self._path, table.schema, compression="zstd", **options)
        self._writer.write_table(table)
        for column in self._columns.values():
            column.clear()
        self._waiting = 0


def _pickled(value: Any) -> bytes:
    """A value's pickle as part of another pickle: without the leading protocol and the trailing stop opcode."""
    return pickle.dumps(value, protocol=2)[2:-1]


class TorchFile:
    """slime's file of rollouts: the format of `torch.save({"rollout_id": 0, "samples": rows})`, written row by row.

    Arrays become lists. Does not need torch.
    """

    HEAD = pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.MARK + _pickled("rollout_id") + _pickled(0)
    SAMPLES = _pickled("samples") + pickle.EMPTY_LIST + pickle.MARK
    END = pickle.APPENDS + pickle.SETITEMS + pickle.STOP

    def __init__(self, path: Path, schema: Mapping[str, str]) -> None:
        self._archive = ZipFile(path, "w")
        self._rollouts = self._archive.open(ZipInfo("archive/data.pkl"), "w", force_zip64=True)
        self._rollouts.write(self.HEAD + self.SAMPLES)
        self.size = 0
        self.rows = 0

    def write(self, values: Mapping[str, Any]) -> None:
        row = _pickled(_lists(values))
        self._rollouts.write(row)
        self.size += len(row)
        self.rows += 1

    def close(self) -> None:
        self._rollouts.write(self.END)
        self._rollouts.close()
        for name, data in (("byteorder", b"little"), ("version", b"3\n")):
            self._archive.writestr(ZipInfo(f"archive/{name}"), data)
        self._archive.close()

    def drop(self) -> None:
        for part in (self._rollouts, self._archive):
            with suppress(OSError):  # closing writes, on a disk that may be full
                part.close()


FILES: Mapping[Container, Callable[[Path, Mapping[str, str]], RowFile]] = {
    "jsonl": JsonlFile,
    "parquet": ParquetFile,
    "pt": TorchFile,
}

TYPES = ("string", "int32", "int64", "float32", "float64", "bool", "json", *MESSAGES, IMAGES, "inferred")
"""Column types, and `list<...>` of the plain ones. `json` is an encoded text, `messages` a list of chat messages, whose
tool calls' arguments are Arrow's JSON, or texts in `messages_text`. `_parts`: contents are lists of parts."""


class Shards:
    """The files of one split: `<split>-00000-of-00002.<container>`, renamed when their number is known."""

    def __init__(self, folder: Path, split: str, container: Container, schema: Mapping[str, str], size: int) -> None:
        self._folder = folder
        self._split = split
        self._container: Container = container
        self._schema = schema
        self._size = size
        self._open: RowFile | None = None
        self._done: list[tuple[Path, int]] = []
        self._ended = 0

    @property
    def size(self) -> int:
        return self._ended + (self._open.size if self._open is not None else 0)

    def write(self, values: Mapping[str, Any]) -> None:
        if self._open is not None and self._open.size >= self._size:
            self._end()
        if self._open is None:
            self._open = FILES[self._container](self._part(), self._schema)
        self._open.write(values)

    def finish(self) -> list[dict[str, Any]]:
        """Closes and renames the files. Returns the manifest's entry for each."""
        if self._open is not None:
            self._end()
        named = []
        for index, (part, rows) in enumerate(self._done):
            path = part.with_name(f"{self._split}-{index:05d}-of-{len(self._done):05d}.{self._container}")
            part.rename(path)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = path.stat().st_size
            named.append({"path": path.name, "split": self._split, "rows": rows, "bytes": size, "sha256": digest})
        return named

    def drop(self) -> None:
        """Closes the open file."""
        if self._open is not None:
            self._open.drop()

    def _part(self) -> Path:
        return self._folder / f"{self._split}-{len(self._done):05d}.part"

    def _end(self) -> None:
        assert self._open is not None
        self._open.close()
        self._ended += self._open.size
        self._done.append((self._part(), self._open.rows))
        self._open = None


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns an `OSError` of the disk into a `DatasetError` of one line."""
    try:
        yield
    except OSError as error:
        raise DatasetError(f"can't write {folder}: {error.strerror or error}") from error


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise DatasetError(f"Parquet needs pyarrow: {install_line('export')}, or write --container jsonl") from None
    return pyarrow


def _lists(value: Any) -> Any:
    """A row's value without numpy types."""
    if isinstance(value, Mapping):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_lists(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float)) else _plain(value)


def _column(arrow: Any, values: list[Any], kind: str) -> pa.Array:
    if kind == "inferred":
        return arrow.array(values)
    if kind.startswith("list<") and values and all(isinstance(value, np.ndarray) for value in values):
        offsets = np.cumsum([0, *(len(value) for value in values)], dtype=np.int32)
        return arrow.ListArray.from_arrays(offsets, arrow.array(np.concatenate(values), _type(arrow, kind[5:-1])))
    column = arrow.array(values, type=_type(arrow, kind))
    return column.cast(_type(arrow, kind, arrow.json_())) if kind in OBJECT_MESSAGES else column


def _type(arrow: Any, kind: str, arguments: Any = None) -> Any:
    """`arguments` is the type of tool calls' arguments in messages, a text by default."""
    text = arrow.string()
    if kind == "image":
        return arrow.struct([("bytes", arrow.binary()), ("path", text)])
    if kind.startswith("list<"):
        return arrow.list_(_type(arrow, kind[5:-1]))
    if kind in MESSAGES:
        part = arrow.struct([("type", text), ("text", text)])
        return _messages_type(arrow, arguments or text, arrow.list_(part) if kind.endswith("_parts") else text)
    names = {"json": "string", "bool": "bool_"}
    return getattr(arrow, names.get(kind, kind))()


def _messages_type(arrow: Any, arguments: Any, content: Any) -> Any:
    """A list of chat messages. `arguments` and `content` are the types of a tool call's and of a message's."""
    text = arrow.string()
    function = arrow.struct([("name", text), ("arguments", arguments)])
    call = arrow.struct([("id", text), ("type", text), ("function", function)])
    plain = [(name, text) for name in ("reasoning_content", "name", "tool_call_id")]
    others = [("tool_calls", arrow.list_(call)), ("weight", arrow.int8())]
    return arrow.list_(arrow.struct([("role", text), ("content", content), *plain, *others]))


def _message_struct(message: Mapping[str, Any], *, encoded: bool, parts: bool) -> dict[str, Any]:
    """A message with its arguments `encoded` as JSON, spaced as in chat templates: also those that are a text, as
    readers decode Arrow's JSON type.

    Raises `RowError` for content with images: as a text it would be other words than the user's.
    """
    if "loss" in message:
        raise RowError("messages with `loss` don't fit Parquet; use --container jsonl")
    if not parts and not isinstance(message.get("content"), str | None):
        raise RowError("content with images does not fit Parquet; use --container jsonl")
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        arguments = json.dumps(arguments, ensure_ascii=False) if encoded else arguments
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls or None}


def _data_url(image: bytes) -> str:
    media = next((name for start, name in MEDIA_TYPES.items() if image.startswith(start)), "png")
    return f"data:image/{media};base64,{base64.b64encode(image).decode()}"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise RowError(f"a value of type {type(value).__name__} can't be written as JSON")


def _weight(value: Any) -> int:
    """The approximate size of a value in bytes."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_weight(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_weight(item) for item in value)
    return 8


LARGEST = 2**63 - 1
DEEPEST = 50
"""Levels of a row's value. Arrow's limit is 64, and the lists and structs of messages take some of them."""

SUSPECT = re.compile(rb"\d{19}|\\u0000")
"""In every line that holds a number of more than 63 bits or a NUL."""


def check_line(line: bytes, values: Mapping[str, Any]) -> None:
    """Raises `RowError` if readers can't hold the row `values`, which `line` encodes."""
    if SUSPECT.search(line) or line.count(b"{") + line.count(b"[") > DEEPEST:
        check_values(values)


def check_values(values: Mapping[str, Any]) -> None:
    """Raises `RowError` for the first value that readers can't hold, and says where it is."""
    for name, value in values.items():
        if (problem := next(_problems(value, 1), None)) is not None:
            raise RowError(f"{name} has {problem}, which readers of JSON can't hold; --option arguments=text writes it")


FINE = re.compile(rb"\.\d{11}|\de[-+]?\d")
"""In every line that holds a number of more than 10 decimals, also before an exponent."""


def check_decimals(values: Mapping[str, Any]) -> None:
    """Raises `RowError` for a number in objects of JSON Lines that `datasets` from 4.7 on would round: 1e-12 to 0.0."""
    waiting = list(values.values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, float) and float(f"{value:.10e}" if abs(value) >= 1e16 else f"{value:.10f}") != value:
            raise RowError(
                f"arguments have {value!r}, which datasets rounds to 10 decimals in JSON Lines; --container parquet or "
                "--option arguments=text writes it"
            )


def _problems(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, int) and not -LARGEST - 1 <= value <= LARGEST:
        yield "a number of more than 64 bits"
    elif isinstance(value, (Mapping, list, tuple)):
        if depth > DEEPEST:
            yield f"more than {DEEPEST} levels"
            return
        if isinstance(value, Mapping):
            if any("\0" in str(key) for key in value):
                yield "a name with a NUL"
            value = value.values()
        for part in value:
            yield from _problems(part, depth + 1)
