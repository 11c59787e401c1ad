"""Values that a shell completes (`rolltap --install-completion`). What can't be asked for is not completed."""

from __future__ import annotations

from rolltap.cli.common import config_path, connect
from rolltap.errors import RolltapError


def complete_session(incomplete: str) -> list[str]:
    """The running server's newest sessions."""
    try:
        rows = connect("admin", config_path(None)).call("GET", "/sessions")["sessions"]
    except RolltapError:
        return []
    return [row["id"] for row in rows if row["id"].startswith(incomplete)]


def complete_policy(incomplete: str) -> list[str]:
    """The policies of the settings here, else those of the running server."""
    from rolltap.settings import load_settings

    try:
        names = list(load_settings(config_path(None)).policies)
        if not names:
            rows = connect("admin", config_path(None)).call("GET", "/policies")["policies"]
            names = [row["name"] for row in rows]
    except RolltapError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def complete_harness(incomplete: str) -> list[str]:
    """The names of the defined harnesses."""
    from rolltap.harnesses.registry import harness_names

    return [name for name in harness_names() if name.startswith(incomplete)]


def complete_target(incomplete: str) -> list[str]:
    """What `rolltap run` takes by name; where nothing fits, the shell completes the files of tasks."""
    return [*complete_harness(incomplete), *(name for name in ("command",) if name.startswith(incomplete))]


def complete_runtime(incomplete: str) -> list[str]:
    """The runtimes of rollouts."""
    from rolltap.extras import known_names
    from rolltap.harnesses.runtimes.registry import AUTO, ENTRY_POINTS, RUNTIMES

    names = [AUTO, *known_names(RUNTIMES, ENTRY_POINTS)]
    return [name for name in names if name.startswith(incomplete)]


def complete_format(incomplete: str) -> list[str]:
    """The formats of datasets."""
    from rolltap.extras import known_names
    from rolltap.reconstructor.exporters import ENTRY_POINTS, EXPORTERS

    return [name for name in known_names(EXPORTERS, ENTRY_POINTS) if name.startswith(incomplete)]
