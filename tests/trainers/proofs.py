"""What the contract suite proves, adapter by adapter, and the table of it in docs/trainers/README.md.

`python -m tests.trainers.proofs` writes the table.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rolltap.trainer_client.adapters import ADAPTERS

from .driver import Driver
from .tinker_service import TinkerService
from .trl_async import TrlAsync
from .trl_grpo import TrlGrpo

PAGE = Path(__file__).parents[2] / "docs" / "trainers" / "README.md"
BEGIN, END = "<!-- proofs -->\n", "<!-- /proofs -->\n"

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

DRIVERS: dict[str, Driver] = {"trl-grpo": TrlGrpo(), "trl-async": TrlAsync(), "tinker": TinkerService()}


def proves(proof: str) -> pytest.MarkDecorator:
    """Runs a test with every adapter that is to prove this."""
    named = [name for name, driver in DRIVERS.items() if proof in driver.proves]
    assert proof in PROOFS
    return pytest.mark.parametrize("driver", [DRIVERS[name] for name in named], ids=named)


def table() -> str:
    """Adapters as columns, what is proven as rows."""
    names = list(ADAPTERS)
    heads = [f"[{ADAPTERS[name].trainer}]({name}.md)" for name in names]
    tested = [f"{ADAPTERS[name].package} {', '.join(ADAPTERS[name].tested)}" for name in names]
    lines = [["", *heads], ["---"] * (len(names) + 1), ["tested with", *tested]]
    lines += [
        [text, *("yes" if key in DRIVERS[name].proves else "no" for name in names)] for key, text in PROOFS.items()
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def page(text: str) -> str:
    """The page with the table as it is now."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
