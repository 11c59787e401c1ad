"""What the contract suite proves, adapter by adapter, and the table of it in docs/trainers.md.

A trainer that can't share our packages has an environment of its own in .cache/trainers (scripts/trainers.sh), where
the suite runs again for it: `ROLLTAP_TRAINERS` names the environment. `python -m tests.trainers.proofs` writes the
table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import pytest

from rolltap.trainer_client.adapters import ADAPTERS

from .driver import EVERYTHING, Driver

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "trainers.md"
ON_THE_PAGE = "trl-grpo"
"""The adapter whose program is the page's worked example; those of the others are in examples/trainers."""
BEGIN, END = "<!-- proofs -->\n", "<!-- /proofs -->\n"
PAGES = ("trl-grpo", "trl-async", "tinker", "verl", "openenv", "art", "skyrl", "nemo-rl", "prime-rl")
"""Those with a program; slime's is a command line."""

HERE = os.environ.get("ROLLTAP_TRAINERS", "")

PROOFS = {
    "tokens": "every trained token is in its loss once, after its own context, with the engine's log-prob",
    "gradient": "its gradient is our trainer's, so rollouts of several rows weigh once",
    "order": "groups are acknowledged before the optimiser's step; weights are pushed after it, as the next version",
    "killed": "killed between the two and resumed, every group is in its weights once",
    "lost": "groups that another trainer has by then change no weight",
    "refused": "groups that can't be trained are refused, with the reason",
    "tokenizer": "another tokenizer or chat template than the policy's is refused at connect",
    "staleness": "staleness is in its own log",
}


SOURCES = "sources-1"
"""The environment of trainers that no package index has, which are run from their source."""


@dataclass(frozen=True, slots=True)
class Suite:
    """An adapter's trial: the class of its driver, the keys of `PROOFS` that it keeps, its environment.

    Those of `with_source` need the trainer's source: where it is, all are tried on its code, else on its schema.
    `remarks` are what the table says of a proof instead of yes.
    """

    driver: str
    proves: frozenset[str]
    environment: str = ""
    with_source: frozenset[str] = frozenset()
    remarks: Mapping[str, str] = field(default_factory=dict)

    def tried(self, proof: str) -> bool:
        """Whether this environment tries it."""
        if self.with_source and HERE == SOURCES:
            return proof in self.proves | self.with_source
        return self.environment == HERE and proof in self.proves

    def cell(self, proof: str) -> str:
        """What the table says."""
        said = "with source" if proof in self.with_source else "yes" if proof in self.proves else "no"
        return self.remarks.get(proof, said)

    def load(self) -> Driver:
        module, _, name = self.driver.partition(":")
        return getattr(import_module(f".{module}", __package__), name)()


SUITES = {
    "trl-grpo": Suite("trl_grpo:TrlGrpo", EVERYTHING),
    "trl-async": Suite("trl_async:TrlAsync", EVERYTHING),
    "tinker": Suite("tinker_service:TinkerService", EVERYTHING - {"staleness"}),
    "verl": Suite("verl_ppo:VerlPpo", EVERYTHING, "verl-0.9.1"),
    "openenv": Suite(
        "openenv_sessions:OpenEnvSessions",
        frozenset({"tokens", "gradient", "refused", "tokenizer"}),
        "openenv-0.10.0",
        remarks={"gradient": "yes, up to a factor"},
    ),
    "art": Suite("art_groups:ArtGroups", EVERYTHING, "python-3.12", remarks={"gradient": "yes, up to a factor"}),
    "skyrl": Suite("skyrl_generator:SkyRl", EVERYTHING, "python-3.12"),
    "slime": Suite("slime_rollout:Slime", EVERYTHING - {"gradient"}, with_source=frozenset({"tokens", "gradient"})),
    "nemo-rl": Suite("nemo_rl_policy:NemoRl", EVERYTHING - {"gradient"}, with_source=frozenset({"tokens", "gradient"})),
    "prime-rl": Suite(
        "prime_rl_files:PrimeRl", EVERYTHING - {"gradient"}, with_source=frozenset({"tokens", "gradient"})
    ),
}


def proves(proof: str) -> pytest.MarkDecorator:
    """Runs a test with every adapter of this environment that is to prove this."""
    assert proof in PROOFS
    named = [name for name, suite in SUITES.items() if suite.tried(proof)]
    return pytest.mark.parametrize("driver", named, indirect=True)


def code(name: str) -> str:
    """The program that the documentation has for an adapter."""
    if name != ON_THE_PAGE:
        return (ROOT / "examples" / "trainers" / f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return block


def table() -> str:
    """What is proven, numbered, and a line for each adapter with its program."""
    lines = [f"{number}. {text}" for number, text in enumerate(PROOFS.values(), 1)]
    lines.append("")
    for name, adapter in ADAPTERS.items():
        file = "slime.yaml" if name == "slime" else f"{name.replace('-', '_')}.py"
        place = "#the-worked-example" if name == ON_THE_PAGE else f"../examples/trainers/{file}"
        lines.append(f"* [{adapter.trainer}]({place}), {adapter.tested_with}: {_proven(SUITES[name])}")
    return "\n".join(lines) + "\n"


def _proven(suite: Suite) -> str:
    """The numbers of the proofs, by what the table says of them."""
    numbers: dict[str, list[str]] = {}
    for number, proof in enumerate(PROOFS, 1):
        numbers.setdefault(suite.cell(proof), []).append(str(number))
    if list(numbers) == ["yes"]:
        return "all"
    names = {"yes": "proven", "no": "not"}
    return "; ".join(f"{names.get(said, said)}: {', '.join(which)}" for said, which in numbers.items())


def page(text: str) -> str:
    """The page with the table as it is now."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
