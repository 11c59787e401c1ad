"""Each seam, taken at its word: a toy of each kind from outside the tree is found by name and passes its contract.

A toy is a module of somebody else's distribution; nothing of ours is edited or patched for it. To hold another seam,
add its toy to `TOYS`: the contract suite must take it up by itself.
"""

from __future__ import annotations

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
