"""The time of a call in a deep chain: `python -m tests.bench.bench_continuation`. Writes reports/continuation.json.

One session of 2,000 tool calls through the whole gateway (OpenAI chat, streamed), with a log in memory behind it and an
engine in the same process that says what it is told. The engine is sent its prompt in vLLM's JSON and says it back, as
vLLM does. Each request repeats its history as a harness does, with the calls' arguments serialised in its own way. What
grows with the history should be the bytes that are read and sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rolltap.engine.tiny import FOLDER
from rolltap.proxy.engines.base import SampleRequest, Take
from rolltap.proxy.engines.http import encoder
from rolltap.proxy.engines.vllm_wire import CompletionOutput
from rolltap.settings import LimitSettings
from rolltap.tokenizer import HubTokenizer
from tests.unit.proxy.conftest import Plane, ToldEngine, make_plane

ROOT = Path(__file__).parents[2]
MARKS = (10, 500, 2000)
AROUND = 10
"""A figure is the median of the calls up to this many before and after the mark."""

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Timed:
    """One call: its prompt in tokens, its request in bytes, and how long it took, by the clock and of processors."""

    prompt_tokens: int
    body_bytes: int
    seconds: float
    cpu_seconds: float


class ToldInJson(ToldEngine):
    """An engine whose client writes and reads vLLM's JSON; what a server would do with it is left out."""

    async def sample(self, request: SampleRequest, take: Take) -> None:
        output = CompletionOutput("told", request)
        sent = encoder.encode(output.body())
        prompt = sent[(at := sent.index(b'"prompt":') + 9) : sent.index(b"]", at) + 1]
        (event,) = CompletionOutput.read_events([b'{"choices":[{"token_ids":[],"prompt_token_ids":%b}]}' % prompt])
        for chunk in output.take(event):
            take(chunk)
        await super().sample(request, take)


class Chain:
    """A harness that calls a tool at every turn."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._messages = [
            _encoded({"role": "system", "content": "You fix bugs."}),
            _encoded({"role": "user", "content": "fix it"}),
        ]

    async def turn(self, number: int) -> Timed:
        said = f'<tool_call>\n{{"name":  "bash", "arguments": {{"command": "sed -n {number}p x.py"}}}}\n</tool_call>'
        self._plane.engine.replies = [said + "<|im_end|>"]
        history = b",".join(self._messages)
        body = b'{"model":"tiny","stream":true,"tools":[%b],"messages":[%b]}' % (_encoded(BASH), history)
        start, cpu_start = time.perf_counter(), time.process_time()
        answer = await self._plane.client.post("/v1/chat/completions", body)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        function = {"name": "bash", "arguments": f'{{"command":"sed -n {number}p x.py"}}'}
        id = _call_id(answer.body)
        self._messages += [
            _encoded({"role": "assistant", "tool_calls": [{"id": id, "type": "function", "function": function}]}),
            _encoded({"role": "tool", "tool_call_id": id, "content": f"line {number} of the file"}),
        ]
        return Timed(len(self._plane.engine.seen.pop().prompt_ids), len(body), seconds, cpu_seconds)


async def deep_chain(turns: int) -> list[Timed]:
    """Every call of a chain, each of which continues the one before it."""
    plane = await make_plane(HubTokenizer(FOLDER), LimitSettings())
    plane.policy.source.engine = plane.engine = ToldInJson(plane.engine.tokenizer)
    plane.policy.source.max_context = 1 << 20
    chain = Chain(plane)
    calls = [await chain.turn(number) for number in range(turns)]
    breaks = [row.intent.break_ for row in await plane.rows()]
    assert breaks == [None] * turns
    return calls


def _call_id(stream: bytes) -> str:
    """The id of the one tool call of a streamed reply."""
    for line in stream.splitlines():
        if line.startswith(b"data: {"):
            for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                for call in choice["delta"].get("tool_calls", ()):
                    if call.get("id"):
                        return call["id"]
    raise SystemExit(f"no tool call in {stream!r}")


def _encoded(value: object) -> bytes:
    return json.dumps(value).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=MARKS[-1])
    options = parser.parse_args()
    calls = asyncio.run(deep_chain(options.turns + AROUND))
    table = Table(
        "turn", "prompt tokens", "request, kB", "a call, ms", "of which CPU, ms", title="A chain of tool calls"
    )
    rows = []
    for mark in (mark for mark in MARKS if mark <= options.turns):
        at = calls[mark - 1]
        around = calls[max(0, mark - AROUND) : mark + AROUND]
        seconds = statistics.median(call.seconds for call in around)
        cpu_seconds = statistics.median(call.cpu_seconds for call in around)
        rows.append({"turn": mark, **asdict(at), "seconds": round(seconds, 6), "cpu_seconds": round(cpu_seconds, 6)})
        sizes = f"{at.prompt_tokens:,}", f"{at.body_bytes / 1000:,.0f}"
        table.add_row(str(mark), *sizes, f"{1000 * seconds:.1f}", f"{1000 * cpu_seconds:.1f}")
    Console().print(table)
    report = {"rows": rows, "cores": os.cpu_count(), "python": sys.version.split()[0]}
    (ROOT / "reports").mkdir(exist_ok=True)
    (ROOT / "reports" / "continuation.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
