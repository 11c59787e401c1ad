"""The model families of the matrix: their renderers and chat templates, their special tokens and their vocabularies.

A family is rendered by its name in the `renderers` package, or by a chat template: one of trl's wheel, or one of
`templates/`, which follows rules that a vendor has published. Every family of the package and every template with tools
of the wheel is here (`test_recorded_shapes.py` compares the lists).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

OWN_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Markup:
    """The tokens of a family's format.

    `control` end turns and name roles, `words` stand inside a turn; both are single tokens. `ends` are those that end
    a sampled turn, as in a model's `generation_config.json`; the first is the tokenizer's own. `begin` begins a prompt,
    if the template asks for one. `thinking` is what opens and closes a thought.
    """

    control: tuple[str, ...]
    ends: tuple[str, ...]
    begin: str = ""
    words: tuple[str, ...] = ()
    thinking: tuple[str, str] = ("<think>", "</think>")

    @property
    def end(self) -> str:
        return self.ends[0]

    @property
    def tokens(self) -> tuple[str, ...]:
        return (*self.control, *self.words)


@dataclass(frozen=True, slots=True)
class Family:
    """One column of the matrix.

    `renderer` is a name of the `renderers` package; without it, `template` names the chat template's file without its
    suffix. `vocabulary` is a key of `vocabularies.OWN_VOCABULARIES`. `tools` False: the format has no tool calls, so
    the model answers in text. `reads` False: the proxy knows no reader for the calls of this template, so that they
    reach the harness as text. `parallel` False: the format holds one call a turn. `like` names the family whose cells
    with real harnesses stand for this one's, too, for templates that differ from it in little.
    """

    name: str
    markup: Markup
    renderer: str = ""
    template: str = ""
    vocabulary: str = "qwen3"
    tools: bool = True
    reads: bool = True
    parallel: bool = True
    like: str = ""
    folder: Path | None = None
    """Where the template is, if not in `templates/` or trl's wheel."""

    @property
    def by(self) -> str:
        """What renders it, as tables show it."""
        return f"renderers:{self.renderer}" if self.renderer else f"template:{self.template}"

    def template_text(self) -> str:
        """The chat template; empty for a family of the package."""
        if self.renderer:
            return ""
        own = (self.folder or OWN_TEMPLATES) / f"{self.template}.jinja"
        return (own if own.exists() else trl_templates() / own.name).read_text(encoding="utf-8")


