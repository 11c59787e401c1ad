"""Leased rows in the form that verl's agent loops put into TransferQueue: keys, fields and tags."""

# pyright: reportMissingImports=false
# Only users of this adapter have the package.

from __future__ import annotations

from typing import Any

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from rolltap.contract.trainer import LeasedGroup
from rolltap.trainer_client.adapters.rows import TrainedRow
from rolltap.types import NO_VERSION


def rows_of_queue(
    groups: tuple[LeasedGroup, ...], rows: list[TrainedRow], step: int, version: int
) -> tuple[list[str], list[dict[str, Any]], list[dict[str, Any]]]:
    """Keys, fields and tags of the rows, in the form of verl's agent loops. `version`: at the step's start."""
    numbers = {group.group.id: number for number, group in enumerate(groups)}
    rewards = {record.rollout.id: record.reward or 0.0 for group in groups for record in group.rollouts}
    sessions: dict[str, int] = {}
    keys, fields, tags = [], [], []
    for index, row in enumerate(rows):
        session = sessions.setdefault(row.rollout, len(sessions))
        uid = f"step{step}group{numbers[row.group]}"
        field, tag = _field_and_tag(row, rewards[row.rollout], step, version)
        keys.append(f"{uid}_{session}_{index}")
        fields.append({**field, "uid": uid, "session_id": session, "global_steps": step})
        tags.append(tag)
    return keys, fields, tags


def _field_and_tag(row: TrainedRow, reward: float, step: int, version: int) -> tuple[dict[str, Any], dict[str, Any]]:
    part, prompt = row.segment, row.segment.prompt_length
    trained = part.versions[part.loss_mask & (part.versions != NO_VERSION)]
    staleness = [version - int(one) for one in ((trained.min(), trained.max()) if len(trained) else (version, version))]
    steps = {"min_global_steps": step - 1 - staleness[0], "max_global_steps": step - 1 - staleness[1]}
    output = AgentLoopOutput(
        prompt_ids=part.token_ids[:prompt].tolist(),
        response_ids=part.token_ids[prompt:].tolist(),
        response_mask=part.loss_mask[prompt:].astype(int).tolist(),
        response_logprobs=part.logprobs[prompt:].tolist(),
        reward_score=reward,
        num_turns=len(part.turns),
        metrics=AgentLoopMetrics(),
        extra_fields=steps,
    )
    field = output.as_dict()
    advantages = field["response_mask"] * torch.tensor(row.advantage, dtype=torch.float32)
    ids = torch.from_numpy(part.token_ids).long()
    field |= {"loss_mask": field["response_mask"], "input_ids": ids, "position_ids": torch.arange(len(ids))}
    field |= {"advantages": advantages, "returns": advantages, "multi_modal_inputs": {}}
    lengths = {"prompt_len": prompt, "response_len": len(ids) - prompt, "seq_len": len(ids)}
    return field, {"status": "success", "global_steps": step, **lengths, **steps}
