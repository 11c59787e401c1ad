"""A weight version is the engine's, or is known because only rolltap pushes; else it is unknown."""

from __future__ import annotations

from typing import Any

import pytest

USER = {"role": "user", "content": "hi"}


async def versions(plane: Any, *, cut: bool) -> Any:
    """Of a call whose reply ends at a stop string, before the engine says its version, or by itself."""
    plane.engine.replies = ["one STOP two<|im_end|>"]
    await plane.client.chat(USER, **({"stop": ["STOP"]} if cut else {}))
    completion = (await plane.rows())[-1].completion
    return completion.flaw.value if completion.flaw else [span.version for span in completion.versions]


@pytest.mark.parametrize(("says", "found"), [(False, [0]), (True, "version_unknown")])
async def test_a_reply_that_was_cut_before_its_version(plane: Any, says: bool, found: Any) -> None:
    plane.policy.weight_versions = says
    assert await versions(plane, cut=True) == found


async def test_what_the_engine_said_last_counts(plane: Any) -> None:
    plane.policy.weight_versions = True
    assert await versions(plane, cut=False) == [0]
    assert await versions(plane, cut=True) == [0]


async def test_weights_that_somebody_else_pushed(plane: Any) -> None:
    plane.policy.weight_versions = True
    plane.engine.version = 7
    assert await versions(plane, cut=False) == [7]
    assert await versions(plane, cut=True) == "version_unknown"