def trl_templates() -> Path:
    """The folder of templates in the installed wheel of trl."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None, "the tests need trl, for its templates"
    return Path(next(iter(spec.submodule_search_locations or ()))) / "chat_templates"


_CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THINKS = ("<think>", "</think>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

QWEN = Markup(_CHATML, ("<|im_end|>", "<|endoftext|>"), words=(*_CALLS, *_THINKS, *_VISION))
PLAIN = Markup(_CHATML, ("<|im_end|>",))
NEMOTRON = Markup((*_CHATML, "<image>"), ("<|im_end|>", "<|endoftext|>"), words=(*_CALLS, *_THINKS))
GLM = Markup(
    ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ("<|user|>", "<|observation|>", "<|endoftext|>"),
    words=(*_THINKS, *_CALLS, *_ARGUMENTS),
)
KIMI = Markup(
    (
        "<|endoftext|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>",
        "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>",
    ),
    ("<|im_end|>",),
    words=(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>", *_THINKS,
    ),
)  # fmt: skip
MINIMAX = Markup(("]~!b[", "]~b]", "[e~["), ("[e~[",), words=("<minimax:tool_call>", "</minimax:tool_call>", *_THINKS))
LAGUNA = Markup(
    ("〈|EOS|〉", "<assistant>", "</assistant>"),
    ("</assistant>", "〈|EOS|〉"),
    words=(*_THINKS, "<tool_call>", "</tool_call>"),
)
HY = Markup(
    tuple(
        f"<｜{name}:opensource｜>"
        for name in ("hy_begin_of_sentence", "hy_eos", "hy_User", "hy_Assistant", "reasoning_mode")
    ),
    ("<｜hy_eos:opensource｜>",),
    words=tuple(
        f"<{slash}{name}:opensource>"
        for name in ("think", "tool_calls", "tool_call", "arg_key", "arg_value", "tool_responses", "tool_response")
        for slash in ("", "/")
    ) + ("<tool_sep:opensource>",),
    thinking=("<think:opensource>", "</think:opensource>"),
)  # fmt: skip
INKLING = Markup(
    (
        "<|message_user|>", "<|message_model|>", "<|message_system|>", "<|message_tool|>", "<|content_text|>",
        "<|content_thinking|>", "<|content_image|>", "<|content_audio_input|>", "<|content_xml|>",
        "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>", "<|content_model_end_sampling|>",
        "<|end_message|>", "<|audio_end|>", "<|unused_200054|>", "<|unused_200053|>", "<|endoftext|>",
    ),
    ("<|content_model_end_sampling|>", "<|endoftext|>"),
    thinking=("<|content_thinking|>", "<|end_message|>"),
)  # fmt: skip
LLAMA = Markup(
    (
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
        "<|python_tag|>",
    ),
    ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    begin="<|begin_of_text|>",
)  # fmt: skip
DEEPSEEK = Markup(
    (
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜▁pad▁｜>",
        "<｜latest_reminder｜>",
        *(f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")),
    ),
    ("<｜end▁of▁sentence｜>",),
    begin="<｜begin▁of▁sentence｜>",
    words=(
        *(
            f"<｜tool▁{name}▁{side}｜>"
            for name in ("calls", "call", "outputs", "output")
            for side in ("begin", "end")
        ),
        "<｜tool▁sep｜>", "｜DSML｜", *_THINKS,
    ),
)  # fmt: skip
GEMMA_3 = Markup(
    ("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
    ("<end_of_turn>", "<eos>"),
    begin="<bos>",
)
GEMMA_4 = Markup(
    (
        "<bos>", "<eos>", "<pad>", "<|turn>", "<turn|>", "<|think|>", "<|image>", "<|image|>", "<image|>", "<|audio|>",
        "<|video|>",
    ),
    ("<turn|>", "<|tool_response>", "<eos>"),
    begin="<bos>",
    words=(
        "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
        "<tool_response|>", '<|"|>',
    ),
    thinking=("<|channel>thought\n", "<channel|>"),
)  # fmt: skip
HARMONY = Markup(
    (
        "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
        "<|message|>", "<|call|>",
    ),
    ("<|return|>", "<|call|>", "<|endoftext|>"),
    begin="<|startoftext|>",
    thinking=("<|channel|>analysis<|message|>", "<|end|>"),
)  # fmt: skip
LFM = Markup(
    ("<|startoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<image>"),
    ("<|im_end|>",),
    begin="<|startoftext|>",
    words=(
        *(f"<|tool_{name}_{side}|>" for name in ("list", "call", "response") for side in ("start", "end")),
        *_THINKS,
    ),
)
MUSE = Markup(
    (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start|>",
        "<|message|>",
        "<|eom|>",
        "<|eot|>",
        "<|patch|>",
        "<|video|>",
    ),
    ("<|eot|>",),
    begin="<|begin_of_text|>",
    thinking=(" to=self<|message|>", "<|eom|>"),
)
MISTRAL = Markup(
    ("<s>", "</s>", "<unk>"),
    ("</s>",),
    begin="<s>",
    words=(
        "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CONTENT]",
    ),
)  # fmt: skip
COHERE = Markup(
    (
        "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
        "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>",
    ),
    ("<|END_OF_TURN_TOKEN|>",),
    begin="<BOS_TOKEN>",
)  # fmt: skip
PHI = Markup(("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), ("<|end|>", "<|endoftext|>"))

PACKAGE_FAMILIES: tuple[Family, ...] = tuple(
    replace(family, renderer=family.name)
    for family in (
        Family("qwen3", QWEN),
        Family("prime-qwen3", QWEN),
        Family("qwen3.5", QWEN),
        Family("qwen3.6", QWEN),
        Family("qwen3.8", QWEN),
        Family("qwen3-vl", QWEN),
        Family("gemma4", GEMMA_4, vocabulary="gemma3"),
        Family("glm-4.5", GLM),
        Family("glm-5", GLM),
        Family("glm-5.1", GLM),
        Family("glm-5.3", GLM),
        Family("gpt-oss", HARMONY, vocabulary="gptoss", parallel=False),
        Family("hy3", HY),
        Family("inkling", INKLING),
        Family("kimi-k2", KIMI),
        Family("kimi-k2.5", KIMI),
        Family("laguna-xs.2", LAGUNA),
        Family("laguna-m.1", LAGUNA),
        Family("laguna-xs-2.1", LAGUNA),
        Family("laguna-s-2.1", LAGUNA),
        Family("llama-3", LLAMA, vocabulary="llama3_1", parallel=False),
        Family("minimax-m2", MINIMAX),
        Family("nemotron-3", NEMOTRON),
        Family("nemotron-3-ultra", NEMOTRON),
        Family("nemotron-3.5", NEMOTRON),
        Family("deepseek-v3", DEEPSEEK, vocabulary="deepseek_v3"),
        Family("deepseek-r1", DEEPSEEK, vocabulary="deepseek_v3"),
        Family("deepseek-v4", DEEPSEEK, vocabulary="deepseek_v3"),
    )
)


def _template(name: str, markup: Markup, **more: str | bool) -> Family:
    return Family(f"{name} (template)", markup, template=name, **more)  # type: ignore[arg-type]


_TRL: Mapping[str, Family] = {
    family.template: family
    for family in (
        _template("qwen2_5", QWEN),
        _template("qwen3", QWEN),
        _template("qwen3_instruct_2507", QWEN),
        _template("qwen3_5_think", QWEN),
        _template("qwen3_5_nothink", QWEN),
        _template("qwen3_6", QWEN),
        _template("qwen3_8", QWEN),
        _template("qwen3_vl", QWEN),
        _template("nemotron_3_nano", NEMOTRON),
        _template("nemotron_3_super", NEMOTRON),
        _template("nemotron_3_ultra", NEMOTRON),
        _template("nemotron_3_5_lightning", NEMOTRON),
        _template("glm4moe", GLM),
        _template("deepseekv3", DEEPSEEK, vocabulary="deepseek_v3"),
        _template("llama3_1", LLAMA, vocabulary="llama3_1", parallel=False),
        _template("llama3_2", LLAMA, vocabulary="llama3_1", parallel=False),
        _template("gptoss", HARMONY, reads=False, vocabulary="gptoss", parallel=False),
        _template("gemma4", GEMMA_4, vocabulary="gemma3"),
        _template("gemma4_v2", GEMMA_4, vocabulary="gemma3", like="gemma4"),
        _template("gemma4_v3", GEMMA_4, vocabulary="gemma3", like="gemma4"),
        _template("gemma4_v4", GEMMA_4, vocabulary="gemma3", like="gemma4"),
        _template("gemma4_v5", GEMMA_4, vocabulary="gemma3", like="gemma4"),
        _template("diffusion_gemma", GEMMA_4, vocabulary="gemma3", like="gemma4"),
        _template("lfm2", LFM, tools=False),
        _template("lfm2_v2", LFM),
        _template("lfm2_2_5", LFM),
        _template("lfm2_2_5_v2", LFM, like="lfm2_2_5"),
        _template("lfm2_2_5_vl", LFM, like="lfm2_2_5"),
        _template("muse_glimmer", MUSE, reads=False),
    )
}

TRAINING = "_training"
"""The suffix of the templates that trl has changed for training: they render nearly as the model's own do."""


