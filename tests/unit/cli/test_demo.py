"""The demo's folder and figures, without running it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from rolltap.cli import demo
from rolltap.cli.demo import MARKER, prepare_folder
from rolltap.demo.learn import DemoRecipe
from rolltap.demo.show import share
from rolltap.demo.stack import free_ports
from rolltap.errors import ConfigError
from rolltap.reading.intervals import wilson


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds files that no demo wrote, 'thesis\.txt' among them"):
        prepare_folder(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_folder_that_only_looks_like_a_demos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(ConfigError, match="'data'"):
        prepare_folder(tmp_path)
    assert (tmp_path / "data").exists()


def test_its_ports_are_different_and_none_that_a_connection_may_take() -> None:
    ports = free_ports(200)
    assert len(set(ports)) == 200
    with socket.create_server(("127.0.0.1", 0)) as any_port:
        assert any_port.getsockname()[1] > max(ports)


def test_a_former_demos_files_are_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare_folder(out)
    (out / "data").mkdir()
    (out / "data" / "rolltap.db").touch()
    (out / "seed-12").mkdir()
    (out / "engine.log").touch()
    prepare_folder(out)
    assert [path.name for path in out.iterdir()] == [MARKER]


def test_what_was_put_beside_a_demos_files_is_left_alone(tmp_path: Path) -> None:
    prepare_folder(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "notes.md").touch()
    with pytest.raises(ConfigError, match=r"'notes\.md'"):
        prepare_folder(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {MARKER, "data", "notes.md"}


@pytest.mark.filterwarnings("ignore:No artists")  # no seed, no curve
def test_the_report_goes_into_the_demos_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demo.run(seeds=[], out=tmp_path / "out", recipe=DemoRecipe(), shuffle_rewards=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["seeds"] == []


@pytest.mark.parametrize(
    ("success", "n", "low", "high"), [(0.5, 10, 0.2366, 0.7634), (0.0, 10, 0.0, 0.2775), (54 / 64, 64, 0.7360, 0.9128)]
)
def test_the_interval_is_wilsons(success: float, n: int, low: float, high: float) -> None:
    assert wilson(success, n) == pytest.approx((low, high), abs=1e-3)


def test_a_share_is_shown_with_its_interval() -> None:
    assert share(0.5, 10) == "0.50 (0.24 to 0.76)"
