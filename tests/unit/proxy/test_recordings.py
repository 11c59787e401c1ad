"""Every call of the recorded sessions is given the kind, agent and mask that it should have."""

from __future__ import annotations

from typing import Any

import pytest

from rolltap.reconstructor.reconstruct import reconstruct

from .recordings import RECORDINGS, WIRES, replay


@pytest.mark.parametrize("name", RECORDINGS)
async def test_every_call_is_what_it_is_expected_to_be(plane: Any, name: str) -> None:
    dialect, steps = RECORDINGS[name]
    plane.policy.settings = plane.policy.settings.model_copy(update={"aliases": ("*",)})
    await replay(plane, dialect, steps)
    trajectory = reconstruct([row.call() for row in await plane.rows()])
    found = [(call.kind.value, call.mask, call.agent) for call in trajectory.classifications]
    assert found == [(step.kind, step.mask, step.agent) for step in steps]


def test_all_protocols_and_kinds_of_calls_are_recorded() -> None:
    assert {dialect for dialect, _ in RECORDINGS.values()} == set(WIRES)
    kinds = {step.kind for _, steps in RECORDINGS.values() for step in steps}
    assert kinds == {"main", "auxiliary", "summary"}
