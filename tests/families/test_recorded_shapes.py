"""Request shapes of real harnesses on model families: the first call works, and every trained token is the engine's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest

from ..conftest import FAMILY_CELL
from .cells import FamilyCell, family_house, family_houses, recorded_cell
from .families import FAMILIES, PACKAGE_FAMILIES, TRAINING, WITHOUT_TOOLS, trl_templates
from .recorded import RECORDED

SAMPLE: dict[str, tuple[str, ...]] = {
    "qwen3": ("codex", "claude-code", "pi", "mini-swe-agent"),
    "qwen3.5": ("codex", "claude-code", "gemini-cli"),
    "glm-4.5": ("codex", "claude-code", "qwen-code"),
    "kimi-k2": ("codex", "claude-code", "cline"),
    "llama-3": ("codex", "claude-code", "opencode"),
    "deepseek-v4": ("codex", "claude-code", "pi"),
    "nemotron_3_nano (template)": ("codex", "claude-code", "gemini-cli"),
    "mistral_v3 (template)": ("codex", "claude-code", "qwen-code"),
    "devstral (template)": ("codex", "claude-code", "opencode"),
    "gemma3 (template)": ("codex", "claude-code", "mini-swe-agent"),
    "plain (template)": ("codex", "claude-code", "cline"),
}
"""The cells of every run: among them are all kinds of rules that families have for the order of messages and ids."""


async def test_sampled_cells(tmp_path: Path) -> None:
    """About 10 CPU seconds: forty sessions of eleven families, with one proxy for all."""
    families = {re.sub(r"[^a-z0-9.]+", "-", name): FAMILIES[name] for name in SAMPLE}
    async with family_houses(families, tmp_path, "tiny") as houses:
        cells = [
            await recorded_cell(house, harness, thinking=harness is not names[-1], compacts=compacts)
            for house, names in zip(houses.values(), SAMPLE.values(), strict=True)
            for harness, compacts in [*((name, False) for name in names), (names[0], True)]
        ]
    assert_as_expected(cells)


@pytest.mark.harness
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FAMILIES)
async def test_every_cell(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Up to 12 CPU seconds: a family's forty sessions share one proxy."""
    async with family_house(FAMILIES[name], tmp_path, "tiny") as house:
        cells = [
            await recorded_cell(house, harness, thinking=thinking, compacts=compacts)
            for harness, kind in RECORDED.items()
            for thinking, compacts in ((True, False), (False, False), (True, True))
            if kind.compacts or not compacts
        ]
    for cell in cells:
        record_property(FAMILY_CELL, asdict(cell))
    assert_as_expected(cells)


def test_every_family_of_the_package_is_here() -> None:
    import renderers

    union, *_ = get_args(renderers.RendererConfig)
    names = {get_args(config.model_fields["name"].annotation)[0] for config in get_args(union)}
    assert names - {"auto", "default", "custom"} == {family.renderer for family in PACKAGE_FAMILIES}


def test_every_template_with_tools_of_trl_is_here() -> None:
    without = {family.template for family in WITHOUT_TOOLS}
    ours = {family.template for family in FAMILIES.values()} | {f"{name}{TRAINING}" for name in without}
    files = {path.stem for path in trl_templates().glob("*.jinja")}
    lacking = {name for name in files - ours if "tool" in (trl_templates() / f"{name}.jinja").read_text()}
    assert not lacking


def assert_as_expected(cells: list[FamilyCell]) -> None:
    failed = [f"{cell.name}: {'; '.join(cell.failures)}" for cell in cells if cell.failures]
    assert not failed, f"{len(failed)} of {len(cells)} cells\n" + "\n".join(failed)
