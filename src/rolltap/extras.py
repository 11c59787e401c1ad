"""The optional packages: how to install an extra of this installation of rolltap, whichever way it was installed, the
import of the one that many need, and where the pages are.

rolltap is on no package index, so a bare `pip install 'rolltap[tokens]'` would find nothing, or a stranger's package.
"""

from __future__ import annotations

import json
import shlex
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

from rolltap.errors import ConfigError

DISTRIBUTION = "rolltap"
CHECKOUT = Path(__file__).parents[2]
"""The checkout, where rolltap runs from one."""
_import_lock = Lock()


def import_renderers(user: str) -> Any:
    """The `renderers` package. Raises `ConfigError` that says what `user` lacks if it is not installed.

    Its client of engines, which rolltap does not use, imports `openai` for an annotation: 781 modules, 0.35 CPU seconds
    and 18 MB in every process. A stand-in has that place while the package is imported.
    """
    with _import_lock:
        is_unknown = "renderers" not in sys.modules and "openai" not in sys.modules
        if is_unknown:
            stand_in = ModuleType("openai")
            vars(stand_in)["AsyncOpenAI"] = object
            sys.modules["openai"] = stand_in
        try:
            import renderers
        except ImportError as error:
            raise ConfigError(f"{user} needs {error.name}: {install_line('tokens')}") from error
        finally:
            if is_unknown:
                del sys.modules["openai"]
    return renderers


def install_line(extra: str) -> str:
    """The command that adds `extra`: from the checkout, the repository or the file that this installation is from."""
    origin = _origin()
    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        folder = unquote(urlsplit(url).path)
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}{shlex.quote(f'{folder}[{extra}]')}"
    if "vcs_info" in origin:
        source = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
        return f"pip install {shlex.quote(f'{DISTRIBUTION}[{extra}] @ {source}')}"
    if url:
        return f"pip install {shlex.quote(f'{DISTRIBUTION}[{extra}] @ {url}')}"
    return f"pip install -e '.[{extra}]' in rolltap's checkout"


@cache
def _origin() -> dict[str, Any]:
    """Where pip installed rolltap from (PEP 610); empty where that is not on record."""
    try:
        text = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    return json.loads(text) if text else {}


def page(name: str) -> str:
    """Names a page of the documentation: its path in a checkout, else its address, as a wheel has no pages."""
    path = f"docs/{name}.md"
    return path if (CHECKOUT / path).is_file() else f"{documentation()}/{name}.md"


def documentation() -> str:
    """The address of the pages, by the installed package's own metadata; empty where it has none."""
    try:
        urls = distribution(DISTRIBUTION).metadata.get_all("Project-URL") or []
    except PackageNotFoundError:
        return "the folder docs"
    return next((url.partition(", ")[2] for url in urls if url.startswith("Documentation, ")), "the folder docs")
