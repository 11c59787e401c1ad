"""Who may import what, held over every file of the product (import-linter holds what is reached indirectly)."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from .product import ROOT, sources

ONLY_IN: dict[str, tuple[str, ...]] = {
    "sqlalchemy": ("calllog/", "ledger/"),
    "alembic": ("calllog/",),
    "asyncpg": ("calllog/",),
    "redis": ("calllog/",),
    "fastapi": ("proxy/",),
    "torch": ("trainer_client/", "engine/", "weight_transfer.py"),  # what trainer and engine share
    "transformers": ("trainer_client/", "engine/", "cli/export.py"),
    "ray": ("harnesses/runner/ray_runner.py", "trainer_client/adapters/verl_trainer.py"),  # verl's workers are Ray's
    "pyarrow": ("reconstructor/exporters/", "reading/tables.py"),
    "typer": ("cli/", "engine/"),
}
"""Package → the files that import it, by the beginnings of their names."""

PURE = ("types.py", "errors.py", "reconstructor/")
NOT_PURE = ("reconstructor/exporters/",)


def test_packages_are_imported_only_where_they_may_be() -> None:
    for package, places in ONLY_IN.items():
        importers = {source.name for source in sources() if package in source.packages}
        assert importers, f"nothing imports {package}: take it out of the list"
        assert {name for name in importers if not name.startswith(places)} == set(), package


def test_the_kernels_types_and_the_reconstructor_need_only_numpy() -> None:
    """The exporters excepted, which write foreign formats."""
    for source in sources():
        if source.name.startswith(PURE) and not source.name.startswith(NOT_PURE):
            foreign = source.packages - set(sys.stdlib_module_names) - {"numpy", "rolltap"}
            assert foreign == set(), source.name


def test_every_room_has_a_layer() -> None:
    """import-linter holds that imports go down from layer to layer, of the rooms that it is told of."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    contracts = [each for each in settings["contracts"] if each["type"] == "layers" and "containers" not in each]
    (layers,) = (contract["layers"] for contract in contracts)
    rooms = {source.name.partition("/")[0] for source in sources() if "/" in source.name}
    assert sorted(room for line in layers for room in line.split(" | ")) == sorted(f"rolltap.{room}" for room in rooms)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("rolltap.proxy.reading_process.child", {"aiohttp", "tenacity", "fastapi", "torch"}),
        ("rolltap.cli.main", {"aiohttp", "numpy", "sqlalchemy", "tenacity", "torch"}),
    ],
)
def test_what_starts_often_starts_light(module: str, heavy: set[str]) -> None:
    code = f"import {module}, sys; print(*({heavy!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
