"""The evaluator of the tests of roles: a process of its own loads this file."""

from __future__ import annotations

from pathlib import Path


def by_role(folder: Path) -> dict[str, float]:
    return {"rollout": 1.0, "role:solver": 0.25, "role:critic": 0.75}


def of_roles_only(folder: Path) -> dict[str, float]:
    return {"role:solver": 0.25, "role:critic": 0.75}


def of_critic_only(folder: Path) -> dict[str, float]:
    return {"role:critic": 0.75}
