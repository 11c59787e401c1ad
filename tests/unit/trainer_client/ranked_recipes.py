"""Under torchrun: every recipe's first gradient on these ranks (FSDP2), of all weights and of adapters, beside that of
one process.

    torchrun --nproc-per-node 2 -m tests.unit.trainer_client.ranked_recipes MODEL OUT NAME...

The lead prints two lines a recipe: its name, the adapters' rank (0: all weights), and the largest difference as a share
of the largest gradient.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rolltap.trainer_client.data.collate import collate
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.run import planning
from rolltap.trainer_client.run.worker import RankWorker, deal
from rolltap.trainer_client.settings import TrainerSettings

from .test_recipe_contract import GROUPS, ONE, made, packed_readings


def gradient(settings: TrainerSettings, ranks: Ranks) -> Tensor:
    """Of the first update, clipped, over all weights and heads."""
    torch.manual_seed(settings.seed)  # as `rolltap train` does: adapters begin at random
    worker = RankWorker(settings, ranks, None)
    planner = planning.Planner(worker.recipe, settings)
    step = planning.make_step(GROUPS, settings.loss, number=30, tokenizer=settings.model)
    step = packed_readings(worker.learner, planner, step, ranks.size)
    rows = planner.updates(step, worker.recipe.credit(step))[0]
    batches = [collate(pack) for pack in planner.packer(ranks.size, alone=False)(rows)]
    worker.begin(0, [deal(batches, ranks.size)[ranks.rank]])
    worker.gradient(0)
    parts = []
    for weight in worker.learner.network.parameters():
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        parts.append((grad.full_tensor() if isinstance(grad, DTensor) else grad).flatten())
    return torch.cat(parts)


def main() -> None:
    torch.set_num_threads(1)
    model, out, *names = sys.argv[1:]
    ranks = Ranks.of_environment("cpu")
    for name, rank in product(names, (0, 2)):
        settings = made(name, Path(model), Path(out), loss={"kl": 0.0}, lora={"rank": rank})
        sharded, alone = gradient(settings, ranks), gradient(settings, ONE)
        assert alone.abs().max() > 0
        if ranks.lead:
            print(name, rank, float((sharded - alone).abs().max() / alone.abs().max()), flush=True)
    ranks.leave()


if __name__ == "__main__":
    main()
