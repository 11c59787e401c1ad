"""Each seam, taken at its word: a toy of each kind from outside the tree is found by name and passes its contract.

A toy is a module of somebody else's distribution; nothing of ours is edited or patched for it. To hold another seam,
add its toy to `TOYS`: the contract suite must take it up by itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rolltap.errors import ConfigError
from rolltap.plugins import known_names, lookup

from .outsider import install_distribution


def test_our_own_name_wins_and_an_outsiders_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_distribution(tmp_path, "rolltap.things", "mine", "TOY = 'theirs'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert lookup("thing", "mine", {}, "rolltap.things", ConfigError) == "theirs"
    assert lookup("thing", "mine", {"mine": "ours"}, "rolltap.things", ConfigError) == "ours"
    assert known_names({"a": 1, "mine": 2}, "rolltap.things") == ["a", "mine"]
    with pytest.raises(ConfigError, match="no thing 'other'; known: a, mine"):
        lookup("thing", "other", {"a": 1}, "rolltap.things", ConfigError)


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_distribution(tmp_path, "rolltap.things", "broken", "raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="the thing 'broken' of toy_broken:TOY can't be loaded: no licence"):
        lookup("thing", "broken", {}, "rolltap.things", ConfigError)


TOY_DIALECT = '''
from rolltap.proxy.dialects.base import Route
from rolltap.proxy.dialects.openai_chat import OpenAIChat


class Toy(OpenAIChat):
    """Chat Completions at another address: all that differs is declared here."""

    name = "toy"
    routes = (Route("POST", "/toy/{model}/chat", "generate"),)
    stream_url = "/toy/{model}/chat"
    reply_reader = None


TOY = Toy()
'''

TOY_ENGINE = """
from rolltap.proxy.engines.vllm import VllmEngine


class TOY(VllmEngine):
    kind = "toy"
    scripted_wire = "vllm-completions"
"""

CONTRACT = Path(__file__).parent
GOLDEN = CONTRACT.parent / "golden" / "dialects"


def contract_passes(site: Path, *files: str) -> int:
    """Runs the toy's share of contract suites, with the toy installed in `site`; how many tests passed."""
    path = f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "toy"]
    run = subprocess.run(
        [*command, *(str(CONTRACT / file) for file in files)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    return int(passed[1])


def test_a_dialect_of_another_package_passes_the_contract(tmp_path: Path) -> None:
    site = install_distribution(tmp_path, "rolltap.dialects", "toy", TOY_DIALECT)
    (site / "golden").mkdir()
    for form in ("conversation.{}.json", "reply.{}.json", "stream.{}.sse"):
        (site / "golden" / form.format("toy")).write_bytes((GOLDEN / form.format("openai_chat")).read_bytes())
    assert contract_passes(site, "test_dialects.py") > 30


def test_an_engine_of_another_package_passes_the_contract(tmp_path: Path) -> None:
    site = install_distribution(tmp_path, "rolltap.engines", "toy", TOY_ENGINE)
    assert contract_passes(site, "test_engines.py", "test_engine_failures.py") > 10
