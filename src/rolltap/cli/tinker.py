"""`rolltap tinker`: our trainer behind Tinker's HTTP API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rolltap.cli.common import ConfigOption, config_path, one_line_errors
from rolltap.errors import ConfigError
from rolltap.extras import install_line


@one_line_errors
def tinker(
    model: Annotated[Path, typer.Option(help="folder of the base model; adapters are trained over it")],
    out: Annotated[Path, typer.Option(help="folder for saved weights and the key")],
    config: ConfigOption = None,
    name: Annotated[str, typer.Option(help="the base model's name for clients; empty: the folder's path")] = "",
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port; 0 takes a free one")] = 8730,
    key: Annotated[
        str,
        typer.Option(help="key that clients send, tml-...; empty: one is made in --out", envvar="ROLLTAP_TINKER_KEY"),
    ] = "",
    models: Annotated[int, typer.Option(min=1, help="most models in training at once; each has its own weights")] = 4,
    samplers: Annotated[int, typer.Option(min=1, help="sets of weights that stay loaded for sampling")] = 2,
) -> None:
    """Runs a service that the `tinker` SDK and its recipes train and sample on, in place of Thinking Machines' own.

    Where and how it computes is under `trainer.compute` in the settings file: see docs/settings.md.
    """
    try:
        from rolltap.trainer_client.endpoint.main import run
        from rolltap.trainer_client.settings import load_trainer_settings
    except ImportError as error:
        raise ConfigError(f"the service needs {error.name}: {install_line('tinker')}") from error
    settings = load_trainer_settings(config_path(config), key="", policy="tinker", model=model, out=out)
    run(settings, name, (host, port), key, models, samplers)
