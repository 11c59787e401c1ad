"""Each seam, taken at its word: a toy of each kind from outside the tree is found by name and passes its contract.

A toy is a module of somebody else's distribution; nothing of ours is edited or patched for it. To hold another seam,
add its toy: the contract suite must take it up by itself.
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

from .harness_logs import LOGS
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

TOY_EVALUATOR = """
from rolltap.harnesses.base import Score, Verdict
from rolltap.harnesses.evaluators.base import EvaluatorTable

class TOY(EvaluatorTable, tag="toy", frozen=True):
    example = '{"kind": "toy", "wanted": "notes.txt"}'
    wanted: str

    async def evaluate(self, evidence):
        return Verdict((Score(float((evidence.workspace.folder / self.wanted).exists())),))
"""
TOY_RUNTIME = """
from rolltap.harnesses.runtimes.process import ProcessRuntime

class TOY(ProcessRuntime):
    pass
"""
TOY_COMMAND = """
from rolltap.harnesses.base import Command, Package

class Toy:
    name = "toy"
    package = Package("pip", "toy", "1.0", executable="toy")
    dialect = "openai_chat"
    quirks = ("It is a toy.",)

    def launch(self, job):
        env = {"URL": job.endpoint.v1, "KEY": job.endpoint.key, "MODEL": job.endpoint.model}
        return Command(("toy", job.instruction), env=env)

TOY = Toy()
"""
TOY_CALL = """
import json, urllib.request
from rolltap.harnesses.base import Ending, Package, PythonCall

class Toy:
    name = "toy-call"
    package = Package("pip", "toy", "1.0", executable="")
    dialect = "openai_chat"
    quirks = ("It runs inside the runner.",)

    def launch(self, job):
        def run(stop):
            if stop.is_set():
                return Ending.CANCELLED, "stopped"
            body = {"model": job.endpoint.model, "messages": [{"role": "user", "content": job.instruction}]}
            headers = {"Authorization": f"Bearer {job.endpoint.key}", "Content-Type": "application/json"}
            url = f"{job.endpoint.v1}/chat/completions"
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request) as reply:
                return Ending.DONE, reply.read().decode()
        return PythonCall(run)

TOY = Toy()
"""

TOY_SOURCE = """
from rolltap.types import Task

def TOY(where, options):
    return [Task(where, "Go.", {"evaluator": {"kind": "session_completed"}, "harness": "codex"})]
"""

TOY_EXPORTER = """
from dataclasses import dataclass
from typing import ClassVar
from rolltap.reconstructor.exporters.sft import Sft

@dataclass(frozen=True)
class TOY(Sft):
    name: ClassVar[str] = "toy"
"""

TOY_CHAT_ENGINE = """
from rolltap.proxy.engines.openai_compatible import OpenAiCompatibleEngine

class TOY(OpenAiCompatibleEngine):
    pass
"""

TOY_LOG = """
from rolltap.harnesses.logs.pi import read_pi

def TOY(folders):
    return read_pi(folders)
"""

TOY_DETECTOR = """
class Names:
    kind = "name"

    def spans(self, text):
        at = text.find("Ada")
        return [(at, at + 3)] if at >= 0 else []

def TOY():
    return [Names()]
"""

TOY_STRATEGY = """
from rolltap.reconstructor.strategies import SegmentPlan

class TOY:
    def plans(self, kept):
        return [SegmentPlan((node,), 0) for node in reversed(kept.nodes)]
"""

CONTRACT = Path(__file__).parent
UNIT = CONTRACT.parent / "unit"
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


def test_a_log_reader_of_another_package_passes_the_contract(tmp_path: Path) -> None:
    site = install_distribution(tmp_path, "rolltap.harness_logs", "toy", TOY_LOG)
    for path, text in LOGS["pi"].items():
        file = site / "golden" / path
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assert contract_passes(site, "test_harness_logs.py") >= 10


@pytest.mark.parametrize(
    ("group", "name", "source", "suite", "tests"),
    [
        ("rolltap.evaluators", "toy", TOY_EVALUATOR, "test_evaluators.py", 5),
        ("rolltap.runtimes", "toy", TOY_RUNTIME, "test_runtimes.py", 7),
        ("rolltap.harnesses", "toy", TOY_COMMAND, "test_harnesses.py", 2),
        ("rolltap.harnesses", "toy-call", TOY_CALL, "test_harnesses.py", 3),
        ("rolltap.task_sources", "toy", TOY_SOURCE, "test_task_sources.py", 2),
        ("rolltap.exporters", "toy", TOY_EXPORTER, "test_exporters.py", 7),
        ("rolltap.chat_engines", "toy", TOY_CHAT_ENGINE, "test_chat_engines.py", 7),
        ("rolltap.detectors", "toy", TOY_DETECTOR, str(UNIT / "exporters" / "test_redact.py"), 1),
        ("rolltap.strategies", "toy", TOY_STRATEGY, str(UNIT / "reconstructor" / "test_properties.py"), 3),
    ],
)
def test_what_another_package_registers_passes_its_contract(
    tmp_path: Path, group: str, name: str, source: str, suite: str, tests: int
) -> None:
    assert contract_passes(install_distribution(tmp_path, group, name, source), suite) >= tests
