"""The trainer's settings: `[trainer]` of a TOML file or the command line, under the environment; frozen.

Every key can be set as `ROLLTAP_TRAINER__<KEY>` or `ROLLTAP_TRAINER__<SECTION>__<KEY>`. The defaults train.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from rolltap.errors import ConfigError
from rolltap.settings import read_settings_file


class TrainerSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LossSettings(TrainerSection):
    """The objective. The presets of papers are in docs/trainer.md."""

    advantage: str = Field("grpo", description="name in rolltap.trainer_client.advantages")
    normalise: Literal["rollout", "token", "constant"] = Field("token", description="what the loss is a mean over")
    length: int = Field(4096, ge=1, description="tokens that `constant` divides a rollout's sum by")
    ratio: Literal["token", "sequence"] = Field("token", description="sequence is GSPO's")
    clip_low: float = Field(0.2, gt=0, description="ratio clip below one")
    clip_high: float = Field(0.2, gt=0, description="ratio clip above one (DAPO: 0.28)")
    clip_dual: float = Field(
        0.0, ge=0, description="most times |A| that a token of negative advantage loses (verl: 3); 0: no limit"
    )
    correction: Literal["engine", "truncated"] = Field(
        "engine", description="ratio against the engine's log-probs, or the trainer's own with truncated importance"
    )
    importance_cap: float = Field(1.0, gt=0, description="`truncated`: largest weight of a token")
    importance_band: tuple[float, float] = Field(
        (0.0, math.inf), description="`truncated`: tokens whose trainer/engine ratio is outside get no loss"
    )
    kl: float = Field(0.0, ge=0, description="weight of the divergence from the model at the start of the run")
    overlong_limit: int = Field(0, ge=0, description="trained tokens at which the reward has fallen by 1; 0: never")
    overlong_buffer: int = Field(4096, ge=1, description="tokens before the limit over which it falls")
    drop_zero_variance: bool = Field(False, description="lease on until enough groups have rewards that differ (DAPO)")


class OptimiserSettings(TrainerSection):
    """AdamW."""

    lr: float = Field(1e-6, gt=0, description="learning rate")
    warmup: int = Field(0, ge=0, description="steps over which it rises")
    lr_end: float = Field(1.0, ge=0, le=1, description="share of it left at the last step; it falls on a line")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's two decay rates")
    grad_clip: float = Field(1.0, gt=0, description="largest gradient norm")
    epochs: int = Field(1, ge=1, description="passes over a step's tokens")
    minibatches: int = Field(1, ge=1, description="updates a pass")


class ComputeSettings(TrainerSection):
    """Where and how it is computed."""

    device: str = Field("", description="torch device; empty: CUDA where there is one, else the CPU")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of activations; auto: bfloat16 on CUDA, float32 else. Weights are always float32"
    )
    token_budget: int = Field(16_384, ge=1, description="tokens of one forward pass")
    share_prefixes: bool = Field(True, description="compute what segments have in common at their start once")
    gradient_checkpointing: bool = Field(False, description="trade a third more compute for activations' memory")
    temperature: float = Field(1.0, gt=0, description="temperature that the engine's log-probs are of")
    threads: int = Field(0, ge=0, description="torch threads; 0 leaves torch's default")


class LoraSettings(TrainerSection):
    """Low-rank adapters (needs peft)."""

    rank: int = Field(0, ge=0, description="rank; 0 trains all weights")
    alpha: float = Field(32.0, gt=0, description="scale")
    targets: tuple[str, ...] = Field(("all-linear",), description="module names, or all-linear")
    push: Literal["merged", "adapter"] = Field(
        "merged", description="what engines are pushed: merged weights, or only the adapter (vLLM)"
    )


class PushSettings(TrainerSection):
    """How engines get new weights."""

    transfer: Literal["disk", "distributed"] = Field(
        "disk", description="a folder that engines load, or a process group over which weights are sent"
    )
    address: str = Field("127.0.0.1", description="`distributed`: this machine, as engines reach it")
    port: int = Field(0, ge=0, le=65_535, description="`distributed`: where they meet it; 0: any free port")
    backend: Literal["", "gloo", "nccl"] = Field("", description="`distributed`: empty is nccl on CUDA, else gloo")
    timeout_s: float = Field(
        300.0, gt=0, description="`distributed`: longest wait of one rank for the others; all may take 2 minutes more"
    )


class ReportSettings(TrainerSection):
    """What is shown, and where."""

    sinks: tuple[str, ...] = Field(("jsonl",), description="names in rolltap.trainer_client.sinks")
    project: str = Field("rolltap", description="project or experiment at W&B and MLflow")
    mismatch: float = Field(0.2, gt=0, description="|log trainer/engine| of a token over which it is counted")


class TrainerSettings(BaseSettings):
    """One training run."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="ROLLTAP_TRAINER__",
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    url: str = Field("http://127.0.0.1:8711", description="the server's trainer plane")
    key: str = Field(description="trainer key")
    policy: str = Field(description="policy to train")
    name: str = Field("trainer", min_length=1, description="this trainer: leases and rewinds go by it; keep it")
    model: Path = Field(description="folder of the model to start from")
    out: Path = Field(description="folder of checkpoints, pushed weights and metrics; engines must see it (`disk`)")
    steps: int = Field(100, ge=1, description="step to train to; a resumed run goes on to this number")
    groups: int = Field(8, ge=1, description="groups a step")
    max_staleness: int = Field(1, ge=0, description="most weight versions that a group may be behind")
    lease_ttl: float = Field(600.0, gt=0, description="seconds after which a dead trainer's groups are others'")
    update_mode: Literal["keep", "drain", "abort"] = Field("keep", description="calls in flight at a push")
    checkpoint_every: int = Field(1, ge=1, description="steps between checkpoints")
    checkpoints_kept: int = Field(2, ge=1, description="checkpoints kept")
    seed: int = Field(0, description="seed of minibatches and adapters")
    loss: LossSettings = LossSettings()  # type: ignore[call-arg]
    optimiser: OptimiserSettings = OptimiserSettings()  # type: ignore[call-arg]
    compute: ComputeSettings = ComputeSettings()  # type: ignore[call-arg]
    lora: LoraSettings = LoraSettings()  # type: ignore[call-arg]
    push: PushSettings = PushSettings()  # type: ignore[call-arg]
    report: ReportSettings = ReportSettings()  # type: ignore[call-arg]

    @model_validator(mode="after")
    def _adapters_are_folders(self) -> Self:
        if self.push.transfer == "distributed" and self.lora.rank and self.lora.push == "adapter":
            raise ValueError("push.transfer = 'distributed' sends whole weights: leave lora.push at 'merged'")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings


def load_trainer_settings(path: Path | None = None, **given: Any) -> TrainerSettings:
    """`[trainer]` of the file at `path` with `given` over it, under the environment; `ConfigError` names a bad key."""
    values = read_settings_file(path).get("trainer", {})
    try:
        return TrainerSettings(**_merged(values, given))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in ("trainer", *first["loc"]))
        plain = "no such key; the known ones are in docs/trainer.md"
        said = plain if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}: {said}") from error


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        held = merged.get(name)
        merged[name] = _merged(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return merged
