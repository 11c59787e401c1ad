"""What the learning table is made with: the control's rewards, what a hint says, and that a lost cell is named."""

from __future__ import annotations

import random
import runpy
from pathlib import Path
from typing import Any

import pytest

from .families import FAMILIES, Scores
from .steps import TRAINERS
from .table import Shuffle, cell_of, cells, missing
from .trainers import row


def test_the_control_pays_what_others_earned() -> None:
    """The first has no other yet; calls keep their ids, and are paid by their place."""
    shuffle = Shuffle(random.Random(0))
    paid = [shuffle(Scores(float(number), [(f"c{number}", float(number))], {"maker": 1.0})) for number in range(50)]
    assert paid[0].rollout == 0.0
    assert sum(one.rollout == number for number, one in enumerate(paid)) < 10
    assert all(one.turns == [(f"c{number}", one.rollout)] for number, one in enumerate(paid))
    assert all(number - one.rollout < 32 for number, one in enumerate(paid))


def test_families_have_jobs_for_their_roles_and_hints_of_them() -> None:
    (play,) = FAMILIES["pair"].plays(1, 1, "train")
    assert [job.role for job in play.jobs] == ["maker", "keeper"]
    assert all(
        job.task.instruction in play.hint and job.task.fill(job.task.kind.command) in play.hint for job in play.jobs
    )
    assert play.jobs[0].task.kind != play.jobs[1].task.kind


def test_every_cell_has_its_control() -> None:
    names = [cell.name for cell in cells(3)]
    assert len(names) == len(set(names)) == 3 * 2 * (5 * 3 + 1)
    assert {name.removesuffix("-own") for name in names if name.endswith("-own")} == {
        name.removesuffix("-shuffled") for name in names if name.endswith("-shuffled")
    }


@pytest.mark.parametrize(
    ("leads", "seeds"),
    [
        ((0.5, 0.7, 0.6), 3),
        ((0.2, 0.6, 0.7), 5),
        ((-0.5, -0.7, -0.6), 3),
        ((0.0, 0.0, 0.0), 5),
        ((0.2, 0.6, 0.7, 0.5), 5),  # four would decide it
        ((0.2, 0.6, 0.7, 0.4, 0.5), 5),
        ((-0.2, 0.6, 0.7, -0.4, 0.5), 5),
    ],
)
def test_a_row_that_three_seeds_do_not_decide_gets_five(leads: tuple[float, ...], seeds: int) -> None:
    rows = {(cell.family, cell.method) for cell in cells(1)}
    others = {method: (-9 if method == "grpo" else 1) for _, method in rows}  # no row is near `grpo`
    done = [
        result(family, method, seed, shuffled, 0.2 if shuffled else 0.2 + lead)
        for seed, of_ppo in enumerate(leads)
        for family, method in sorted(rows)
        for lead in [of_ppo if method == "ppo" else others[method] + seed / 10]
        for shuffled in (False, True)
    ]
    wanted = {(one.family, one.method, one.seed) for one in missing(done, 3, "")}
    open_ = {row for row in rows if row[1] == "ppo"} if len(leads) < seeds else set()
    assert wanted == {(*row, seed) for row in open_ for seed in range(len(leads), 5)}
    shown = {row["method"]: row["seeds"] for row in _script("learning_table.py")["_rows"]({"cells": done})}
    assert shown["ppo"] == (3 if len(leads) == 4 else len(leads))
    assert {one.family for one in missing(done, 3, "files")} <= {"files"}
    assert next(missing(done[1:], 3, "")) == cell_of(done[0])


def test_a_row_that_is_not_told_from_grpo_gets_five_and_so_does_grpo() -> None:
    leads = {"grpo": (1.0, 1.2, 1.1), "ppo": (1.2, 1.0, 1.1), "turn_grpo": (3.0, 3.1, 3.2)}
    done = [
        result("files", method, seed, shuffled, 0.2 if shuffled else 0.2 + lead)
        for method, values in leads.items()
        for seed, lead in enumerate(values)
        for shuffled in (False, True)
    ]
    more = {(one.method, one.seed) for one in missing(done, 3, "files") if one.seed >= 3}
    assert more == {(method, seed) for method in ("grpo", "ppo") for seed in (3, 4)}


