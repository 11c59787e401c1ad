"""What a recipe is: one method of the field, as a class whose defaults are GRPO by the settings of `[trainer.loss]`.

A recipe is a dataclass; its fields are its options (`[trainer.options]`). It overrides what its method does otherwise:

    settings, needs            before the run: the paper's settings under the user's own; what the record must hold
    networks(), passes(step)   further models, and what they and the policy are read on before `credit`
    heads, entropy_moves, whole             what the policy computes in its loss
    credit(step)               advantages, weights and whatever else its loss wants, as arrays over tokens
    loss(predicted, batch, policy_loss)     the loss of a batch, on every rank
    updates(step, credit)      the optimiser's steps, in order; by default epochs and minibatches of the settings
    admits(group)              which groups are trained
    admits_rollout(rollout)    which rollouts carry loss
    replay(step)               which groups of before come back
    after(step)                the control of the rollouts to come: turn cap, temperature, n, priority, curriculum
    state(), restore(state)    what must survive a restart: by default its fields with `init=False`

All but `loss` run on the lead rank only, so `loss` sees nothing of the state: what it needs travels in `batch.extra`.
A step may be planned again (a lease was lost); the state is put back before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from rolltap.contract.control import RolloutControl
from rolltap.contract.trainer import LeasedGroup, Replay
from rolltap.errors import ConfigError
from rolltap.trainer_client.data.readings import POLICY, Pass, ReadNetwork, ScoredPass, ValueHead
from rolltap.trainer_client.data.step import Credit, Step, StepRollout
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
"""What a recipe may need of the record, and how to get it there."""


@dataclass(frozen=True, slots=True)
class ReplayedGroups:
    """At most `count` groups that `filter` describes; fewer where there are no more.

    They come whole. Which of their rollouts carry loss is for `Recipe.admits_rollout` to say.
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
    """Settings of the paper, as in `[trainer]`; the user's own go over them."""
    needs: ClassVar[tuple[Need, ...]] = ()
    reads_policy: ClassVar[bool] = False
    """Whether `credit` wants `step.readings["policy"]`: log-probs, entropy and heads of the weights before the step."""
    heads: ClassVar[Mapping[str, ValueHead]] = {}
    entropy_moves: ClassVar[bool] = False
    """Whether `predicted.entropy_M` has a gradient."""
    whole: ClassVar[bool] = False
    """Whether all rows of a rollout must be in one batch."""

    def admits(self, group: LeasedGroup) -> bool:
        """Whether a group is trained. The others do not fill a step, are in no table of it, and are acknowledged."""
        return True

    def admits_rollout(self, rollout: StepRollout) -> bool:
        """Whether a rollout carries loss; `rollout.replayed` tells those of replayed groups.

        The others stay in the tables and in their group's baseline, as `MASKED` ones do, and the loss's mean is over
        those that are admitted. A group without any fills a step all the same.
        """
        return True

    def replay(self, step: int) -> ReplayedGroups | None:
        """Which groups of before are trained again beside the fresh ones of the step to `step`."""
        return None

    def networks(self) -> Mapping[str, ReadNetwork]:
        """Further models to read, by name."""
        return {}

    def passes(self, step: Step) -> Mapping[str, Pass | ScoredPass]:
        """What is read before `credit`, into `step.readings` by name."""
        return {POLICY: Pass()} if self.reads_policy else {}

    def after(self, step: int) -> RolloutControl | None:
        """What holds for rollouts that begin after `step` steps, while the run goes on; None leaves it as it is.

        Called when a run begins or goes on (`step` may be 0), and after the `credit` of each step, so the state may say
        what it learned there.
        """
        return None

    def credit(self, step: Step) -> Credit:
        """A_i = (R_i - mean) / (std + 1e-6) within the group, ddof 1; a group of one has 0."""
        return step.broadcast(normalise(step.rewards, step.groups))

    def loss(self, predicted: Predictions, batch: Batch, policy_loss: PolicyLoss) -> Terms:
        """The clipped policy gradient as set in `[trainer.loss]`."""
        return policy_loss(predicted, batch)

    def updates(self, step: Step, credit: Credit) -> Sequence[Credit] | None:
        """One optimiser step each, in this order; None leaves it to `optimiser.epochs` and `minibatches`."""
        return None

    def state(self) -> dict[str, Any]:
        """What `restore` takes, as JSON: the fields that are no options (`init=False`)."""
        return {field.name: getattr(self, field.name) for field in fields(self) if not field.init}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up what `state` gave. A name that the recipe does not have any more is left out."""
        for name in self.state():
            if name in state:
                setattr(self, name, state[name])

    def filtered(self, step: Step) -> Step:
        """The step, in which only rollouts that `admits_rollout` is true of are `trained`."""
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
        """Whether rows whose advantages are all 0 have a gradient: they do where the loss is the recipe's own."""
        return type(self).loss is not Recipe.loss

    def check(self, step: Step) -> None:
        """`ConfigError` where the run's first groups lack what the recipe needs."""
        present: dict[Need, bool] = {
            "turns": bool(step.turns),
            "turn_rewards": any(turn.rewarded for turn in step.turns),
            "role_rewards": any(rollout.roles for rollout in step.rollouts),
            "hints": any(rollout.hint for rollout in step.rollouts),
            "candidates": any("top_ids" in row.segment.extras for row in step.rows),
            "roles": len({turn.agent for turn in step.turns}) > 1,
        }
        for need in self.needs:
            if not present[need]:
                raise ConfigError(f"recipe {type(self).__name__}: {MISSING[need]}")
