"""The example of a pretrained model: its tasks can be done, and its teacher does them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rolltap.engine.scripted import Prompt
from rolltap.engine.tiny.tasks import SUBMIT, TinyTask, make_tasks

EXAMPLE = Path(__file__).parents[3] / "examples" / "real-model"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    sys.modules.pop("world", None)
    import world  # type: ignore[import-not-found]

    return world


def told(world: ModuleType, task: TinyTask, turn: int = 0) -> str:
    text = f"<|im_start|>user\n{task.instruction}<|im_end|>\n<|im_start|>assistant\n"
    return world.reply(Prompt([], text, "", turn, "", "")).removeprefix("```bash\n").removesuffix("\n```")


def test_the_teacher_does_every_task_in_every_wording(world: ModuleType, tmp_path: Path) -> None:
    tasks = make_tasks(0, 64, "held_out", world.KINDS_OF_16)
    assert len({task.instruction.replace(task.first, "").replace(task.second, "") for task in tasks}) == 32
    assert len({task.kind.name for task in tasks}) == 16
    for task in tasks:
        folder = tmp_path / task.id
        folder.mkdir()
        task.setup(folder)
        assert task.check(folder) == 0.0, task.instruction
        subprocess.run(told(world, task), shell=True, cwd=folder, check=False)  # grep may find nothing
        assert task.check(folder) == 1.0, task.instruction
        assert told(world, task, turn=1) == SUBMIT


def test_a_teacher_that_errs_errs_always_in_the_same_tasks(world: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = make_tasks(1, 320, "train", world.KINDS_OF_16)
    right = [told(world, task) for task in tasks]
    monkeypatch.setenv("TEACHER_ERRS", "0.4")
    said = [told(world, task) for task in tasks]
    assert said == [told(world, task) for task in tasks]
    wrong = sum(one != other for one, other in zip(said, right, strict=True)) / len(tasks)
    assert 0.25 < wrong < 0.45
