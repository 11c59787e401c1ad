"""Run in an environment with verifiers: its own reader of saved runs, and what a trainer gets of a trace's branches."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .dataset_world import conversation, exported, world_in


def episodes(out: Path) -> Any:
    from verifiers.v1.trace import WireTrace  # type: ignore[import-not-found]
    from verifiers.v1.utils.trace_store import TRACES_FILE, read_episodes  # type: ignore[import-not-found]

    (file,) = out.glob("train-*.jsonl")
    file.rename(out / TRACES_FILE)
    return read_episodes(out, WireTrace)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        world = world_in(Path(name) / "model")
        items = [conversation(world, f"s{i}", think=True, cut=i == 1) for i in range(3)]
        items += [world.with_subagent("forked").item(reward=0.5, task="forked")]
        exported(Path(name) / "out", "verifiers", items)
        branches = tokens = 0
        for episode, item in zip(episodes(Path(name) / "out"), items, strict=True):
            (trace,) = episode.traces
            assert (episode.ok, episode.group.id, trace.reward) == (True, item.group_id, item.reward)
            assert trace.num_turns == len(trace.calls) == sum(len(row.turns) for row in item.rows)
            assert [tool.name for tool in trace.tools] == ["bash", "read"]
            for branch, row in zip(trace.branches, item.rows, strict=True):
                assert branch.trainable
                assert branch.token_ids == row.token_ids.tolist()
                assert branch.sampled_mask == row.loss_mask.tolist()
                assert np.array_equal(np.asarray(branch.logprobs, np.float32), row.logprobs)
                texts = item.texts[row.turns[-1].call_id].conversation
                assert [message.role for message in branch.messages] == [message["role"] for message in texts]
                branches += 1
                tokens += sum(branch.sampled_mask)
        sampled = sum(int(row.loss_mask.sum()) for item in items for row in item.rows)
        assert tokens == sampled
    sys.stdout.write(f"{len(items)} episodes, {branches} branches with our ids, masks and log-probs\n")


if __name__ == "__main__":
    main()
