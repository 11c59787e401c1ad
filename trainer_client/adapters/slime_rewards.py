"""slime's rewards by group: `--custom-reward-post-process-path rolltap.trainer_client.adapters.slime_rewards.by_group`.

slime assumes that a group's samples are `n_samples_per_prompt` neighbours, and takes a batch of any other size as one
group. A rollout with a break has several samples. So groups are formed by `group_index` here, and the baseline is over
rollouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

GROUPED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""The estimators of slime that centre rewards by group."""

EPSILON = 1e-6


def by_group(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """The samples' own rewards, and those that slime trains on. Samples of a rollout have its reward.

    The latter are the rewards minus their group's mean over rollouts, with `--grpo-std-normalization` divided by the
    standard deviation.
    """
    own = [float(sample.get_reward_value(args)) for sample in samples]
    if args.advantage_estimator not in GROUPED or not args.rewards_normalization:
        return own, own
    groups: defaultdict[Any, dict[Any, float]] = defaultdict(dict)
    for sample, reward in zip(samples, own, strict=True):
        groups[sample.group_index][sample.index if sample.rollout_id is None else sample.rollout_id] = reward
    scaled = args.grpo_std_normalization and args.advantage_estimator != "reinforce_plus_plus_baseline"
    trained = []
    for sample, reward in zip(samples, own, strict=True):
        rewards = list(groups[sample.group_index].values())
        centred = reward - fmean(rewards)
        spread = stdev(rewards) if len(rewards) > 1 else 0.0  # with Bessel's correction, as in `torch.std`
        trained.append(centred / (spread + EPSILON) if scaled else centred)
    return own, trained
