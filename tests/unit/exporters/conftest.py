"""A small tokenizer with a chat template, made here in a moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolltap.engine.tiny import tokenizer as tiny

from .world import World


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.save(tiny.train(tiny.corpus("")), folder)
    return folder


@pytest.fixture(scope="session")
def world(model_folder: Path) -> World:
    return World(model_folder)
