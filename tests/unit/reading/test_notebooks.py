"""Every cell of the notebooks in examples/ runs, in order, on a recorded store."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from .test_records import record_for_the_page

NOTEBOOKS = sorted((Path(__file__).parents[3] / "examples" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path) -> list[str]:
    document = json.loads(notebook.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]


def test_there_are_two() -> None:
    assert [notebook.name for notebook in NOTEBOOKS] == ["record.ipynb", "tokens.ipynb"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(record_for_the_page(tmp_path))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for cell in cells(notebook):
        exec(compile(cell, str(notebook), "exec"), names)
    assert json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]["cell_type"] == "markdown"
    if notebook.stem == "tokens":
        assert "tokens are trained, mean log-prob -" in capsys.readouterr().out
