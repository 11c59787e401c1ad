"""How fast token formats are written, and in what memory: `python -m tests.bench.bench_export`.

Sessions of 20 calls that grow to 20,480 tokens each are made one at a time and written as Parquet by the pass that
`rolltap export` makes; reading the record is not in the figures (`bench_reconstruct` has it). CPU time of one process,
after its imports; each size has a process of its own, so that its peak memory is its own. Prints the table of
docs/exports.md.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.base import CallText, ExportItem
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.types import Call, Session, VersionSpan

CALLS = 20
PROMPT, OUTPUT = 512, 512
FORMATS = ("sft-tokens", "trajectories", "transitions", "harbor")
SIZES = (1_000_000, 10_000_000)


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


def write(format: str, tokens: int, folder: Path) -> tuple[int, float]:
    """The tokens of the sessions that were written, and the CPU seconds that it took."""
    rng = np.random.default_rng(0)
    count = max(tokens // (CALLS * (PROMPT + OUTPUT)), 1)
    seconds = 0.0
    with DatasetWriter(folder, exporter_named(format), Query()) as writer:
        for number in range(count):
            item = session(number, rng)
            start = time.process_time()
            writer.add([item])
            seconds += time.process_time() - start
        start = time.process_time()
        writer.finish()
    return count * CALLS * (PROMPT + OUTPUT), seconds + time.process_time() - start


def measure(format: str, tokens: int) -> None:
    """Prints tokens, CPU seconds and peak memory (MB) of one export, after a first one that imports what it needs."""
    with tempfile.TemporaryDirectory() as folder:
        write(format, 1, Path(folder) / "first")
        written, seconds = write(format, tokens, Path(folder) / "measured")
    print(written, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def main() -> None:
    table = Table("format", "tokens of sessions", "M tokens/s a core", "peak MB", box=MARKDOWN)
    for format in FORMATS:
        for tokens in SIZES:
            command = [sys.executable, "-m", "tests.bench.bench_export", format, str(tokens)]
            done = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            written, seconds, peak = int(done[0]), float(done[1]), done[2]
            table.add_row(format, f"{written:,}", f"{written / seconds / 1e6:.1f}", peak)
    Console().print(table)


if __name__ == "__main__":
    measure(sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 1 else main()
