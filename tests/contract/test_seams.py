"""Each seam, taken at its word: a toy of each kind from outside the tree is found by name and passes its contract.

A toy is a module of somebody else's distribution; nothing of ours is edited or patched for it. To hold another seam,
add its toy: the contract suite must take it up by itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rolltap.errors import ConfigError
from rolltap.extras import known_names, lookup

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
    with pytest.raises(ConfigError, match="the thing 'broken' of toy_things_broken:TOY can't be loaded: no licence"):
        lookup("thing", "broken", {}, "rolltap.things", ConfigError)


TOY_DIALECT = '''
from rolltap.protocols.base import Route
from rolltap.protocols.openai_chat.dialect import OpenAIChat


class TOY(OpenAIChat):
    """Chat Completions at another address: all that differs is declared here."""

    name = "toy"
    routes = (Route("POST", "/toy/{model}/chat", "generate"),)
    stream_url = "/toy/{model}/chat"
    reply_reader = None
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
from rolltap.harnesses.logs.formats import read_pi

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
from rolltap.reconstructor.segments import SegmentPlan

class TOY:
    def plans(self, kept):
        return [SegmentPlan((node,), 0) for node in reversed(kept.nodes)]
"""

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden" / "dialects"
GOLDEN_FORMS = ("conversation.toy.json", "reply.toy.json", "stream.toy.sse")


TOYS: dict[str, tuple[str, dict[str, int]]] = {
    "rolltap.dialects": (TOY_DIALECT, {"contract/test_dialects.py": 31}),
    "rolltap.engines": (TOY_ENGINE, {"contract/test_engines.py": 5, "contract/test_engine_failures.py": 5}),
    "rolltap.harness_logs": (TOY_LOG, {"contract/test_harness_logs.py": 10}),
    "rolltap.evaluators": (TOY_EVALUATOR, {"contract/test_evaluators.py": 5}),
    "rolltap.runtimes": (TOY_RUNTIME, {"contract/test_runtimes.py": 7}),
    "rolltap.harnesses": (TOY_COMMAND, {"contract/test_harnesses.py": 2}),
    "rolltap.task_sources": (TOY_SOURCE, {"contract/test_task_sources.py": 2}),
    "rolltap.exporters": (TOY_EXPORTER, {"contract/test_exporters.py": 7}),
    "rolltap.chat_engines": (TOY_CHAT_ENGINE, {"contract/test_chat_engines.py": 7}),
    "rolltap.detectors": (TOY_DETECTOR, {"unit/exporters/test_redact.py": 1}),
    "rolltap.strategies": (TOY_STRATEGY, {"unit/reconstructor/test_properties.py": 3}),
}
"""Group -> a toy's source, and how many cases of which suites hold it at least."""

TOY_CALL_CASES = 3


@pytest.mark.acceptance
def test_what_another_package_registers_passes_its_contract(tmp_path: Path) -> None:
    """15 CPU seconds: one pytest runs the toys' share of twelve suites."""
    sites = {group: tmp_path / group for group in TOYS}
    for group, (source, _) in TOYS.items():
        sites[group].mkdir()
        install_distribution(sites[group], group, "toy", source)
    install_distribution(sites["rolltap.harnesses"], "rolltap.harnesses", "toy-call", TOY_CALL)
    texts = {name: (GOLDEN / name.replace("toy", "openai_chat")).read_text(encoding="utf-8") for name in GOLDEN_FORMS}
    for group, golden in {"rolltap.dialects": texts, "rolltap.harness_logs": LOGS["pi"]}.items():
        for name, text in golden.items():
            file = sites[group] / "golden" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")

    wanted = {suite: least for _, suites in TOYS.values() for suite, least in suites.items()}
    command = [sys.executable, "-m", "pytest", "-q", "-rpf", "-n", "0", "-p", "no:cacheprovider", "-k", "toy"]
    run = subprocess.run(
        [*command, *(str(TESTS / suite) for suite in wanted)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, sites.values()), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    passed = re.findall(r"^PASSED tests/(\S+?)::(.*)$", run.stdout, re.MULTILINE)
    counts = Counter(suite for suite, case in passed if "toy-call" not in case)
    assert {suite: counts[suite] for suite, least in wanted.items() if counts[suite] < least} == {}
    assert sum("toy-call" in case for _, case in passed) >= TOY_CALL_CASES
