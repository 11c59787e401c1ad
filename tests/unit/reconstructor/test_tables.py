"""The tables of docs/reconstruction.md name every kind, rule, mask and finding that the code has, and no other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from rolltap.reconstructor import findings
from rolltap.reconstructor.kinds import KindRule
from rolltap.reconstructor.rules import SWITCHABLE, MaskReason
from rolltap.types import CallKind, SamplingFlaw

PAGE = Path(__file__).parents[3] / "docs" / "reconstruction.md"


def cells(header: str) -> list[list[str]]:
    """The cells of each line of the table that begins with `header`."""
    table = PAGE.read_text(encoding="utf-8").partition(header)[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def names(*texts: str) -> set[str]:
    return {name for text in texts for name in re.findall(r"`(\w+)`", text)}


def test_every_kind_and_its_rule_stand_in_the_table() -> None:
    rows = cells("| kind | rule |")
    assert names(*(row[0] for row in rows)) == {kind.value for kind in CallKind}
    assert names(*(row[1] for row in rows)) == {rule.value for rule in KindRule}
    switches = {name: row[-1] for row in rows for name in names(row[0])}
    for kind in CallKind:
        assert (kind.value in switches[kind.value]) == (kind.value in {reason.value for reason in SWITCHABLE})


def test_every_mask_stands_in_its_table() -> None:
    fixed, switchable = cells("| always left out |"), cells("| masked unless switched off:")
    assert names(*(row[0] for row in switchable)) == {reason.value for reason in SWITCHABLE}
    always = {reason.value for reason in MaskReason} - {reason.value for reason in SWITCHABLE}
    assert names(*(row[0] for row in fixed)) == always - {MaskReason.TRAINED.value}


def test_every_finding_stands_in_the_table() -> None:
    told = set(re.findall(r'SessionFinding\(\s*"(\w+)"', inspect.getsource(findings)))
    told |= {name for name, _ in (*findings.UNAPPLIED.values(), *findings.BREAKS.values())}
    told |= {flaw.value for flaw in SamplingFlaw}
    shown = names(*(row[0] for row in cells("| finding | grade |")))
    assert told <= shown
    source = inspect.getsource(findings)
    assert {name for name in shown - told if f'"{name}"' not in source and f".{name.upper()}" not in source} == set()
