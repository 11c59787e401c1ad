"""What the commands share: the settings option, and errors as one line."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from rolltap.errors import RolltapError

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML settings; default rolltap.toml where there is one")
]


def one_line_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Ends with status 1 and one line for every error that rolltap raises on purpose."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except RolltapError as error:
            typer.secho(f"rolltap: {error.message}", fg="red", err=True)
            raise typer.Exit(1) from None

    return wrapped


def config_path(given: Path | None) -> Path | None:
    """The settings file to read: the one given, or `rolltap.toml` in this folder if it is there."""
    here = Path("rolltap.toml")
    return given if given is not None else here if here.exists() else None
