"""A platform of verl's for a machine without an accelerator: torch on the CPU, gloo between ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase  # type: ignore[import-not-found]
from verl.plugin.platform.platform_manager import set_platform  # type: ignore[import-not-found]

NOTHING = {"total": 0, "used": 0}


class Cpu(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module: Any = SimpleNamespace(
        **{name: getattr(torch.cpu, name) for name in ("synchronize", "current_device", "set_device", "is_available")},
        empty_cache=lambda: None,
        max_memory_allocated=lambda *_: 0,
        max_memory_reserved=lambda *_: 0,
        memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        mem_get_info=lambda *_: (1, 1),
        get_device_name=lambda *_: "cpu",
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=torch.set_rng_state,
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def register() -> None:
    """Before anything of verl's asks what machine it is on."""
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # which FSDP engine is taken; it asks the platform where tensors are
    set_platform(Cpu())
    from verl.models.transformers import monkey_patch  # type: ignore[import-not-found]

    monkey_patch.is_trl_available = lambda: False  # ours stands beside it, and is newer than verl knows
