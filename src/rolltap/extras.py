"""Optional packages, and plug-ins of other packages.

`install_line` is the command that adds an extra to this installation of rolltap, whichever way it was installed:
rolltap is on no package index, so `pip install 'rolltap[tokens]'` would find nothing, or a stranger's package.

`lookup` finds an exporter, a harness or another named object: in our registry first, then among the entry points of
installed packages. An entry point names the same kind of object that the registry holds. Our own names win.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.metadata import EntryPoints, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from rolltap.errors import ConfigError, RolltapError
from rolltap.wording import did_you_mean

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
    """The command that adds `extra` to this environment: by the tool that made it, from where rolltap came from."""
    spec = requirement(extra)
    environment = Path(sys.prefix)
    if (environment / "pipx_metadata.json").is_file():
        return f"pipx runpip {DISTRIBUTION} install {spec}"
    if _recorded("INSTALLER").strip() != "uv":
        return f"pip install {spec}"
    if environment.parent.name.startswith("archive-"):  # uvx keeps what it runs in uv's cache
        return f"uvx --from {spec} {DISTRIBUTION}"
    return f"uv pip install --python {shlex.quote(str(environment))} {spec}"


def requirement(extra: str) -> str:
    """What to install for `extra`, as words of a shell: the checkout, the repository or the file that this installation
    is from."""
    origin = json.loads(_recorded("direct_url.json") or "{}")  # PEP 610
    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        folder = unquote(urlsplit(url).path)
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"{editable}{shlex.quote(f'{folder}[{extra}]')}"
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return shlex.quote(f"{DISTRIBUTION}[{extra}] @ {url}") if url else f"-e '.[{extra}]' in rolltap's checkout"


@cache
def _recorded(name: str) -> str:
    """A file of what the installer wrote down beside rolltap; empty where there is none."""
    try:
        return distribution(DISTRIBUTION).read_text(name) or ""
    except PackageNotFoundError:
        return ""


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


T = TypeVar("T")


@lru_cache(maxsize=64)
def _entry_points(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Those that are installed on `path`. Reading them takes 20 ms, and a start asks for some groups several times."""
    return entry_points(group=group)


def _of_group(group: str) -> EntryPoints:
    return _entry_points(group, tuple(sys.path))


def known_names(registry: Mapping[str, object], group: str) -> list[str]:
    """Every name that `lookup` finds, sorted. Nothing is imported for it."""
    return sorted({*registry, *_of_group(group).names})


def lookup(what: str, name: str, registry: Mapping[str, T], group: str, error: type[RolltapError]) -> T:
    """`registry[name]`, else the object that an installed package registers as `name` under entry point `group`.

    Raises `error` for an unknown name, with the known ones, and for a package that cannot be imported.
    """
    if name in registry:
        return registry[name]
    point = next(iter(_of_group(group).select(name=name)), None)
    if point is None:
        names = known_names(registry, group)
        raise error(f"no {what} {name!r}; known: {', '.join(names)}{did_you_mean(name, names)}", param=what.split()[0])
    try:
        return point.load()
    except Exception as failure:  # foreign code: whatever its import raises
        raise error(f"the {what} {name!r} of {point.value} can't be loaded: {failure}") from failure
