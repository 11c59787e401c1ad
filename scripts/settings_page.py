"""Writes docs/settings.md from the settings' own descriptions: `python scripts/settings_page.py`."""

from __future__ import annotations

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

`rolltap config init` writes a commented `rolltap.toml` with every key below, and
`rolltap config schema > rolltap.schema.json` a JSON schema by which editors complete and check it.

`rolltap serve` reads `rolltap.toml` (or `--config FILE`) once, at start. Every key can be overridden from the
environment as `ROLLTAP_<SECTION>__<KEY>` (`ROLLTAP_LISTEN__AGENT_PORT=9000`); a name with a hyphen needs `env`:
`env 'ROLLTAP_POLICIES__MY-MODEL__MODEL=x' rolltap serve`. An unknown key stops the start with one
line that names it. At the top of the file, `data` names the folder of the database, the keys and the spool (default
`rolltap-data`). A relative one is looked up where the command starts, not beside the file: in another folder, set
`ROLLTAP_DATA=/absolute/path`. `rolltap train` reads `[trainer]` of the same file.

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
COLUMNS = "| key | default (others) | meaning |\n|---|---|---|\n"


def page() -> str:
    """The page's text."""
    parts = [HEAD]
    for section, model in SECTIONS.items():
        rows = [_row(name, field) for name, field in model.model_fields.items()]
        parts.append(f"\n## [{section}]\n{(model.__doc__ or '').strip()}\n\n{COLUMNS}" + "\n".join(rows) + "\n")
    trainer = "\n".join(_row(name, field) for name, field in _flat(TrainerSettings))
    return "".join([*parts, TRAINER, COLUMNS, trainer, "\n"])


def _flat(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _flat(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _row(name: str, field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    shown = "required" if field.is_required() else f"`{default!r}`"
    if isinstance(default, BaseModel):
        shown = "see below"
    if get_origin(field.annotation) is Literal:
        shown += f" ({', '.join(f'`{one}`' for one in get_args(field.annotation) if one != default)})"
    return f"| `{name}` | {shown} | {(field.description or '').replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
