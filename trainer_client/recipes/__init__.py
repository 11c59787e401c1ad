"""The recipes by name: one file and one line here, an entry point `rolltap.recipes` of another package, or a file."""

from __future__ import annotations

from rolltap.trainer_client.recipe import Recipe
from rolltap.trainer_client.recipes.aem import AEM
from rolltap.trainer_client.recipes.aepo import AEPO
from rolltap.trainer_client.recipes.agentflow import AgentFlow
from rolltap.trainer_client.recipes.agentgym_rl import AgentGymRL
from rolltap.trainer_client.recipes.ai_searchplanner import AISearchPlanner
from rolltap.trainer_client.recipes.archer import ArCHer
from rolltap.trainer_client.recipes.artist import ARTIST
from rolltap.trainer_client.recipes.chain_of_agents import ChainOfAgents
from rolltap.trainer_client.recipes.cm2 import CM2
from rolltap.trainer_client.recipes.dapo import DAPO
from rolltap.trainer_client.recipes.dart import DART
from rolltap.trainer_client.recipes.dr_grpo import DrGRPO
from rolltap.trainer_client.recipes.dr_mas import DrMAS
from rolltap.trainer_client.recipes.epo import EPO
from rolltap.trainer_client.recipes.gigpo import GiGPO
from rolltap.trainer_client.recipes.grpo_tcr import GRPOTCR
from rolltap.trainer_client.recipes.gspo import GSPO
from rolltap.trainer_client.recipes.hiper import HiPER
from rolltap.trainer_client.recipes.infopo import InfoPO
from rolltap.trainer_client.recipes.lite_ppo import LitePPO
from rolltap.trainer_client.recipes.mars import MARS
from rolltap.trainer_client.recipes.mua_rl import MUARL
from rolltap.trainer_client.recipes.odysseus import Odysseus
from rolltap.trainer_client.recipes.opd import OPD
from rolltap.trainer_client.recipes.ppo import PPO
from rolltap.trainer_client.recipes.reinforce import Reinforce
from rolltap.trainer_client.recipes.reinforce_pp import ReinforcePP
from rolltap.trainer_client.recipes.rise import RISE
from rolltap.trainer_client.recipes.rloo import RLOO
from rolltap.trainer_client.recipes.sec import SEC
from rolltap.trainer_client.recipes.seeupo import SeeUPO
from rolltap.trainer_client.recipes.skill_sd import SkillSD
from rolltap.trainer_client.recipes.slea_rl import SLEARL
from rolltap.trainer_client.recipes.spear import SPEAR
from rolltap.trainer_client.recipes.spiral import SPIRAL
from rolltap.trainer_client.recipes.ssp import SSP
from rolltap.trainer_client.recipes.steppo import StepPO
from rolltap.trainer_client.recipes.tcod import TCOD
from rolltap.trainer_client.recipes.tt_opd import TTOPD
from rolltap.trainer_client.recipes.turn_grpo import TurnGRPO
from rolltap.trainer_client.recipes.webagent_r1 import WebAgentR1

RECIPES: dict[str, type[Recipe]] = {
    "aem": AEM,
    "aepo": AEPO,
    "agentflow": AgentFlow,
    "agentgym_rl": AgentGymRL,
    "ai_searchplanner": AISearchPlanner,
    "archer": ArCHer,
    "artist": ARTIST,
    "chain_of_agents": ChainOfAgents,
    "cm2": CM2,
    "dapo": DAPO,
    "dart": DART,
    "dr_grpo": DrGRPO,
    "dr_mas": DrMAS,
    "epo": EPO,
    "gigpo": GiGPO,
    "grpo": Recipe,
    "grpo_tcr": GRPOTCR,
    "gspo": GSPO,
    "hiper": HiPER,
    "infopo": InfoPO,
    "lite_ppo": LitePPO,
    "mars": MARS,
    "mua_rl": MUARL,
    "odysseus": Odysseus,
    "opd": OPD,
    "ppo": PPO,
    "reinforce": Reinforce,
    "reinforce_pp": ReinforcePP,
    "rise": RISE,
    "rloo": RLOO,
    "sec": SEC,
    "seeupo": SeeUPO,
    "skill_sd": SkillSD,
    "slea_rl": SLEARL,
    "spear": SPEAR,
    "spiral": SPIRAL,
    "ssp": SSP,
    "steppo": StepPO,
    "tcod": TCOD,
    "tt_opd": TTOPD,
    "turn_grpo": TurnGRPO,
    "webagent_r1": WebAgentR1,
}
