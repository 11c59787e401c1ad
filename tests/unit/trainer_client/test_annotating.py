"""Our trainer's annotations: of its own arrays, on the calls that sampled the tokens, only where it is asked to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rolltap.contract.trainer import LeasedGroup
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.run.loop import Trainer
from rolltap.trainer_client.run.sinks import JsonLines
from rolltap.trainer_client.settings import load_trainer_settings
from rolltap.types import CallSpan, Segment

from .making import model_folder, random_group
from .plane import KEY, Plane


def with_calls(group: LeasedGroup) -> LeasedGroup:
    """Each rollout's segment is of two calls: the first one's last token is masked."""

    def of_two(name: str, segment: Segment) -> Segment:
        mask = segment.loss_mask.copy()
        middle = (20 + len(segment)) // 2
        mask[middle - 1] = False
        spans = ((20, middle), (middle, len(segment)))
        calls = tuple(CallSpan(f"{name}-{i}", *span, trained=True, index=i) for i, span in enumerate(spans))
        logprobs, versions = np.where(mask, segment.logprobs, 0), np.where(mask, segment.versions, -1)
        return Segment(segment.token_ids, mask, logprobs.astype(np.float32), versions.astype(np.int32), calls)

    records = []
    for record in group.rollouts:
        segments = tuple(of_two(record.rollout.id, segment) for segment in record.trajectory.segments)
        records.append(replace(record, trajectory=replace(record.trajectory, segments=segments)))
    return replace(group, rollouts=tuple(records))


@pytest.mark.parametrize("annotate", [True, False])
def test_a_step_annotates_the_calls_that_it_trained(plane: Plane, url: str, tmp_path: Path, annotate: bool) -> None:
    groups = [with_calls(random_group(f"g{index}", [1.0, 0.0, 0.5], seed=index)) for index in range(2)]
    plane.offer(*groups)
    settings = load_trainer_settings(
        url=url, key=KEY, policy="policy", model=model_folder(tmp_path / "model"), out=tmp_path / "out", groups=2,
        steps=1, compute={"device": "cpu"}, report={"annotate": annotate},
    )  # fmt: skip
    client = TrainerClient(url, KEY, "trainer", patience=2)
    Trainer(settings, client, Ranks(0, 1, torch.device("cpu")), [JsonLines(settings.out, "project", "run")]).run()
    posted = [body for name, body in plane.calls if name == "annotations"]
    if not annotate:
        assert posted == []
        return
    assert plane.names().index("ack") < plane.names().index("annotations") < plane.names().index("push")
    calls = {call["call_id"]: call for body in posted for call in body["calls"]}
    assert {body["version"] for body in posted} == {0}
    spans = {
        span.call_id: (segment, span)
        for group in groups
        for record in group.rollouts
        for segment in record.trajectory.segments
        for span in segment.turns
    }
    assert calls
    assert calls.keys() <= spans.keys()
    drift = []
    for call_id, call in calls.items():
        segment, span = spans[call_id]
        mask = segment.loss_mask[span.start : span.end].tolist()
        for name in ("logprobs", "entropy", "clipped"):
            assert [value is not None for value in call[name]] == mask, "blank where it is masked, a value elsewhere"
        engine = segment.logprobs[span.start : span.end].tolist()
        drift += [abs(mine - its) for mine, its in zip(call["logprobs"], engine, strict=True) if mine is not None]
    (line,) = [json.loads(line) for line in (settings.out / "metrics.jsonl").read_text().splitlines()]
    assert np.mean(drift) == pytest.approx(line["mismatch_mean"], abs=1e-4), "the trainer's own figure"
