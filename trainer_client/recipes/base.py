"""The base of all recipes: a recipe is one training method, as a class. The base is GRPO with `[trainer.loss]`.

A recipe is a dataclass; its fields are its options (`[trainer.options]`). It overrides what its method changes:

    settings, needs            before the run: the paper's settings (the user's own win); what the record must hold
    networks(), passes(step)   further models; the readings that they and the policy make before `credit`
    heads, entropy_moves, whole             what the policy computes in its loss
    credit(step)               advantages, weights and other arrays over tokens that the loss needs
    loss(predicted, batch, policy_loss)     the loss of a batch, on every rank
    updates(step, credit)      the optimiser's steps, in order; by default the settings' epochs and minibatches
    admits(group)              which groups are trained
    admits_rollout(rollout)    which rollouts carry loss
    replay(step)               which earlier groups are trained again
    after(step)                the control of future rollouts: turn cap, temperature, n, priority, curriculum
    state(), restore(state)    what must survive a restart; by default the fields with `init=False`

All but `loss` run only on the lead rank, so `loss` can't read the state: it gets what it needs in `batch.extra`. A step
may be planned again (if a lease was lost); the state is restored first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from rolltap.contract.control import RolloutControl
from rolltap.contract.trainer import LeasedGroup, Replay
from rolltap.errors import ConfigError
from rolltap.trainer_client.data.step import POLICY, Credit, Pass, ReadNetwork, ScoredPass, Step, StepRollout, ValueHead
from rolltap.trainer_client.recipes.estimators import normalise

if TYPE_CHECKING:  # torch takes seconds to import, and settings are read without it
    from rolltap.trainer_client.data.collate import Batch
    from rolltap.trainer_client.model.loss import PolicyLoss, Terms
    from rolltap.trainer_client.model.network import Predictions

Need = Literal["turns", "turn_rewards", "role_rewards", "roles", "hints", "candidates"]
MISSING: Mapping[Need, str] = {
    "turns": "no rollout has turns: lease trajectories that rolltap reconstructed",
    "turn_rewards": "no turn has a reward: let the evaluator give rewards of scope `call:<id>`",
    "role_rewards": "no role has a reward: let the evaluator give rewards of scope `role:<name>`",
    "hints": "no rollout has a hint: put it into the task's spec, or the detail of a reward, as `hint`",
    "candidates": "no token has its likeliest candidates: set policies.NAME.top_logprobs on the server",
    "roles": "all calls are of one agent: let the harness name its agents, or give the session's callers roles",
}
"""The error for each need that the record does not fulfil: what is missing and how to add it."""


@dataclass(frozen=True, slots=True)
class ReplayedGroups:
    """A request for at most `count` earlier groups that match `filter`.

    Groups are whole; `Recipe.admits_rollout` decides which of their rollouts carry loss.
    """

    count: int
    filter: Replay

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"a recipe replays at least 1 group, not {self.count}: `replay` returns None for none")


@dataclass
class Recipe:
    """GRPO (Shao et al. 2024), and the base of all others."""

    settings: ClassVar[Mapping[str, Any]] = {}
    """Settings of the paper, as in `[trainer]`; the user's own override them."""
    needs: ClassVar[tuple[Need, ...]] = ()
    reads_policy: ClassVar[bool] = False
    """Whether `credit` needs `step.readings["policy"]`: log-probs, entropy and heads of the weights before the step."""
    heads: ClassVar[Mapping[str, ValueHead]] = {}
    entropy_moves: ClassVar[bool] = False
    """Whether `predicted.entropy_M` has a gradient."""
    whole: ClassVar[bool] = False
    """Whether all rows of a rollout must be in one batch."""

    def admits(self, group: LeasedGroup) -> bool:
        """Whether a group is trained. Others don't count towards `groups`, are in no table, and are acknowledged."""
        return True

    def admits_rollout(self, rollout: StepRollout) -> bool:
        """Whether a rollout carries loss; `rollout.replayed` marks those of replayed groups.

        The others stay in the tables and in their group's baseline, as `MASKED` ones do; the loss is a mean over the
        admitted ones. A group with no admitted rollout still counts towards `groups`.
        """
        return True

    def replay(self, step: int) -> ReplayedGroups | None:
        """The earlier groups to train again in step number `step`, in addition to the fresh ones."""
        return None

    def networks(self) -> Mapping[str, ReadNetwork]:
        """Further models to read, by name."""
        return {}

    def passes(self, step: Step) -> Mapping[str, Pass | ScoredPass]:
        """The readings to make before `credit`; their results are in `step.readings` by name."""
        return {POLICY: Pass()} if self.reads_policy else {}

    def after(self, step: int) -> RolloutControl | None:
        """The control of rollouts that begin after `step` steps, until the run ends; None leaves it unchanged.

        Called when a run begins or resumes (`step` may be 0), and after each step's `credit`, so it may use state that
        `credit` has set.
        """
        return None

    def credit(self, step: Step) -> Credit:
        """A_i = (R_i - mean) / (std + 1e-6) within the group, ddof 1; 0 in a group of one."""
        return step.broadcast(normalise(step.rewards, step.groups))

    def loss(self, predicted: Predictions, batch: Batch, policy_loss: PolicyLoss) -> Terms:
        """The clipped policy gradient with the settings of `[trainer.loss]`."""
        return policy_loss(predicted, batch)

    def updates(self, step: Step, credit: Credit) -> Sequence[Credit] | None:
        """The credit of each optimiser step, in order; None: `optimiser.epochs` and `minibatches` decide."""
        return None

    def state(self) -> dict[str, Any]:
        """The input of `restore`, as JSON: the fields that are not options (`init=False`)."""
        return {field.name: getattr(self, field.name) for field in fields(self) if not field.init}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a result of `state`. Names that the recipe no longer has are ignored."""
        for name in self.state():
            if name in state:
                setattr(self, name, state[name])

    def filtered(self, step: Step) -> Step:
        """The step with `trained` False for rollouts that `admits_rollout` refuses."""
        rollouts = tuple(
            rollout if self._checked_admission(rollout) else replace(rollout, trained=False)
            for rollout in step.rollouts
        )
        return replace(step, rollouts=rollouts)

    def _checked_admission(self, rollout: StepRollout) -> bool:
        admitted = self.admits_rollout(rollout)
        if not isinstance(admitted, bool | np.bool_):
            message = f"admits_rollout returned {admitted!r} for rollout {rollout.id}, not True or False"
            raise ConfigError(f"recipe {type(self).__name__}: {message}")
        return bool(admitted)

    @property
    def trains_zero_rows(self) -> bool:
        """Whether rows whose advantages are all 0 may have a gradient: yes if the recipe has its own loss."""
        return type(self).loss is not Recipe.loss

    def check(self, step: Step) -> None:
        """`ConfigError` if the run's first groups lack what the recipe needs."""
        present: dict[Need, bool] = {
            "turns": bool(step.turns),
            "turn_rewards": any(turn.rewarded for turn in step.turns),
            "role_rewards": any(rollout.roles for rollout in step.rollouts),
            "hints": any(rollout.hint for rollout in step.rollouts),
            "candidates": any("top_ids" in row.segment.extras for row in step.rows),
            "roles": step.shared or len({turn.agent for turn in step.turns}) > 1,
        }
        for need in self.needs:
            if not present[need]:
                raise ConfigError(f"recipe {type(self).__name__}: {MISSING[need]}")