def test_a_recipe_that_did_not_beat_its_control_is_named() -> None:
    learning = _script("learning_table.py")["learning"]

    def cell(method: str, shuffled: bool, after: float, seed: int = 0) -> dict[str, Any]:
        return result("files", method, seed, shuffled, after)

    head = {
        "planned": 96,
        "groups": 8,
        "rollouts": 8,
        "held_out": 64,
        "temperature": 0.5,
        "cores": 2,
        "python": "3",
    }
    ran = [
        cell(method, shuffled, after, seed)
        for method, leads in (("grpo", (0.5, 0.7, 0.6)), ("ppo", (0.2, 0.6, 0.7)))
        for seed, lead in enumerate(leads)
        for shuffled, after in ((False, 0.2 + lead), (True, 0.2))
    ]
    text = learning({**head, "cells": [*ran, cell("spear", False, 0.9), cell("skill_sd", False, 0.9)]})
    # Leads .5, .7, .6: mean .6, deviation .1; Student's t of 2 degrees of freedom is 4.303: ± .248
    assert "| `files` | `grpo` | 3 | 0.20 | 0.80 | 0.20 | +0.60 ± 0.25 |  |" in text
    assert "| `files` | `ppo` | 3 | 0.20 | 0.70 | 0.20 | +0.50 ± 0.66, undecided | -0.10 ± 0.50, undecided |" in text
    assert "Undecided, as 0 is in the interval: `ppo` on `files` (3 seeds); fewer than 5 seeds are too few" in text
    worse = [
        cell("ppo", shuffled, 0.2 + shuffled * (seed + 9) / 20, seed) for seed in range(3) for shuffled in (False, True)
    ]
    assert "Behind the control: `ppo` on `files` (3 seeds)." in learning({**head, "cells": worse})
    assert "Each of these beats its control." in learning({**head, "cells": ran[:6]})
    assert "14 of 96 runs are measured" in text
    assert "`skill_sd` was measured and is left out" in text
    assert " 12 runs are measured, controls counted." in learning({**head, "planned": 2, "cells": ran})
    assert "Python 3, 2026-11-24 to 2026-11-26.)" in text
    assert "Python 3, 2026-11-24.)" in learning({**head, "cells": [cell("ppo", True, 0.2), cell("ppo", False, 0.9)]})
    assert "spear" not in text  # without its control it is no result


def result(family: str, method: str, seed: int, shuffled: bool, after: float) -> dict[str, Any]:
    common = {"family": family, "seed": seed, "steps": 2, "before": 0.2, "curve": [0.2, 0.3], "seconds": 90.0}
    common["time"] = f"2026-11-{24 + seed}"
    return {**common, "method": method, "shuffled": bool(shuffled), "after": after}


def test_a_trainer_costs_what_its_median_step_does() -> None:
    """A step that waited for a page of memory, or compiled something, is no measure of the others."""
    rows = []
    for name in TRAINERS:
        cpu_s = 2.0 if name == "ours" else 3.0
        steps = [{"trained_tokens": 1000, "cpu_s": seconds} for seconds in (cpu_s, 40.0, cpu_s)]
        rows.append(row([{"trainer": name, "seed": 0, "before": 0.25, "after": 0.5, "seconds": 60.0, "steps": steps}]))
    assert [one["cpu_ms_per_1000"] for one in rows] == [2000.0, 3000.0, 3000.0]
    common = {"held_out": 64, "groups": 8, "rollouts": 8, "temperature": 0.5}
    machine = {"trl": "1.16.0", "cores": 2, "python": "3", "time": "now"}
    text = _script("tables.py")["trainers"]({"rows": rows, **common, **machine})
    assert "| `rolltap train` | 0.25 (0.16 to 0.37) | 0.50 (0.38 to 0.62) | 3 | 60 | 3,000 | 2000 | 1.00 |" in text
    assert text.count("| 3000 | 1.50 |") == len(TRAINERS) - 1


def _script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[2] / "scripts" / name))
