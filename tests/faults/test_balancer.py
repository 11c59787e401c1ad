"""Our own clients behind a real nginx whose upstreams are gone for a while."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from rolltap.contract.trainer import LeaseOptions
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.lease.holder import LeaseHolder

from ..conftest import free_port
from ..unit.trainer_client.making import random_group
from ..unit.trainer_client.plane import KEY, Plane, running
from .nginx import nginx


async def test_a_trained_group_is_acknowledged_through_a_balancer_that_lost_its_servers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plane, port = Plane(), free_port()
    plane.offer(random_group("g0", [1.0, 0.0], seed=0))
    async with nginx(tmp_path, [port, free_port()]) as url:
        client = TrainerClient(url, KEY, "trainer", run="run", patience=0.3)
        options = LeaseOptions(wait=0.1)
        holder = LeaseHolder(client, "policy", options, keep_zero_variance=True, trainable=lambda group: group)
        with running(plane, port):
            client.caller["incarnation"] = plane.incarnation
            holder.__enter__()
            await asyncio.to_thread(holder.gather, 1, lambda: False)
        with caplog.at_level(logging.WARNING, "rolltap"):
            acknowledging = asyncio.create_task(asyncio.to_thread(holder.acknowledge_and_close, 1))
            async with asyncio.timeout(20):
                while "not acknowledged yet" not in caplog.text:  # noqa: ASYNC110  the event is another thread's
                    await asyncio.sleep(0.05)
        assert "50" in caplog.text
        assert "<html>" not in caplog.text
        with running(plane, port):
            await asyncio.wait_for(acknowledging, 20)
    assert plane.acked == {"g0": 1}
