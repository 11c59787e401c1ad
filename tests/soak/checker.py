"""What must hold after a round, asked of the store itself. `check` returns the violations and counts continuity."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp
import sqlalchemy as sa

from rolltap.calllog.database import Database
from rolltap.calllog.facts import CallRow
from rolltap.calllog.sql import open_call_log
from rolltap.deployment.description import PROXIES
from rolltap.ledger.schema import groups, rollouts
from rolltap.types import BreakReason, Outcome, RolloutStatus

from ..faults import invariants
from .people import POLICY, Trainer
from .world import World, named

REFUSALS = frozenset({BreakReason.PARENT_NOT_READ})
"""Breaks that are counted and blame nobody: the store was silent for longer than a call may wait."""

WELL = {
    "status": "ready",
    "store": "ok",
    "spool": "ok",
    "engines": "up",
    "models": "served",
    "weights": "right",
    "tokenizers": "same",
    "clock": "ok",
    "proxies": "same",
}
WELL_WITHIN_S = 40.0


async def check_running(world: World, trainer: Trainer) -> None:
    """Of the deployment while it runs, after the last client has gone: invariants, every proxy is well again, and all
    agree on the weights."""
    await world.collect()
    try:
        await invariants.check(world.store_url, world.told, world.journal)
    except AssertionError as error:
        world.violations += str(error).splitlines()
    stated = (await world.engine("GET", "/weight_info"))["weight_version"]
    if trainer.pushed and stated != str(trainer.pushed):
        world.violations.append(f"the engine has weights {stated}, the trainer pushed {trainer.pushed} last")
    for proxy in PROXIES:
        said = await _settled(world, proxy)
        if said != WELL:
            world.violations.append(f"{proxy} does not recover: {said}")
        url = f"{world.deployment.layout.url(f'{proxy}.admin')}/policies/{POLICY}"
        version = (await _read(world, url)).get("version")
        if version != trainer.pushed:
            world.violations.append(f"{proxy} has version {version}, the trainer pushed {trainer.pushed} last")


async def _settled(world: World, proxy: str) -> dict[str, Any]:
    """What `/ready` says once all is well, or after `WELL_WITHIN_S`."""
    deadline = time.monotonic() + WELL_WITHIN_S
    while True:
        said = await _read(world, world.deployment.layout.url(f"{proxy}.admin") + "/ready")
        if said == WELL or time.monotonic() > deadline:
            return said
        await asyncio.sleep(0.5)


async def _read(world: World, url: str) -> dict[str, Any]:
    """What a proxy answers, or why it does not."""
    headers = {"authorization": f"Bearer {world.secrets['admin']}"}
    try:
        async with world.http.get(url, headers=headers) as response:
            return await response.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        return {"no answer": str(error)}


async def check_stopped(world: World, trainer: Trainer) -> None:
    """Of the store, once every proxy has ended in order: nothing is open, continuity, the ledger, `log verify`."""
    url = world.store_url
    await _check_open(world, url)
    await _check_ledger(world, trainer, url)
    log = open_call_log(url, writable=False)
    await log.start()
    try:
        for session in world.told.sessions:
            _check_session(world, await log.rows(session))
    finally:
        await log.close()
    command = [sys.executable, "-m", "rolltap", "log", "verify", "--store", url]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    if done.returncode:
        world.violations.append(f"log verify: {(done.stdout + done.stderr)[-500:]}")


async def _check_open(world: World, url: str) -> None:
    database = Database(url, writable=False)
    await database.start()
    try:
        opened = await database.query(
            lambda connection: connection.execute(
                sa.text(
                    "SELECT i.id FROM call_intents i LEFT JOIN call_completions c ON c.call_id = i.id "
                    "WHERE c.call_id IS NULL"
                )
            ).all()
        )
        stuck = await database.query(
            lambda connection: connection.execute(
                sa.text("SELECT id, status FROM rollouts WHERE status NOT IN :ended").bindparams(
                    sa.bindparam("ended", ["succeeded", "failed", "timed_out", "cancelled"], expanding=True)
                )
            ).all()
        )
    finally:
        await database.close()
    world.violations += [f"call {row.id} is open after every proxy has ended" for row in opened]
    ended = set(world.told.finished)
    world.violations += [
        f"rollout {row.id} is {row.status}, and its agent ended it" for row in stuck if row.id in ended
    ]
    world.totals["rollouts that no agent ended"] += sum(row.id not in ended for row in stuck)


async def _check_ledger(world: World, trainer: Trainer, url: str) -> None:
    """Acknowledged calls are trained with their rollout, or it says `late`; the store has the trainer's groups."""
    database = Database(url, writable=False)
    await database.start()
    try:
        ended = await database.select(sa.select(rollouts).where(rollouts.c.status == RolloutStatus.SUCCEEDED))
        acknowledged = await database.select(sa.select(groups.c.id).where(groups.c.status == "acknowledged"))
    finally:
        await database.close()
    for row in ended:
        missing = set(world.calls_of.get(row.session_id, ())) - set(row.trained_calls)
        if missing and not row.reason.startswith("late"):
            world.violations.append(
                f"rollout {row.id} (session {row.session_id}) ended without {len(missing)} acknowledged calls: "
                + " ".join(sorted(missing))
            )
    unknown = {row.id for row in acknowledged} - world.told.acked.keys() - trainer.unsure
    world.violations += [f"group {one} is acknowledged, and the trainer did not hear of it" for one in unknown]


def _check_session(world: World, rows: Sequence[CallRow]) -> None:
    """Every turn after the first extends an earlier one token for token, but for counted refusals."""
    seen, cut_short = set(world.told.calls), world.cut_short
    ids = Counter(row.intent.id for row in rows)
    world.violations += [f"call {one} is on record {count} times" for one, count in ids.items() if count > 1]
    completed = [row for row in rows if row.completion is not None and row.completion.outcome is Outcome.COMPLETED]
    world.totals["calls on record"] += len(rows)
    world.totals["completed calls that no client saw complete"] += sum(row.intent.id not in seen for row in completed)
    for row in completed:
        assert row.completion is not None
        begun = cut_short.get(row.intent.id, [])
        if row.completion.output_ids[: len(begun)].tolist() != begun:
            world.violations.append(f"call {row.intent.id} does not begin with what the engine had sampled")
    for row in rows[1:]:
        intent = row.intent
        phases = world.phases_at(intent.created_at)
        world.totals["continuations"] += 1
        if intent.break_ is None:
            continue
        for phase in phases:
            phase.felt[f"broken: {intent.break_.reason}"] += 1
        world.totals["broken"] += 1
        if intent.break_.reason in REFUSALS:
            world.totals["broken for want of the store"] += 1
        else:
            world.violations.append(
                f"in {named(phases)}: call {intent.id} breaks its conversation: {intent.break_.reason}"
            )
