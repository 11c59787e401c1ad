"""What to say where a model's folder is named by its name on the Hugging Face hub: rolltap downloads nothing itself."""

from __future__ import annotations

import re
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def download_hint(path: str | Path) -> str:
    """The command that makes a folder of the model; empty where `path` is no name of a model on the hub."""
    name = str(path)
    if not _HUB_NAME.fullmatch(name) or Path(name).exists():
        return ""
    folder = name.partition("/")[2]
    return f"; of a model on the hub make a folder first: hf download {name} --local-dir {folder}"
