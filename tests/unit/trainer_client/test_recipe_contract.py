"""What every recipe keeps to, those of other packages too: packed or plain, interrupted or not, it learns the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from rolltap.contract.trainer import PolicyScores, PolicyState, ScoredIds, TokenScores
from rolltap.errors import AlignmentError, ConfigError
from rolltap.trainer_client.data.collate import Batch, collate
from rolltap.trainer_client.data.packing import PackedRow, Packer
from rolltap.trainer_client.data.step import PolicyReading, RowView, ScoredPass, Step, view
from rolltap.trainer_client.model.learner import Learner
from rolltap.trainer_client.model.network import PolicyNetwork, Predictions, load_model
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.recipes import RECIPES, make_recipe, recipe_class
from rolltap.trainer_client.recipes.base import MISSING, Recipe
from rolltap.trainer_client.run import planning
from rolltap.trainer_client.run.loop import Trainer
from rolltap.trainer_client.run.teachers import scored_reading
from rolltap.trainer_client.settings import TrainerSettings, load_trainer_settings

from .acting import acted_group
from .making import config, model_folder, network, random_group, recipe_names
from .plane import KEY, TEACHER, Plane
from .test_loop import trainer

QUICK = {
    "gradient": {"grpo", "gspo", "cm2", "ppo", "seeupo", "epo", "skill_sd", "infopo", "hiper", "opd"},
    "loop": {"archer", "epo", "opd"},
    "adapters": {"hiper"},
}
"""Our recipes that between them have every part that a recipe may have; the others' cases are long."""


def cases(test: str) -> list[Any]:
    dear = RECIPES.keys() - QUICK[test]
    return [pytest.param(name, marks=pytest.mark.long if name in dear else ()) for name in recipe_names()]


