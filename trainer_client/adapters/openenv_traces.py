"""A rollout as OpenEnv's `TrainingTrace`: a turn for each run of trained tokens, with the tokens before it as prompt.

`openenv_sessions` imports it after its check that OpenEnv is installed.
"""

# pyright: reportMissingImports=false
# Only users of this adapter have the package.

from __future__ import annotations

from collections.abc import Iterator

from openenv.core.harness import TrainingTrace, TrainingTurn

from rolltap.contract.trainer import RolloutRecord
from rolltap.errors import ConfigError
from rolltap.trainer_client.adapters.rows import trained_runs
from rolltap.types import NO_VERSION, Scoring


def trace_of(record: RolloutRecord) -> TrainingTrace:
    """The rollout's trained tokens as OpenEnv's `TrainingTrace`, without turns if it must not be trained."""
    if any(segment.images for segment in record.trajectory.segments):
        raise ConfigError(f"the prompts of rollout {record.rollout.id} show images, which OpenEnv's traces have not")
    return TrainingTrace(turns=list(_turns(record)) if record.rollout.scoring is Scoring.SCORED else [])


def _turns(record: RolloutRecord) -> Iterator[TrainingTurn]:
    for number, part in enumerate(record.trajectory.segments):
        for begin, end in trained_runs(part):
            versions = part.versions[begin:end]
            yield TrainingTurn(
                node_id=f"{record.rollout.id}-{number}-{begin}",
                prompt_token_ids=part.token_ids[:begin].tolist(),
                completion_token_ids=part.token_ids[begin:end].tolist(),
                per_token_logps=part.logprobs[begin:end].tolist(),
                loss_mask=[0] * begin + [1] * (end - begin),
                metadata={"versions": sorted({int(one) for one in versions if one != NO_VERSION}), "agent": part.agent},
            )
