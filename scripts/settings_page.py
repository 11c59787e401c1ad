"""Writes docs/settings.md from the settings' own descriptions: `python scripts/settings_page.py`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rolltap.settings import (
    EngineSettings,
    KeySettings,
    LimitSettings,
    ListenSettings,
    PinSettings,
    PolicySettings,
    QueueSettings,
    StoreSettings,
    TracingSettings,
)
from rolltap.trainer_client.settings import TrainerSettings

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
SECTIONS: dict[str, type[BaseModel]] = {
    "listen": ListenSettings,
    "limits": LimitSettings,
    "store": StoreSettings,
    "queue": QueueSettings,
    "tracing": TracingSettings,
    "keys": KeySettings,
    "engines.NAME": EngineSettings,
    "policies.NAME": PolicySettings,
    "policies.NAME.pin": PinSettings,
}
HEAD = """# Settings

`rolltap config init` writes a commented `rolltap.toml` with every key below, `rolltap config schema` a JSON schema for
editors. `rolltap serve` reads `rolltap.toml` (or `--config FILE`) once, at start; an unknown key stops it. The
environment overrides every key as `ROLLTAP_<SECTION>__<KEY>` (`ROLLTAP_LISTEN__AGENT_PORT=9000`); a name with a hyphen
needs `env`: `env 'ROLLTAP_POLICIES__MY-MODEL__MODEL=x'`. `data`, at the top, names the
[data folder](operating.md#start-and-find-it) (default `rolltap-data`). Relative paths in a file start at
its folder, others where the command starts.
In brackets: the default, then other values. Keys that end in `_s` are seconds, in `_mb` MB.

```toml
[engines.main]
kind = "vllm"
url = "http://127.0.0.1:8000"

[policies.my-model]
engine = "main"
tokenizer = "./my-model"
family = "qwen3"
```
"""


TRAINER = """
## [trainer]
Of `rolltap train` ([trainer](trainer.md)). Sections in dots: `[trainer.loss]`, `ROLLTAP_TRAINER__LOSS__KL`.

"""


def page() -> str:
    """The page's text."""
    parts = [HEAD]
    for section, model in SECTIONS.items():
        rows = [_row(name, field) for name, field in model.model_fields.items()]
        parts.append(f"\n## [{section}]\n{inspect.cleandoc(model.__doc__ or '')}\n\n" + "\n".join(rows) + "\n")
    trainer = "\n".join(_row(name, field) for name, field in _flat(TrainerSettings))
    return "".join([*parts, TRAINER, trainer, "\n"])


def _flat(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _flat(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _row(name: str, field: FieldInfo) -> str:
    """A line of a list: the key with its default, other values that it takes, its meaning."""
    default = field.get_default(call_default_factory=True)
    shown = f"`{name}`, required" if field.is_required() else f"`{name}` (`{default!r}`)"
    if isinstance(default, BaseModel):
        shown = f"`{name}`"
    if get_origin(field.annotation) is Literal:
        others = [one for one in get_args(field.annotation) if one != default]
        shown = f"`{name}` ({', '.join(f'`{one!r}`' for one in (default, *others))})"
    return f"* {shown}" + (f": {field.description}" if field.description else "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