ONE = Ranks(0, 1, torch.device("cpu"))
GROUPS = [acted_group("a", 1), acted_group("b", 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tagged_model(tmp_path_factory.mktemp("policy") / "model")


def tagged_model(folder: Path) -> Path:
    """A random model; some of its tokens are the tags that HiPER reads."""
    model_folder(folder)
    tagged = ("<switch>SWITCH</switch>", "<subgoal>find</subgoal>", "<subgoal>take</subgoal>", "<action>go</action>")
    words = {tagged[number // 8] if number < 32 and number % 8 == 0 else f"w{number}": number for number in range(64)}
    Tokenizer(WordLevel(words, unk_token="w1")).save(str(folder / "tokenizer.json"))
    return folder


def made(name: str, model: Path, out: Path, **more: Any) -> TrainerSettings:
    base = {"key": KEY, "policy": "policy", "model": model, "out": out, "recipe": name, "groups": 2, "steps": 2}
    fixed = {"optimiser": {"lr": 1e-3}, "compute": {"device": "cpu", "token_budget": 90}}
    known = {one.name for one in fields(recipe_class(name))}
    offered = {"teacher": str(teacher(model)), "teacher_policy": TEACHER, "warm_up": 0, "every": 1}
    options = {key: value for key, value in offered.items() if key in known}
    return load_trainer_settings(**{**base, **fixed, "options": options, **more})


def teacher(model: Path) -> Path:
    """Another model than the policy, beside it."""
    folder = model.parent / "teacher"
    if not folder.exists():
        network(seed=5).model.save_pretrained(folder)
    return folder


class Teacher:
    """A policy of the server with the teacher's weights, as a client scores by it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")

    def policy(self, name: str) -> PolicyState:
        return PolicyState(name, 0, "")

    def score(self, policy: str, sequences: Sequence[ScoredIds], *, top_logprobs: int = 0) -> PolicyScores:
        scores = []
        for one in sequences:
            ids = torch.tensor([list(one.token_ids)])
            with torch.no_grad():
                logprobs = torch.log_softmax(self._model(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
            scores.append(TokenScores(logprobs[one.start - 1 :].tolist()))
        return PolicyScores(policy, 0, scores)


def learner_of(settings: TrainerSettings, recipe: Recipe) -> Learner:
    """The learner of the tiny model, moved a little from where it began, with heads that say something."""
    learner = Learner(settings.model, settings, ONE, recipe)
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in learner.model.parameters():
            weight += 0.01 * torch.randn_like(weight)
    for head in learner.network.heads.parameters():
        torch.nn.init.normal_(head, std=0.1)
    return learner


def packed_readings(learner: Learner, planner: planning.Planner, step: Step, ranks: int = 1) -> Step:
    readings = {}
    for name, one in planner.recipe.passes(step).items():
        if isinstance(one, ScoredPass):
            readings[name] = scored_reading(Teacher(teacher(planner.settings.model)), one, step)
            continue
        views = step.views() if one.views is None else one.views
        packs = planner.packer(ranks, alone=False)(planning.rows_to_read(step, views))
        readouts = [learner.read(one.network, collate(pack)) for pack in packs]
        readings[name] = planning.read_views(step, views, packs, readouts)
    return replace(step, readings=readings)


def plain_readings(learner: Learner, recipe: Recipe, step: Step, model: Path) -> Step:
    readings = {}
    for name, one in recipe.passes(step).items():
        views = step.views() if one.views is None else one.views
        if isinstance(one, ScoredPass):
            network = PolicyNetwork(load_model(teacher(model), torch.float32))
        else:
            network = learner.read_networks.get(one.network, learner.network)
        readings[name] = Plain(network).reading(step, views)
    return replace(step, readings=readings)


def gradient_of(learner: Learner, losses: Sequence[Tensor]) -> Tensor:
    learner.forget()
    torch.stack(list(losses)).sum().backward()
    return torch.cat(
        [torch.zeros(one.numel()) if one.grad is None else one.grad.flatten() for one in learner.network.parameters()]
    )


class Plain:
    """The policy as a reader would write it: eager attention, a row a pass, whole logits."""

    def __init__(self, network: PolicyNetwork) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_config(config(), attn_implementation="eager")
        self.model.load_state_dict(network.model.state_dict())
        self.heads = network.heads
        self.detached = [name for name in self.heads if name in network._detached]

    def predict(self, segments: Sequence[Any]) -> Predictions:
        logprobs, entropies, values = [], [], {name: [] for name in self.heads}
        for part in segments:
            places = torch.from_numpy(np.flatnonzero(part.loss_mask)) - 1
            ids = torch.from_numpy(part.token_ids.astype(np.int64)).unsqueeze(0)
            said = self.model(ids, output_hidden_states=True)
            all_logprobs = torch.log_softmax(said.logits[0], -1)[places]
            logprobs.append(all_logprobs.gather(-1, ids[0, places + 1, None])[:, 0])
            entropies.append(-(all_logprobs.exp() * all_logprobs).sum(-1))
            for name, head in self.heads.items():
                hidden = said.hidden_states[-1][0][places]
                values[name].append(head(hidden.detach() if name in self.detached else hidden)[:, 0])
        joined = {name: torch.cat(found) for name, found in values.items()}
        return Predictions(torch.cat(logprobs), torch.cat(entropies), joined)

    def reading(self, step: Step, views: Sequence[RowView]) -> PolicyReading:
        names = ("logprobs", "entropy", *self.heads)
        found = {name: tuple(np.zeros(len(row.segment), np.float32) for row in step.rows) for name in names}
        with torch.no_grad():
            for shown in views:
                one = self.predict([shown.segment])
                for name, value in {"logprobs": one.logprobs_M, "entropy": one.entropy_M, **one.values}.items():
                    found[name][shown.row][shown.places] = value.numpy()
        return PolicyReading(found["logprobs"], found["entropy"], {name: found[name] for name in self.heads})

    def gradient(self, learner: Learner, losses: Sequence[Tensor]) -> Tensor:
        self.model.zero_grad()
        learner.forget()
        torch.stack(list(losses)).sum().backward()
        named = {**{f"model.{name}": one for name, one in self.model.named_parameters()}}
        named |= {f"heads.{name}": one for name, one in self.heads.named_parameters()}
        return torch.cat(
            [
                torch.zeros(one.numel()) if (grad := named[name].grad) is None else grad.flatten()
                for name, one in learner.network.named_parameters()
            ]
        )


def plain_batch(rows: Sequence[PackedRow]) -> Batch:
    """The loss's part of a batch, of rows one after the other."""

    def joined(of: Any) -> Tensor:
        return torch.from_numpy(np.concatenate([of(row)[row.segment.loss_mask] for row in rows]))

    none = torch.zeros(0, dtype=torch.long)
    return Batch(
        token_ids_N=none, position_ids_N=none, spans=(), sources_U=none, states_M=none,
        targets_M=joined(lambda row: row.segment.token_ids), logprobs_M=joined(lambda row: row.segment.logprobs),
        versions_M=joined(lambda row: row.segment.versions), advantages_M=joined(lambda row: row.advantages),
        weights_M=joined(lambda row: row.weights),
        rollouts_M=joined(lambda row: np.full(len(row), row.rollout)), rows=len(rows), unshared_tokens=0,
        extra={name: joined(lambda row, name=name: row.extra[name]) for name in rows[0].extra},
    )  # fmt: skip


@pytest.mark.parametrize("name", cases("gradient"))
def test_packed_it_has_the_gradient_of_plain_rows(name: str, model: Path, tmp_path: Path) -> None:
    """Its readings too, from which its credit is made; over the batches of each of its updates."""
    settings = made(name, model, tmp_path, loss={"kl": 0.0})
    packed_recipe, plain_recipe = (make_recipe(name, settings.options) for _ in range(2))
    learner = learner_of(settings, packed_recipe)
    step = planning.make_step(GROUPS, settings.loss, number=30, tokenizer=settings.model)
    plain, policy_loss = Plain(learner.network), planning.policy_loss(settings.loss)

    planner = planning.Planner(packed_recipe, settings)
    read = packed_readings(learner, planner, step)
    ours = []
    for rows in planner.updates(read, packed_recipe.credit(read)):
        batches = [collate(pack) for pack in planner.packer(1, alone=False)(rows)]
        ours.append([packed_recipe.loss(learner.predict(one), one, policy_loss).loss for one in batches])

    planner = planning.Planner(plain_recipe, settings)
    read = plain_readings(learner, plain_recipe, step, settings.model)
    theirs = []
    for rows in planner.updates(read, plain_recipe.credit(read)):
        losses = []
        for rollout in sorted({row.rollout for row in rows}):
            own = [row for row in rows if row.rollout == rollout]
            predicted = plain.predict([row.segment for row in own])
            losses.append(plain_recipe.loss(predicted, plain_batch(own), policy_loss).loss)
        theirs.append(losses)

    assert len(ours) == len(theirs) > 0
    for packed, alone in zip(ours, theirs, strict=True):
        found = gradient_of(learner, packed)
        assert found.abs().max() > 1e-5
        torch.testing.assert_close(found, plain.gradient(learner, alone), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", cases("adapters"))
def test_with_adapters_it_has_the_gradient_of_rows_alone(name: str, model: Path, tmp_path: Path) -> None:
    """Packed with shared trunks or a row a pass, of the adapters."""
    settings = made(name, model, tmp_path, loss={"kl": 0.0}, lora={"rank": 2})
    recipe = make_recipe(name, settings.options)
    learner = learner_of(settings, recipe)
    planner = planning.Planner(recipe, settings)
    step = planning.make_step(GROUPS, settings.loss, number=30, tokenizer=settings.model)
    step = packed_readings(learner, planner, step)
    rows = planner.updates(step, recipe.credit(step))[0]
    policy_loss = planning.policy_loss(settings.loss)
    alone = Packer(1, whole=planner.packer(1, alone=False).whole)
    gradients = []
    for packer in (planner.packer(1, alone=False), alone):
        batches = [collate(pack) for pack in packer(rows)]
        losses = [recipe.loss(learner.predict(one), one, policy_loss).loss for one in batches]
        gradients.append(gradient_of(learner, losses))
    assert gradients[0].abs().max() > 1e-6
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-3)


def offer(plane: Plane, start: int, count: int) -> None:
    plane.offer(*(acted_group(f"g{index}", index) for index in range(start, start + count)))


def run(settings: TrainerSettings) -> Trainer:
    one = trainer(settings)
    one.run()
    return one


@pytest.mark.parametrize("name", cases("loop"))
def test_it_steps_through_the_loop_and_resumes_as_if_nothing_had_happened(
    name: str, plane: Plane, url: str, model: Path, tmp_path: Path
) -> None:
    once = made(name, model, tmp_path / "once", url=url)
    offer(plane, 0, 4)
    straight = run(once)
    plane.forget()
    twice = made(name, model, tmp_path / "twice", url=url)
    offer(plane, 0, 4)
    stopped = trainer(twice)
    stopped.checkpoints.save = _dying(stopped.checkpoints.save)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    resumed = run(twice)
    ends = [load_file(one.out / "checkpoints" / "step-2" / "model.safetensors") for one in (once, twice)]
    start = load_file(model / "model.safetensors")
    assert any(not torch.equal(start[key], ends[0][key]) for key in start)
    for key, value in ends[0].items():
        torch.testing.assert_close(ends[1][key], value, atol=1e-6, rtol=1e-5)
    assert state_of(resumed) == pytest.approx(state_of(straight))


def test_the_control_of_a_recipe_is_set_when_it_changes(plane: Plane, url: str, model: Path, tmp_path: Path) -> None:
    """And before the acknowledgement, which makes room for the groups that it is for."""
    offer(plane, 0, 6)
    settings = made("agentgym_rl", model, tmp_path, url=url, steps=3, options={"every": 2, "rounds": (4, 9)})
    run(settings)
    assert plane.controls == [{"max_turns": 4}, {"max_turns": 9}, {}]  # it ends with the run
    acts = [name for name in plane.names() if name in ("control", "ack")]
    assert acts == ["control", "ack", "control", "ack", "ack", "control"]


def _dying(save: Any) -> Any:
    def saves(step: int, *rest: Any) -> Path:
        if step == 2:
            raise KeyboardInterrupt
        return save(step, *rest)

    return saves


def state_of(one: Trainer) -> dict[str, float]:
    """The recipe's state, with every number by its path."""

    def flat(value: Any, path: str) -> Iterator[tuple[str, float]]:
        if isinstance(value, dict | list):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                yield from flat(inner, f"{path}/{key}")
        elif isinstance(value, int | float):
            yield path, float(value)

    return dict(flat(json.loads(json.dumps(one._recipe.state())), ""))


@pytest.mark.parametrize("name", recipe_names())
def test_what_the_record_lacks_is_said_with_the_remedy(name: str) -> None:
    bare = view([random_group("bare", [1.0, 0.0])])
    recipe = make_recipe(name, {})
    if recipe_class(name).needs:
        with pytest.raises(ConfigError) as caught:
            recipe.check(bare)
        assert any(MISSING[need] in caught.value.message for need in recipe.needs)
    else:
        recipe.check(bare)


def test_credit_that_is_no_number_names_rollout_and_turn(model: Path, tmp_path: Path) -> None:
    settings = made("grpo", model, tmp_path)
    step = planning.make_step(GROUPS, settings.loss)
    values = np.zeros(len(step.turns))
    values[1] = np.nan
    with pytest.raises(AlignmentError, match=r"rollout a-r0, turn 0 \(call ar0-01\): the recipe's advantages is nan"):
        planning.rows_to_train(step, step.broadcast_turns(values), settings.loss)


def test_a_run_ends_before_it_acknowledges_what_its_recipe_can_make_nothing_of(
    plane: Plane, url: str, model: Path, tmp_path: Path
) -> None:
    plane.offer(*(random_group(f"g{index}", [1.0, 0.0], seed=index) for index in range(2)))
    with pytest.raises(ConfigError, match="no turn has a reward"):
        run(made("cm2", model, tmp_path, url=url, loss={"kl": 0.0}))
    assert plane.acked == {}
    assert len(plane.ready) == 2


def test_a_curriculum_goes_on_from_what_was_saved(plane: Plane, url: str, model: Path, tmp_path: Path) -> None:
    for index in range(4):
        one = acted_group(f"g{index}", index)
        plane.offer(replace(one, task=replace(one.task, tags=("easy",))))
    first = run(made("sec", model, tmp_path, url=url))
    assert plane.controls[0] == {"curriculum": {"*": 1.0}}
    assert plane.controls[-1] == {}  # a run's control ends with it
    assert [list(control["curriculum"]) for control in plane.controls[1:-1]] == [["*", "easy"]] * 2
    last, count = plane.controls[-2], len(plane.controls)
    resumed = trainer(made("sec", model, tmp_path, url=url, steps=3))
    resumed._resume()
    assert resumed._recipe.state() == first._recipe.state() != {"values": {}}
    assert plane.controls[count:] == [last]