def _training_templates() -> tuple[Family, ...]:
    return tuple(
        replace(family, name=f"{name}{TRAINING} (template)", template=name + TRAINING, like=family.like or name)
        for name, family in _TRL.items()
        if (trl_templates() / f"{name}{TRAINING}.jinja").exists()
    )


WITHOUT_TOOLS: tuple[Family, ...] = (
    _template("gemma3", GEMMA_3, vocabulary="gemma3", tools=False),
    _template("gemma", GEMMA_3, vocabulary="gemma3", tools=False, like="gemma3"),
    _template("llama3", LLAMA, vocabulary="llama3_1", tools=False, like="gemma3"),
    _template("deepseek_r1_distill", DEEPSEEK, vocabulary="deepseek_v3", tools=False, like="gemma3"),
    _template("cohere", COHERE, tools=False, like="gemma3"),
    _template("cohere2", COHERE, tools=False, like="gemma3"),
    _template("phi3", PHI, tools=False, like="gemma3"),
    _template("phi3_5", PHI, tools=False, like="gemma3"),
)

OWN: tuple[Family, ...] = (
    _template("mistral_v3", MISTRAL),
    _template("mistral_v7", MISTRAL),
    _template("devstral", MISTRAL),
    _template("plain", PLAIN, tools=False),
)

FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (*PACKAGE_FAMILIES, *_TRL.values(), *_training_templates(), *OWN, *WITHOUT_TOOLS)
}
"""All families by name: the package's, trl's templates, the published rules, and templates without tools."""
