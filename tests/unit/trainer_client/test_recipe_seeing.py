"""Every recipe on rollouts whose prompts show images: it trains the part of the model that sees, or refuses by name."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltap.contract.trainer import LeasedGroup
from rolltap.errors import ConfigError
from rolltap.images import ImageReader, ImageRule
from rolltap.trainer_client.data.collate import collate
from rolltap.trainer_client.data.packing import PackedRow
from rolltap.trainer_client.recipes import RECIPES, make_recipe
from rolltap.trainer_client.run import planning
from rolltap.types import NO_VERSION, PromptImage, Segment

from ...vision import data_url, picture, vision_folder, vision_model
from .acting import acted_group
from .making import recipe_names
from .test_recipe_contract import gradient_of, learner_of, made, packed_readings, tagged_model

FRAMES = (picture(60, 60), picture(60, 90, (10, 40, 250)))
TEXT_ALONE = {"infopo", "opd"}
"""Recipes that look at prompts without some of their tokens, or have them scored by another server."""

QUICK = {"grpo", "dart", "odysseus", "ppo", "gspo"}
CASES = [
    pytest.param(name, marks=pytest.mark.long if name in RECIPES.keys() - QUICK else ())
    for name in recipe_names()
    if name not in TEXT_ALONE
]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ImageReader:
    rule = ImageRule.of(vision_folder("qwen2_5_vl", tmp_path_factory.mktemp("rule")))
    assert rule is not None
    return ImageReader(rule)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that sees, with the words of the contract suite's; it is its own teacher."""
    folder = vision_model("qwen2_5_vl", tmp_path_factory.mktemp("policy") / "model")
    words = tagged_model(tmp_path_factory.mktemp("words") / "model")
    shutil.copy(words / "tokenizer.json", folder / "tokenizer.json")
    (folder.parent / "teacher").symlink_to(folder)
    return folder


def showing(group: LeasedGroup, reader: ImageReader) -> LeasedGroup:
    """The group, with the images before all that its rollouts said."""
    read = [reader.read(data_url(file)) for file in FRAMES]
    front, images = reader.expanded([reader.rule.token, 5, reader.rule.token, 6], read) or ([], ())

    def shown(one: Segment) -> Segment:
        return with_front(one, front, images)

    records = [
        replace(one, trajectory=replace(one.trajectory, segments=tuple(map(shown, one.trajectory.segments))))
        for one in group.rollouts
    ]
    return replace(group, rollouts=tuple(records), images={hashlib.sha256(file).hexdigest(): file for file in FRAMES})


def with_front(one: Segment, front: list[int], images: tuple[PromptImage, ...]) -> Segment:
    count = len(front)

    def padded(array: Any, value: Any) -> Any:
        return np.concatenate([np.full((count, *array.shape[1:]), value, array.dtype), array])

    return replace(
        one,
        token_ids=np.concatenate([np.array(front, np.int32), one.token_ids]),
        loss_mask=padded(one.loss_mask, False),
        logprobs=padded(one.logprobs, 0.0),
        versions=padded(one.versions, NO_VERSION),
        turns=tuple(replace(turn, start=turn.start + count, end=turn.end + count) for turn in one.turns),
        images=images,
    )


class Case:
    """A recipe's learner, and the rows of its first update."""

    def __init__(self, name: str, model: Path, reader: ImageReader, out: Path) -> None:
        self.settings = made(name, model, out, loss={"kl": 0.0})
        self.recipe = make_recipe(name, self.settings.options)
        self.learner = learner_of(self.settings, self.recipe)
        self.planner = planning.Planner(self.recipe, self.settings)
        groups = [showing(acted_group(one, seed), reader) for seed, one in enumerate("ab", 1)]
        self.step = planning.make_step(groups, self.settings.loss, number=30, tokenizer=self.settings.model)

    def rows(self) -> list[PackedRow]:
        step = packed_readings(self.learner, self.planner, self.step)
        return list(self.planner.updates(step, self.recipe.credit(step))[0])


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_trains_the_part_that_sees(name: str, model: Path, reader: ImageReader, tmp_path: Path) -> None:
    case = Case(name, model, reader, tmp_path)
    policy_loss, learner = planning.policy_loss(case.settings.loss), case.learner
    batches = [collate(pack) for pack in case.planner.packer(1, alone=False)(case.rows())]
    assert all(batch.images for batch in batches)
    gradient_of(learner, [case.recipe.loss(learner.predict(one), one, policy_loss).loss for one in batches])
    seeing = [weight.grad for place, weight in learner.model.named_parameters() if "visual" in place]
    assert max(0.0 if grad is None else float(grad.abs().max()) for grad in seeing) > 1e-7


@pytest.mark.parametrize("name", sorted(TEXT_ALONE))
def test_a_recipe_of_text_alone_says_so(name: str, model: Path, reader: ImageReader, tmp_path: Path) -> None:
    alone = shutil.copytree(model, tmp_path / "model")  # without a teacher beside it, which would see
    with pytest.raises(ConfigError, match="images"):
        Case(name, alone, reader, tmp_path).rows()
