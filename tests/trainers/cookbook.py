"""Run in an environment with tinker-cookbook: its own assembly of training data, against the adapter's `Datum`s."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import tinker

from rolltap.trainer_client.adapters.rows import rows_of, trained_runs
from rolltap.trainer_client.adapters.tinker_service import datum_of
from rolltap.trainer_client.recipes import make_recipe
from rolltap.types import Segment

from .world import branching_group


def transitions(part: Segment) -> list[Any]:
    """The segment as the cookbook's rollouts would have made it."""
    from tinker_cookbook.completers import TokensWithLogprobs  # type: ignore[import-not-found]
    from tinker_cookbook.rl.types import Transition  # type: ignore[import-not-found]

    return [
        Transition(
            ob=tinker.ModelInput.from_ints(part.token_ids[:begin].tolist()),
            ac=TokensWithLogprobs(part.token_ids[begin:end].tolist(), part.logprobs[begin:end].tolist()),
            reward=0.0,
            episode_done=False,
        )
        for begin, end in trained_runs(part)
    ]


def main() -> None:
    from tinker_cookbook.rl.data_processing import trajectory_to_data  # type: ignore[import-not-found]
    from tinker_cookbook.rl.types import Trajectory  # type: ignore[import-not-found]

    rows = rows_of([branching_group(f"g{index}", index) for index in range(4)], make_recipe("dr_grpo", {}))
    tokens, compared = sum(row.tokens for row in rows), 0
    for _, of in itertools.groupby(rows, lambda row: row.rollout):
        mine = list(of)
        steps = [step for row in mine for step in transitions(row.segment)]
        whole = Trajectory(transitions=steps, final_ob=tinker.ModelInput.empty())
        theirs = trajectory_to_data(whole, mine[0].advantage / tokens)
        for datum, row in zip(theirs, mine, strict=True):
            same(datum, datum_of(row, tokens))
            compared += 1
    print(f"{compared} rows are the same")


def same(theirs: tinker.Datum, ours: tinker.Datum) -> None:
    """Ours goes on where something stands behind the last sampled token; nothing is trained there."""
    length = theirs.model_input.length
    assert ours.model_input.to_ints()[:length] == theirs.model_input.to_ints()
    for name in ("target_tokens", "logprobs", "advantages"):
        one, other = (datum.loss_fn_inputs[name].to_numpy() for datum in (ours, theirs))
        np.testing.assert_allclose(one[:length], other, rtol=1e-6)
        assert name == "target_tokens" or not one[length:].any()


if __name__ == "__main__":
    main()
