"""The recipes by name: one file and one line here, an entry point `rolltap.recipes` of another package, or a file.

A file `FILE.py` defines one class that derives from `Recipe`.
"""

from __future__ import annotations

from rolltap.trainer_client.recipe import Recipe
from rolltap.trainer_client.recipes.dr_grpo import DrGRPO
from rolltap.trainer_client.recipes.lite_ppo import LitePPO
from rolltap.trainer_client.recipes.reinforce import Reinforce
from rolltap.trainer_client.recipes.rloo import RLOO

RECIPES: dict[str, type[Recipe]] = {
    "dr_grpo": DrGRPO,
    "grpo": Recipe,
    "lite_ppo": LitePPO,
    "reinforce": Reinforce,
    "rloo": RLOO,
}
