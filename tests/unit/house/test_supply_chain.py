"""Locks, advisories and the list of components: `scripts/lock.sh`, `scripts/audit.py`."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
REMEDY = "run scripts/lock.sh"
looked_up = runpy.run_path(str(ROOT / "scripts" / "audit.py"))["looked_up"]


def test_the_licence_names_no_other_owner() -> None:
    assert "Copyright {yyyy} {name of copyright owner}" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def locked(name: str) -> dict[str, tuple[str, int]]:
    """Each requirement's version, and how many hashes it has."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    parsed = [re.match(r"([\w.-]+)==(\S+)( ; [^-]+)?", line) for line in lines]
    assert all(parsed), [line for line, match in zip(lines, parsed, strict=True) if not match]
    return {
        canonicalize_name(match[1]): (match[2], line.count("--hash=sha256:"))
        for line, match in zip(lines, parsed, strict=True)
        if match
    }


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if "==" in line]
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_locks_hold_the_tested_pins_with_hashes() -> None:
    tested = locked("tested.txt")
    assert {name: version for name, (version, _) in tested.items()} == pinned(), REMEDY
    assert [name for name, (_, hashes) in tested.items() if not hashes] == [], REMEDY


def test_the_base_lock_is_what_the_package_needs() -> None:
    base, tested = locked("base.txt"), pinned()
    assert {name: version for name, (version, _) in base.items() if tested.get(name, version) != version} == {}, REMEDY
    assert [name for name, (_, hashes) in base.items() if not hashes] == [], REMEDY
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for requirement in map(Requirement, project["dependencies"]):
        version, _ = base[canonicalize_name(requirement.name)]
        assert version in requirement.specifier, REMEDY


@pytest.mark.parametrize("name", ["harbor-0.25.0", "python-3.12"])
def test_an_environment_that_sees_nothing_of_ours_has_what_the_package_needs(name: str) -> None:
    lines = (ROOT / "scripts" / "trainers" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    has = {canonicalize_name(line.partition("==")[0]) for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {canonicalize_name(Requirement(each).name) for each in project["dependencies"]} <= has


def test_a_card_without_a_network_gets_what_the_engine_and_the_trainer_need() -> None:
    """`make gpu`'s wheels; the others come with the card's PyTorch."""
    there = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "jinja2", "pygments"}
    there |= {"aiohttp", "rich", "typer", "httpx"}
    lines = (ROOT / "tests" / "gpu" / "wheels.txt").read_text(encoding="utf-8").splitlines()
    has = {canonicalize_name(line.partition("==")[0]) for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = {
        canonicalize_name(Requirement(each).name)
        for each in (*project["dependencies"], *extras["tokens"], *extras["train"])
    }
    assert needed - there - {"rolltap"} <= has


def test_an_audit_that_looked_up_nothing_does_not_pass_for_clean() -> None:
    skipped: list[dict[str, Any]] = [{"name": "a", "skip_reason": "not found"}]
    known: list[dict[str, Any]] = [{"name": "b", "version": "1", "vulns": []}]
    assert looked_up(skipped) is None
    assert looked_up([*skipped, *known]) == known
