"""The lists of docs/reconstruction.md name every kind, rule, mask and finding that the code has, and no other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from rolltap.reconstructor import findings
from rolltap.reconstructor.kinds import KindRule
from rolltap.reconstructor.rules import SWITCHABLE, MaskReason
from rolltap.types import CallKind, SamplingFlaw

PAGE = Path(__file__).parents[3] / "docs" / "reconstruction.md"


def entries(lead: str) -> list[str]:
    """What each item names, before its meaning, of the list that follows `lead`."""
    text = PAGE.read_text(encoding="utf-8").partition(lead)[2].partition("\n\n")[2].partition("\n\n")[0]
    items = " ".join(text.split("\n  ")).splitlines()
    assert all(item.startswith("* ") for item in items), lead
    return [item.removeprefix("* ").partition(": ")[0] for item in items]


def names(*texts: str) -> set[str]:
    return {name for text in texts for name in re.findall(r"`(\w+)`", text)}


def test_every_kind_and_its_rule_stand_in_the_list() -> None:
    items = [entry.partition(" (") for entry in entries("The reconstructor decides this")]
    assert names(*(kinds for kinds, _, _ in items)) == {kind.value for kind in CallKind}
    assert names(*(rule for _, _, rule in items)) == {rule.value for rule in KindRule}


def test_every_mask_stands_in_its_list() -> None:
    fixed, switchable = entries("Always left out:"), entries("Masked unless switched off")
    assert names(*switchable) == {reason.value for reason in SWITCHABLE}
    always = {reason.value for reason in MaskReason} - {reason.value for reason in SWITCHABLE}
    assert names(*fixed) == always - {MaskReason.TRAINED.value}


def test_every_finding_stands_in_the_list() -> None:
    told = set(re.findall(r'SessionFinding\(\s*"(\w+)"', inspect.getsource(findings)))
    told |= {name for name, _ in (*findings.UNAPPLIED.values(), *findings.BREAKS.values())}
    told |= {flaw.value for flaw in SamplingFlaw}
    shown = names(*entries("Problems of a session"))
    assert told <= shown
    source = inspect.getsource(findings)
    assert {name for name in shown - told if f'"{name}"' not in source and f".{name.upper()}" not in source} == set()
