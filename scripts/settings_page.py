"""Writes docs/settings.md from the settings' own descriptions: `python scripts/settings_page.py`."""

from __future__ import annotations

from pathlib import Path

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
`ROLLTAP_DATA=/absolute/path`. `rolltap train` reads the section `[trainer]` of the same file:
[its settings](trainer.md#settings).

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


def page() -> str:
    """The page's text."""
    parts = [HEAD]
    for section, model in SECTIONS.items():
        rows = [_row(name, field) for name, field in model.model_fields.items()]
        doc = (model.__doc__ or "").strip()
        parts.append(
            f"\n## [{section}]\n{doc}\n\n| key | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    return "".join(parts)


def _row(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"`{field.default!r}`"
    if isinstance(field.default, BaseModel):
        default = "see below"
    return f"| `{name}` | {default} | {field.description or ''} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
