"""The example with a simulated user: both sides are on record in their roles; only the agent is trained."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rolltap.contract.admin import SubmitTasks
from rolltap.contract.trainer import LeaseRequest
from rolltap.engine.scripted import ScriptedEngine
from rolltap.engine.scripted.script import load_script
from rolltap.engine.tiny import FOLDER
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.runner.node import NodeAgent, NodeSettings
from rolltap.harnesses.runner.specs import Defaults, check, resolve_paths
from rolltap.harnesses.runner.tasks import read_tasks
from rolltap.proxy.app import Rolltap
from rolltap.settings import load_settings

from ..conftest import ROOT
from ..harnesses.house import POLICY, house_settings, serving

EXAMPLE = ROOT / "examples" / "user-simulator"


async def test_the_user_is_a_frozen_role_and_the_agent_is_trained(tmp_path: Path) -> None:
    defaults = Defaults(base=EXAMPLE, harness="command", argv=("python3", "episode.py"), workspaces=tmp_path / "w")
    tasks = [resolve_paths(task, defaults) for task in read_tasks(EXAMPLE / "tasks.jsonl")]
    async with ScriptedEngine(load_script(EXAMPLE / "engine.toml"), FOLDER) as engine:
        asked = dict(house_settings(tmp_path, engine.url))
        asked["policies"] = {
            POLICY: asked["policies"][POLICY],
            "frozen": {**asked["policies"][POLICY], "trainable": False},
        }
        settings = load_settings(None, **asked)
        async with (
            Rolltap.running(settings, check_task=check) as app,
            serving(app, settings) as urls,
            AdminClient(urls["admin"], app.settings.keys.admin) as client,
        ):
            await client.submit(SubmitTasks({"agent": POLICY, "user": "frozen"}, 1, tasks, id="s"))
            await NodeAgent(client, NodeSettings("n", wait=0.1), defaults).run(asyncio.Event(), until_idle=True)
            groups = {group.task_id: group.rollouts[0] for group in await client.submission_groups("s")}
            lease = await app.ledger.trainers.lease(LeaseRequest("t", POLICY, 2))
    rewards = {task: [reward.value for reward in rollout.rewards] for task, rollout in groups.items()}
    assert rewards == {"cancel-desk": [1.0], "not-his": [0.0]}
    assert len(lease.groups) == 2
    for group in lease.groups:
        segments = {segment.agent: segment for segment in group.rollouts[0].trajectory.segments}
        assert set(segments) == {"", "user"}, "one segment a role: neither history breaks"
        assert segments[""].loss_mask.any()
        assert len(segments[""].turns) == 3
        assert not segments["user"].loss_mask.any()
        assert len(segments["user"].turns) == 2
