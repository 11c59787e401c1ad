"""Low-rank adapters (Hu et al. 2021) by peft: only they are trained. A push sends the merged weights or the adapters.

The adapters are inside the model's own layers, so the rest of the trainer sees the same model with fewer weights that
have a gradient. A run resumes from its initial model and its checkpoint's adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rolltap.errors import ConfigError
from rolltap.extras import install_line
from rolltap.trainer_client.settings import LoraSettings

_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def add_adapters(model: Any, settings: LoraSettings) -> None:
    """Freezes the model and adds adapters to its linear layers. New adapters do not change its outputs.

    `ConfigError` for targets that are not linear layers: adapters of embeddings, convolutions and experts could not be
    pushed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        raise ConfigError(f"trainer.lora: adapters need peft: {install_line('lora')}") from None

    groups = _groups(model)
    targets = [name for target in settings.targets for name in groups.get(target, [target])]
    if any(head == target or head.endswith(f".{target}") for head in groups["unembedding"] for target in targets):
        _untie(model)
    config = LoraConfig(r=settings.rank, target_modules=targets, task_type="CAUSAL_LM")
    config.lora_alpha = settings.alpha  # type: ignore[assignment]  # peft computes with any number
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ConfigError(f"trainer.lora.targets: {str(error).splitlines()[0]}") from error
    foreign = [
        f"{name} ({type(module.get_base_layer()).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer) and not isinstance(module.get_base_layer(), nn.Linear)
    ]
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise ConfigError(f"trainer.lora.targets: only linear layers get adapters; {foreign[0]}{more} is not one")


def _groups(model: Any) -> dict[str, list[str]]:
    """The names of the linear layers by the words of `lora.targets` that stand for several.

    peft's own "all-linear" would include the experts and routers of mixtures.
    """
    head = model.get_output_embeddings()
    linear = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    body = [name for name, one in linear.items() if one is not head]
    return {
        "all-linear": body,
        "attention": [name for name in body if "attn" in name],
        "mlp": [name for name in body if "attn" not in name],
        "unembedding": [name for name, one in linear.items() if one is head],
    }


def _untie(model: Any) -> None:
    """Gives the vocabulary's projection its own weights, so that an adapter can change it without the embedding."""
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False
        model.all_tied_weights_keys = {}


def check_pushable(model: Any, source: Path) -> None:
    """`ConfigError` if the vocabulary's projection has adapters and the model in `source` has no such weights.

    Engines serve the model in `source`, where projection and embedding are one tensor: they would refuse the adapted
    projection, or ignore it.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import AutoConfig

    tied = AutoConfig.from_pretrained(source).get_text_config().tie_word_embeddings
    if tied and isinstance(model.get_output_embeddings(), BaseTunerLayer):
        raise ConfigError(
            "trainer.lora.targets: the vocabulary's projection of this model is its embedding (tie_word_embeddings): "
            "engines have no weights of its own that adapters could change. Leave it out"
        )


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Disables the adapters inside the block."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # enable_adapters() would change which weights have a gradient
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def save_adapters(adapters: Mapping[str, Tensor], settings: LoraSettings, source: Path, folder: Path) -> None:
    """Writes adapters of the model in `source` as peft's folder, which engines load over that model."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    layers = {name.removesuffix(_DOWN).rpartition(".")[2] for name in adapters if name.endswith(_DOWN)}
    config = LoraConfig(r=settings.rank, target_modules=sorted(layers), task_type="CAUSAL_LM")
    config.lora_alpha = settings.alpha  # type: ignore[assignment]  # peft computes with any number
    config.base_model_name_or_path = str(source)
    config.inference_mode = True
    config.save_pretrained(str(folder))
    tensors = {f"base_model.model.{name.replace('.default.', '.')}": weight for name, weight in adapters.items()}
    save_file({name: weight.contiguous() for name, weight in tensors.items()}, folder / "adapter_model.safetensors")


def merged(state: Mapping[str, Tensor], settings: LoraSettings) -> dict[str, Tensor]:
    """The weights of an equal model without adapters: W + alpha / rank · B A, by the plain names."""
    plain: dict[str, Tensor] = {}
    for name, weight in state.items():
        if name.endswith((_DOWN, _UP)):
            continue
        layer, is_adapted, kind = name.partition(_BASE)
        if is_adapted and kind == "weight":
            weight = weight + settings.alpha / settings.rank * (state[layer + _UP] @ state[layer + _DOWN])
        plain[f"{layer}.{kind}" if is_adapted else name] = weight
    return plain
