"""How fast token formats are written, and in what memory: `python -m tests.bench.bench_export [TOKENS]` (10 million).

Sessions of 20 calls that grow to 20,480 tokens each are made one at a time and written as Parquet by the pass that
`rolltap export` makes; reading the record is not in the figures (`bench_reconstruct` has it). CPU time of one process.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.base import CallText, ExportItem
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.types import Call, Session, VersionSpan

CALLS = 20
PROMPT, OUTPUT = 512, 512
FORMATS = ("sft-tokens", "trajectories", "transitions")


def session(number: int, rng: np.random.Generator) -> ExportItem:
    """One conversation, each call the one before it and 1,024 tokens more."""
    context = np.empty(0, np.int32)
    calls, texts, messages = {}, {}, []
    for index in range(CALLS):
        call_id = f"s{number:06d}-{index:03d}"
        prompt = np.concatenate([context, rng.integers(0, 150_000, PROMPT, np.int32)])
        output = rng.integers(0, 150_000, OUTPUT, np.int32)
        calls[call_id] = Call(
            call_id, f"s{number:06d}", prompt, output, -rng.random(OUTPUT, np.float32), (VersionSpan(0, 0, OUTPUT),),
            parent_id=f"s{number:06d}-{index - 1:03d}" if index else None, shared=len(context), delivered=True,
        )  # fmt: skip
        messages = [*messages, {"role": "user", "content": f"step {index} of {number} " + "word " * PROMPT}]
        reply = {"role": "assistant", "content": "word " * OUTPUT}
        texts[call_id] = CallText(messages, reply)
        messages = [*messages, reply]
        context = np.concatenate([prompt, output])
    opened = Session(f"s{number:06d}", "tiny", "", 0.0, 0.0)
    return ExportItem(opened, reconstruct(list(calls.values())), calls, texts)


def peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def measure(format: str, tokens: int, folder: Path) -> list[str]:
    """The row of one format: tokens of sessions a CPU second, and peak memory half way and at the end."""
    rng = np.random.default_rng(0)
    count = max(tokens // (CALLS * (PROMPT + OUTPUT)), 2)
    seconds, half = 0.0, 0
    with DatasetWriter(folder / format, exporter_named(format), Query()) as writer:
        for number in range(count):
            item = session(number, rng)
            start = time.process_time()
            writer.add([item])
            seconds += time.process_time() - start
            half = peak_mb() if number == count // 2 else half
        start = time.process_time()
        writer.finish()
        seconds += time.process_time() - start
    written = count * CALLS * (PROMPT + OUTPUT)
    return [format, f"{written:,}", f"{written / seconds / 1e6:.2f}", f"{half}", f"{peak_mb()}"]


def main() -> None:
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    table = Table("format", "tokens", "M tokens/s a core", "peak MB half way", "at the end")
    with tempfile.TemporaryDirectory() as folder:
        for format in FORMATS:
            table.add_row(*measure(format, tokens if format != "transitions" else tokens // 10, Path(folder)))
    Console().print(table)


if __name__ == "__main__":
    main()
