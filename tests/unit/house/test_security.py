"""What docs/security.md says is so: its table is of now, its tests are there; secrets and pins are as promised."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

from ...security.mutate import MUTANTS

ROOT = Path(__file__).parents[3]
SECURITY = runpy.run_path(str(ROOT / "scripts" / "security_page.py"))
SECRETS = re.compile(r"(?:.*_)?(?:key|secret|signature|mac|password)")
COMPARED_IN = ("proxy/front", "proxy/sessions", "proxy/viewer", "proxy/planes", "src/rolltap/engine")
"""Folders whose code compares secrets."""
COMPARED = {folder: list((ROOT / folder).glob("*.py")) for folder in COMPARED_IN}
ADVISORIES = {
    "aiohttp": (3, 14, 3),
    "cryptography": (48, 0, 1),
    "pillow": (12, 3, 0),
    "pyjwt": (2, 13, 0),
    "starlette": (1, 3, 1),
}
"""The first releases without a known hole; LiteLLM's malicious ones are named in `FORBIDDEN`."""
FORBIDDEN = {"litellm": {(1, 82, 7), (1, 82, 8), (1, 107, 0)}}


def test_the_tables_of_boundaries_and_controls_are_of_now() -> None:
    assert (ROOT / "docs" / "security.md").read_text(encoding="utf-8") == SECURITY["page"]()
    assert SECURITY["CONTROLS_PAGE"].read_text(encoding="utf-8") == SECURITY["controls"]()
    assert len(SECURITY["CONTROLS"]) == 117


TESTS = {test for control in SECURITY["CONTROLS"] for test in control.tests}
TESTS |= {test for _, *tests in SECURITY["HOLES"] for test in tests}


def test_every_control_names_tests_that_are_there() -> None:
    places = [(ROOT / "tests" / file, test) for file, _, test in (name.partition("::") for name in sorted(TESTS))]
    absent = [test for file, test in places if not re.search(rf"def {test}\(", file.read_text(encoding="utf-8"))]
    assert absent == []


def test_every_control_can_be_removed() -> None:
    """Where a mutant's text does not stand once in its file, nobody knows that its test fails without the control."""
    counts = {each.number: (ROOT / each.file).read_text(encoding="utf-8").count(each.old) for each in MUTANTS}
    assert counts == dict.fromkeys(range(1, len(SECURITY["CONTROLS"]) + 1), 1)


def named_secret(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return bool(SECRETS.fullmatch(name))


def secrets_compared(source: str) -> list[str]:
    """The comparisons of secrets by `==` or `!=`, with anything but a constant."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.Eq | ast.NotEq)
        and any(map(named_secret, (node.left, node.comparators[0])))
        and not any(isinstance(side, ast.Constant) for side in (node.left, node.comparators[0]))
    ]


def test_no_secret_is_compared_with_equals() -> None:
    assert secrets_compared("if sent == self._key: pass")
    assert all(COMPARED.values()), "a folder has moved: name the new one"
    paths = [path for listed in COMPARED.values() for path in listed]
    assert len(paths) > 10
    assert {path.name: found for path in paths if (found := secrets_compared(path.read_text(encoding="utf-8")))} == {}


def pins() -> dict[str, tuple[int, ...]]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = (re.match(r"([\w.-]+)==(\d+(?:\.\d+)*)", line) for line in lines)
    return {match[1].lower(): tuple(map(int, match[2].split("."))) for match in found if match}


def test_pins_are_above_known_advisories() -> None:
    tested = pins()
    assert {name: tested[name] for name, least in ADVISORIES.items() if tested.get(name, least) < least} == {}
    assert {name for name, bad in FORBIDDEN.items() if tested.get(name) in bad} == set()
    assert '"aiohttp>=3.14.3,<4"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
