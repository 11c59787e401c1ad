"""Forks, rules of a session and grammars on every family: tokens on record are those sampled, each is trained once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from ..conftest import FAMILY_CELL
from .cells import family_house
from .families import FAMILIES
from .generated import KINDS, generated_cell
from .test_recorded_shapes import assert_as_expected

SEEDS = 2
SAMPLE = ("qwen3", "kimi-k2", "inkling", "mistral_v7 (template)", "plain (template)")
"""Families with and without grammars of calls, with numbered ids, efforts in the system text, and without tools."""


@pytest.mark.parametrize("name", SAMPLE)
async def test_all_at_once(name: str, tmp_path: Path) -> None:
    async with family_house(FAMILIES[name], tmp_path, "tiny") as house:
        assert_as_expected([await generated_cell(house, KINDS[-1], 1)])


@pytest.mark.harness
@pytest.mark.families
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILIES)
async def test_every_kind(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """About 7 CPU seconds: a family's ten conversations, with up to three forks each, share one proxy."""
    async with family_house(FAMILIES[name], tmp_path, "tiny") as house:
        cells = [await generated_cell(house, kind, SEEDS) for kind in KINDS]
    for cell in cells:
        record_property(FAMILY_CELL, asdict(cell))
    assert_as_expected(cells)
