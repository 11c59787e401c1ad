"""The trainer plane end to end: weights that are pushed, refused or waited for, log-probs, dead letters.

Weights that the engine can't load leave the old ones serving under their version, and the trainer is told.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from typer.testing import CliRunner

from rolltap.cli.tasks import dead_letters
from rolltap.contract.trainer import LeasedGroup, LeaseOptions
from rolltap.demo.stack import Stack
from rolltap.engine.tiny import FOLDER
from rolltap.errors import EngineRefused, LedgerError
from rolltap.trainer_client.data.collate import collate
from rolltap.trainer_client.data.packing import Packer
from rolltap.trainer_client.data.step import view
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.lease.push import push_folder
from rolltap.trainer_client.model.network import PolicyNetwork, load_model
from rolltap.trainer_client.run.planning import rows_to_read

from .playing import POLICIES, POLICY, Player


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("push"), FOLDER, POLICIES) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: Stack) -> TrainerClient:
    """The policy's owner."""
    owner = TrainerClient(stack.trainer_url, stack.keys["trainer"], "trainer", patience=5)
    owner.rewind(0, {POLICY: 0})
    return owner


def good(folder: Path) -> Path:
    shutil.copytree(FOLDER, folder)
    return folder


def cut_short(folder: Path) -> Path:
    good(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return folder


def of_another_model(folder: Path) -> Path:
    from rolltap.engine.tiny.make import initialise, save, shape

    folder.mkdir()
    config = shape(512, 1, 0)
    save(initialise(config, 1), config, folder)
    return folder


def leased(stack: Stack, client: TrainerClient) -> LeasedGroup:
    """A group whose tokens are sampled now, as a trainer gets it."""
    with Player(stack) as player:
        played = player.play()
    assert played is not None
    while (lease := client.lease(POLICY, groups=50, options=LeaseOptions(wait=5))) is not None:
        client.ack(lease, 1)
        for group in lease.groups:
            if group.group.id == played:
                return group
    raise AssertionError("the group that was played is not leased")


def versions(group: LeasedGroup) -> set[int]:
    """The weight versions of its trained tokens."""
    segments = [part for record in group.rollouts for part in record.trajectory.segments]
    return {int(version) for part in segments for version in part.versions[part.loss_mask]}


def log_prob_distance(group: LeasedGroup, folder: Path) -> float:
    """The largest distance between what the engine sampled with and what the trainer computes, over trained tokens."""
    policy = PolicyNetwork(load_model(folder, torch.float32))
    step = view([group])
    rows = rows_to_read(step, step.views())
    batches = [collate(pack) for pack in Packer(4096, share=True)(rows)]
    assert sum(batch.trained_tokens for batch in batches) > 20
    with torch.no_grad():
        return max(float((policy(batch).logprobs_M - batch.logprobs_M).abs().max()) for batch in batches)


@pytest.mark.parametrize("make", [cut_short, of_another_model])
def test_the_old_weights_serve_on_and_the_trainer_is_told(
    stack: Stack, client: TrainerClient, tmp_path: Path, make: Any
) -> None:
    before = client.policy(POLICY)
    number = client.rewind(1, {POLICY: before.version}).versions[POLICY] + 1
    with pytest.raises(EngineRefused, match="the weights in use stay"):
        push_folder(client, POLICY, make(tmp_path / "bad"), number, "keep")
    after = client.policy(POLICY)
    assert (after.version, after.paused) == (before.version, None)
    assert versions(leased(stack, client)) == {before.version}


def test_the_next_good_push_counts(stack: Stack, client: TrainerClient, tmp_path: Path) -> None:
    version = client.rewind(1, {POLICY: client.policy(POLICY).version}).versions[POLICY] + 1
    push_folder(client, POLICY, good(tmp_path / "good"), version, "drain")
    assert client.policy(POLICY).version == version
    group = leased(stack, client)
    assert versions(group) == {version}
    assert log_prob_distance(group, FOLDER) < 1e-4
    with pytest.raises(LedgerError, match="numbers only grow"):
        client.push(POLICY, str(tmp_path / "good"), version - 1, digest="old")
    with pytest.raises(LedgerError, match="is assigned to weights with digest"):
        client.push(POLICY, str(tmp_path / "good"), version, digest="other")
    push_folder(client, POLICY, tmp_path / "good", version, "keep")


def test_calls_wait_while_weights_are_loaded(stack: Stack, client: TrainerClient) -> None:
    """A harness notices nothing of a pause but its length."""
    replies: list[httpx.Response] = []
    opened = httpx.post(
        f"{stack.admin_url}/sessions",
        json={"policy": POLICY},
        headers={"Authorization": f"Bearer {stack.keys['admin']}"},
    ).json()
    client.begin_update(POLICY, "keep")

    def call() -> None:
        body = {"model": POLICY, "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Authorization": f"Bearer {opened['key']}"}
        replies.append(httpx.post(f"{opened['base_url']}/v1/chat/completions", json=body, headers=headers, timeout=60))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        thread.join(0.5)
        assert not replies
    finally:
        client.finish_update(POLICY)
        thread.join()
    assert replies[0].status_code == 200


def test_dead_letters_are_listed_and_revived(stack: Stack, client: TrainerClient) -> None:
    """Groups that a trainer can't train, over the commands that the page shows."""
    with Player(stack, rollouts=1) as player:
        group_id = player.play()
    for _ in range(3):
        lease = client.lease(POLICY, groups=50, options=LeaseOptions(wait=5))
        assert lease is not None
        client.nack(lease, "log-prob is not finite", (group_id,) if group_id else ())
    env = {"ROLLTAP_TRAINER_URL": stack.trainer_url, "ROLLTAP_TRAINER_KEY": stack.keys["trainer"], "COLUMNS": "200"}

    def told(*words: str, code: int = 0) -> str:
        result = CliRunner().invoke(dead_letters, words, env=env)
        assert result.exit_code == code, result.output
        return result.output

    listed = json.loads(told("list", "--policy", POLICY, "--json"))
    assert [(one["group"]["id"], one["reason"]) for one in listed] == [(group_id, "log-prob is not finite")]
    assert "log-prob is not finite" in told("list")
    assert told("revive", str(group_id)) == f"group {group_id} is ready again\n"
    assert "not dead" in told("revive", str(group_id), code=1)
    assert json.loads(told("list", "--json")) == []
    lease = client.lease(POLICY, groups=50, options=LeaseOptions(wait=5))
    assert lease is not None
    assert group_id in {group.group.id for group in lease.groups}
