"""What is trained was sampled from the distribution that the trainer computes, whatever a harness asks for."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from rolltap.contract.trainer import LeasedGroup, LeaseOptions
from rolltap.demo.stack import Stack
from rolltap.engine.tiny import FOLDER
from rolltap.trainer_client.data.collate import collate
from rolltap.trainer_client.data.packing import Packer
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.model.network import PolicyNetwork, load_model

from ..unit.trainer_client.making import rows_of

TRAIN = ["tool_call_unparsable", "length_truncated"]
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {"pin": {"max_tokens": 24}, "train": TRAIN},
    "warm": {"pin": {"max_tokens": 24, "temperature": 0.6}, "train": TRAIN},
    "cut": {"pin": {"max_tokens": 24, "top_p": 0.8}, "train": TRAIN},
    "masked": {"pin": {"max_tokens": 24, "top_p": 0.8, "top_k": 5}, "train": TRAIN, "sampling_mask": 5},
    "narrow": {"pin": {"max_tokens": 24}, "train": TRAIN, "sampling": "harness", "sampling_mask": 5},
    "asked": {"pin": {"max_tokens": 24}, "train": TRAIN, "sampling": "harness"},
}

PACKED = Packer(4096, share=True)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("sampling"), FOLDER, POLICIES) as running:
        yield running


def played(stack: Stack, policy: str, *asked: dict[str, Any]) -> list[dict[str, int]]:
    """Plays a group of one rollout a call, with the sampling that its harness asks for: the masked calls of each."""
    masked: list[dict[str, int]] = []
    admin = httpx.Client(
        base_url=stack.admin_url, headers={"Authorization": f"Bearer {stack.keys['admin']}"}, timeout=30
    )
    with admin:
        task = {"id": "task", "instruction": "say something", "spec": {}, "tags": []}
        opened = admin.post("/groups", json={"policy": policy, "n": len(asked), "task": task}).raise_for_status().json()
        for number, (rollout, sampling) in enumerate(zip(opened["rollouts"], asked, strict=True)):
            started = admin.post(f"/rollouts/{rollout['id']}/start", json={}).raise_for_status().json()
            body = {"model": policy, "messages": [{"role": "user", "content": "List the files."}], **sampling}
            headers = {"Authorization": f"Bearer {started['key']}"}
            url = f"{started['base_url']}/v1/chat/completions"
            httpx.post(url, json=body, headers=headers, timeout=60).raise_for_status()
            admin.post("/rewards", json={"rollout_id": rollout["id"], "value": float(number)}).raise_for_status()
            ending = {"status": "succeeded", "attempt": started["attempt"]}
            admin.post(f"/rollouts/{rollout['id']}/finish", json=ending).raise_for_status()
            session = admin.get(f"/read/sessions/{started['session_id']}").raise_for_status().json()
            masked.append(session["report"]["masked_calls"])
    return masked


def leased(stack: Stack, policy: str, *asked: dict[str, Any]) -> LeasedGroup:
    """The group of `played`."""
    played(stack, policy, *asked)
    client = TrainerClient(stack.trainer_url, stack.keys["trainer"], "trainer", patience=5)
    lease = client.lease(policy, groups=1, options=LeaseOptions(wait=10))
    assert lease is not None
    return lease.groups[0]


def trained(group: LeasedGroup) -> list[bool]:
    """Whether each rollout's call carries loss."""
    return [any(part.loss_mask.any() for part in record.trajectory.segments) for record in group.rollouts]


def masks(group: LeasedGroup) -> list[str]:
    return [one.mask for record in group.rollouts for one in record.trajectory.classifications]


def ratios(groups: Sequence[LeasedGroup], packer: Packer = PACKED) -> np.ndarray:
    """Trainer over engine, of every trained token, before any step."""
    policy = PolicyNetwork(load_model(FOLDER, torch.float32))
    batches = [collate(pack) for pack in packer(rows_of(list(groups)))]
    with torch.no_grad():
        found = [(policy(batch).logprobs_M - batch.logprobs_M).exp() for batch in batches]
    return torch.cat(found).numpy()


NARROW = {"temperature": 0.2, "top_p": 0.8}


def test_a_trainable_policy_samples_at_temperature_1_whatever_is_asked(stack: Stack) -> None:
    group = leased(stack, "plain", NARROW, {"temperature": 0, "presence_penalty": 1.5}, {})
    assert trained(group) == [True] * 3
    found = ratios([group])
    assert len(found) > 30
    assert np.abs(found - 1).max() < 1e-4
    with closing(sqlite3.connect(stack.database)) as database:
        rows = database.execute("SELECT detail FROM call_intents WHERE policy = 'plain' ORDER BY id").fetchall()
    first, second, third = (json.loads(detail) for (detail,) in rows)
    assert first["sampling_asked"]["top_p"] == 0.8
    assert first["shape"]["unapplied"] == ["temperature", "top_p"]
    assert second["shape"]["unapplied"] == ["temperature", "presence_penalty"]
    assert "unapplied" not in third["shape"]
    assert (first["sampling_sent"]["temperature"], first["sampling_sent"]["top_p"]) == (1.0, 1.0)


