"""Planning time in a deep chain: `python -m tests.bench.bench_continuation`. Writes reports/continuation.json.

One session of 2,000 tool calls. Each request repeats its history as the dialects hand it out: the same message objects
and one assistant turn that the harness has serialised its own way. A turn's work must not grow with the turns before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rolltap.engine.tiny import FOLDER
from rolltap.ids import new_id
from rolltap.proxy.chat import ChatRequest, Message, Text, Tool, ToolCall
from rolltap.proxy.continuation.canonical import DigestCache
from rolltap.proxy.continuation.forest import Forest, Node
from rolltap.proxy.continuation.handles import Handles
from rolltap.proxy.continuation.plan import Continuation
from rolltap.proxy.continuation.rendering import FamilyRenderer
from rolltap.proxy.continuation.tokenizer import HubTokenizer
from rolltap.types import Outcome

ROOT = Path(__file__).parents[2]
MARKS = (10, 100, 1000, 2000)
AROUND = 10
"""A figure is the median of the calls up to this many before the mark."""

BASH = Tool("bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})


def deep_chain(turns: int) -> tuple[list[float], list[int], Forest]:
    """Planning time in seconds and prompt length of each call, and the session's forest."""
    renderer = FamilyRenderer("qwen3", HubTokenizer(FOLDER))
    continuation = Continuation("policy", renderer, Handles(b"continuation-bench"), "tool_cycle")
    forest = Forest(DigestCache())
    history: tuple[Message, ...] = (Message("system", (Text("You fix bugs."),)), Message("user", (Text("fix it"),)))
    items = tuple(str(message).encode() for message in history)
    seconds, lengths = [], []
    for turn in range(turns):
        request = ChatRequest("bench", "policy", history, (BASH,), items=items)
        call_id = new_id()
        start = time.perf_counter()
        plan = continuation.plan(call_id, forest, request, thinking=True)
        node = Node(call_id, plan.parent, plan.lineage, plan.prompt_ids, plan.shared, items=items)
        forest.add(node)
        seconds.append(time.perf_counter() - start)
        lengths.append(len(plan.prompt_ids))
        assert plan.break_ is None
        said = f'<tool_call>\n{{"name":  "bash", "arguments": {{"command": "sed -n {turn}p x.py"}}}}\n</tool_call>'
        ids = renderer.tokenizer.encode(said + "<|im_end|>")
        reply = Message("assistant", (), (ToolCall("id", "bash", f'{{"command": "sed -n {turn}p x.py"}}'),))
        forest.complete(node, np.asarray(ids, np.int32), reply, Outcome.COMPLETED)
        echo = Message("assistant", (), (ToolCall("id", "bash", f'{{"command":"sed -n {turn}p x.py"}}'),))
        new = (echo, Message("tool", (Text(f"line {turn} of the file"),), tool_call_id="id"))
        history, items = history + new, items + tuple(str(message).encode() for message in new)
    return seconds, lengths, forest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=MARKS[-1])
    options = parser.parse_args()
    seconds, lengths, forest = deep_chain(options.turns)
    table = Table("turn", "prompt tokens", "planning, ms", title="A chain of tool calls")
    rows = []
    for mark in (mark for mark in MARKS if mark <= options.turns):
        median = statistics.median(seconds[max(0, mark - AROUND) : mark])
        rows.append({"turn": mark, "prompt_tokens": lengths[mark - 1], "planning_ms": round(1000 * median, 3)})
        table.add_row(str(mark), str(lengths[mark - 1]), f"{1000 * median:.2f}")
    Console().print(table)
    held = sum(node.held for node in forest.nodes.values())
    print(f"the forest holds {held} token ids for a last prompt of {lengths[-1]}")
    report = {"rows": rows, "held_ids": held, "cores": os.cpu_count(), "python": sys.version.split()[0]}
    (ROOT / "reports").mkdir(exist_ok=True)
    (ROOT / "reports" / "continuation.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
