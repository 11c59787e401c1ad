"""Every cell of the notebooks in examples/ runs, in order, on stores of several kinds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from .test_records import record_for_the_page, record_nothing, record_sessions_of_one_call

NOTEBOOKS = sorted((Path(__file__).parents[3] / "examples" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path) -> list[str]:
    document = json.loads(notebook.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]


def test_there_are_two() -> None:
    assert [notebook.name for notebook in NOTEBOOKS] == ["record.ipynb", "tokens.ipynb"]


@pytest.mark.parametrize("fill", [record_for_the_page, record_sessions_of_one_call, record_nothing])
def test_every_cell_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fill: Callable[[Path], Coroutine[Any, Any, None]],
) -> None:
    asyncio.run(fill(tmp_path))
    (tmp_path / "examples" / "notebooks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "examples" / "notebooks")
    for notebook in NOTEBOOKS:
        names: dict[str, object] = {}
        for cell in cells(notebook):
            exec(compile(cell, str(notebook), "exec"), names)
        assert json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]["cell_type"] == "markdown"
    printed = capsys.readouterr().out
    assert ("tokens are trained, mean log-prob -" in printed) == (fill is not record_nothing)