def test_another_temperature_is_on_the_segment_and_applied(stack: Stack) -> None:
    group = leased(stack, "warm", NARROW, {})
    assert trained(group) == [True] * 2
    for record in group.rollouts:
        for part in record.trajectory.segments:
            assert set(part.extras["temperature"][part.loss_mask].tolist()) == {np.float32(0.6)}
    assert np.abs(ratios([group]) - 1).max() < 1e-4


def test_attempts_keep_the_temperature_that_they_began_with(stack: Stack) -> None:
    """A control that comes between the starts of two rollouts: each is trained at its own temperature."""
    headers = {"Authorization": f"Bearer {stack.keys['admin']}"}
    with httpx.Client(base_url=stack.admin_url, headers=headers, timeout=30) as admin:

        def post(path: str, **body: Any) -> Any:
            return admin.post(path, json=body).raise_for_status().json()

        rollouts = post("/groups", policy="asked", n=2, task={"id": "t", "instruction": "talk"})["rollouts"]
        begun = []
        for rollout, temperature in zip(rollouts, (0.9, 0.5), strict=True):
            post("/policies/asked/control", temperature=temperature)
            begun.append(post(f"/rollouts/{rollout['id']}/start"))
        for number, (rollout, started) in enumerate(zip(rollouts, begun, strict=True)):
            body = {"model": "asked", "messages": [{"role": "user", "content": "List."}], "temperature": 0.1}
            key = {"Authorization": f"Bearer {started['key']}"}
            url = f"{started['base_url']}/v1/chat/completions"
            httpx.post(url, json=body, headers=key, timeout=60).raise_for_status()
            post("/rewards", rollout_id=rollout["id"], value=float(number))
            post(f"/rollouts/{rollout['id']}/finish", status="succeeded", attempt=1)
        post("/policies/asked/control")
    client = TrainerClient(stack.trainer_url, stack.keys["trainer"], "trainer", patience=5)
    lease = client.lease("asked", groups=1, options=LeaseOptions(wait=10))
    assert lease is not None
    found = [record.trajectory.segments[0].extras["temperature"].max() for record in lease.groups[0].rollouts]
    assert found == [np.float32(0.9), np.float32(0.5)]
    assert np.abs(ratios(lease.groups) - 1).max() < 1e-4


def test_truncated_sampling_is_named_and_carries_no_loss(stack: Stack) -> None:
    """A group without loss is no step: it is dropped."""
    assert played(stack, "cut", {}, NARROW) == [{"sampling_truncated": 1}] * 2
    client = TrainerClient(stack.trainer_url, stack.keys["trainer"], "trainer", patience=5)
    assert client.lease("cut", groups=1, options=LeaseOptions(wait=1)) is None


@pytest.mark.parametrize("packer", [PACKED, Packer(4096), Packer(1)])
def test_truncated_sampling_is_replayed_over_the_ids_that_it_left(stack: Stack, packer: Packer) -> None:
    group = leased(stack, "masked", {}, NARROW, {"temperature": 0})
    assert trained(group) == [True] * 3
    for record in group.rollouts:
        for part in record.trajectory.segments:
            masks = part.extras["sampling_mask"][part.loss_mask]
            assert masks.shape[1] == 5
            assert (masks == part.token_ids[part.loss_mask][:, None]).any(axis=1).all()
    assert np.abs(ratios([group], packer) - 1).max() < 1e-4
    for record in group.rollouts:
        for part in record.trajectory.segments:
            object.__setattr__(part, "extras", {})
    assert np.abs(ratios([group], packer) - 1).max() > 0.1


def test_a_mask_that_is_longer_than_what_is_recorded_is_named(stack: Stack) -> None:
    """Top-k 5 fits into five ids, top-k 40 does not, and greedy sampling is no distribution to replay."""
    asked = [{"top_k": 5, "temperature": 0.7}, {"top_k": 40}, {"temperature": 0, "top_k": 5}, {}]
    group = leased(stack, "narrow", *asked)
    assert masks(group) == ["", "sampling_truncated", "sampling_truncated", ""]
    assert np.abs(ratios([group]) - 1).max() < 1e-4


def test_a_policy_may_sample_as_harnesses_ask(stack: Stack) -> None:
    """What can be replayed is trained, each call at its own temperature; the rest is named."""
    group = leased(stack, "asked", {"temperature": 0.4}, NARROW, {"temperature": 0}, {"top_p": 0.9}, {})
    assert masks(group) == ["", "sampling_truncated", "sampling_truncated", "sampling_truncated", ""]
    assert np.abs(ratios([group]) - 1).max() < 1e-4
