"""Templates as vendors wrote them, of models that rolltap names nowhere: how calls are read, and whole sessions."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rolltap.proxy.continuation.template import LEARNED, TemplateRenderer
from rolltap.tokenizer import HubTokenizer

from ..conftest import FAMILY_CELL
from .cells import family_house, recorded_cell
from .foreign import foreign_family
from .test_recorded_shapes import assert_as_expected
from .vocabularies import model_folder

pytestmark = [pytest.mark.families, pytest.mark.timeout(600)]  # the first one may have to download the templates

LEARNS = (
    "Apertus-8B-Instruct",
    "Apriel-1.6-15b-Thinker-fixed",
    "ByteDance-Seed-OSS",
    "Cohere2MoE",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "GigaChat3.1-10B-A1.8B",
    "MiniMax-M1",
    "MiniMax-M3",
    "NVIDIA-Nemotron-Nano-v2",
    "meetkai-functionary-medium-v3.1",
    "openbmb-MiniCPM5-1B",
    "unsloth-Apriel-1.5",
    "upstage-Solar-Open-100B",
)
KNOWN = {
    "hermes": ("MiMo-VL", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "Reka-Edge", "ibm-granite-granite-4.1"),
    "qwen-xml": ("Qwen3-Coder", "Qwen3.5-4B", "StepFun3.5-Flash", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    "glm": ("GLM-4.6", "GLM-4.7-Flash", "Spark2.5", "inclusionai-ling-3.0-flash", "poolside-Laguna-XS.2"),
    "mistral": ("Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Ministral-3-14B-Reasoning-2512"),
    "deepseek-v4": ("deepseek-ai-DeepSeek-V3.2", "deepseek-ai-DeepSeek-V4"),
    "llama": ("meta-llama-Llama-3.3-70B-Instruct",),
    "minimax": ("MiniMax-M2",),
    "kimi": ("moonshotai-Kimi-K2",),
}
UNREAD = {
    "LFM2-8B-A1B": "the template leaves calls out",
    "ibm-granite-granite-3.3-2B-Instruct": "the template leaves calls out",
    "GigaChat3-10B-A1.8B": "a call is a turn of its own",
    "Kimi-K3": "a reply's text has tags, too",
    "muse-glimmer": "a call's name is its turn's address",
    "meetkai-functionary-medium-v3.2": "the prompt opens the call",
}
FORMATS = {
    **dict.fromkeys(LEARNS, LEARNED),
    **{name: form for form, names in KNOWN.items() for name in names},
    **dict.fromkeys(UNREAD, "none"),
}
SESSIONS = (
    *LEARNS,
    "Reka-Edge",
    "StepFun3.5-Flash",
    "deepseek-ai-DeepSeek-V3.2",
    "mistralai-Ministral-3-14B-Reasoning-2512",
)
ONE_CALL = ("GigaChat3.1-10B-A1.8B",)
"""Templates that write one call a turn."""

NEVER_CLOSES = ("NVIDIA-Nemotron-Nano-v2",)
"""Prompts open thinking, and the template writes a turn without any as if it had not: the model's text is thinking."""


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_s_calls_are_read(name: str) -> None:
    renderer = TemplateRenderer(HubTokenizer(model_folder(foreign_family(name), "tiny")))
    assert renderer.tool_format == FORMATS[name]
    assert all(token in renderer.tokenizer.special_ids for token in renderer.stop_token_ids)


@pytest.mark.parametrize("name", SESSIONS)
async def test_harnesses_work_on_it(name: str, tmp_path: Path, record_property: Any) -> None:
    family = replace(foreign_family(name), parallel=name not in ONE_CALL)
    async with family_house(family, tmp_path, "tiny") as house:
        cells = [await recorded_cell(house, harness) for harness in ("codex", "claude-code", "gemini-cli", "qwen-code")]
    if name in NEVER_CLOSES:
        cells = [
            replace(cell, failures=tuple(each for each in cell.failures if "last reply" not in each)) for cell in cells
        ]
    for cell in cells:
        record_property(FAMILY_CELL, asdict(cell))
    assert_as_expected(cells)
