"""`rolltap train`: our own trainer on the trainer plane. `rolltap tinker`: our trainer behind Tinker's API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from rolltap.cli.common import ConfigOption, config_path, one_line_errors, plane_url
from rolltap.cli.server_address import kept_key
from rolltap.errors import ConfigError
from rolltap.extras import install_line, page
from rolltap.settings import load_settings, read_settings_file


@one_line_errors
def train(
    policy: Annotated[str, typer.Option(help="policy to train")],
    model: Annotated[Path, typer.Option(help="folder of the model to start from")],
    out: Annotated[Path, typer.Option(help="folder of checkpoints, weights and metrics; the engine must see it")],
    config: ConfigOption = None,
    url: Annotated[
        str | None, typer.Option(help="the server's trainer plane [ROLLTAP_TRAINER_URL, or the settings' trainer_port]")
    ] = None,
    key: Annotated[str | None, typer.Option(help="trainer key [ROLLTAP_TRAINER_KEY, or the server's own]")] = None,
    name: Annotated[str | None, typer.Option(help="the trainer's name; keep it over restarts")] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="take the policy from another trainer, or the name from another run")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="step to train to, counted from the start of the run")
    ] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="groups a step")] = None,
    max_staleness: Annotated[
        int | None, typer.Option(min=0, help="maximum staleness of a group, in weight versions")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help=f"method: a name of {page('recipes')}, or FILE.py [grpo]")] = None,
    lr: Annotated[float | None, typer.Option(min=0, help="learning rate")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="passes over a step's tokens")] = None,
    token_budget: Annotated[int | None, typer.Option(min=1, help="tokens of one forward pass")] = None,
    threads: Annotated[int | None, typer.Option(min=0, help="torch threads; 0: torch's default")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="seed")] = None,
    sink: Annotated[list[str] | None, typer.Option(help="jsonl, tensorboard, wandb, mlflow; several times")] = None,
) -> None:
    """Trains a policy on leased groups, pushing each step's weights. Started again on the same --out, it resumes.

    Everything else is under `trainer` in the settings file. On SIGTERM or Ctrl-C it finishes the
    step, checkpoints and ends.
    """
    url, key = _plane(config_path(config), url, key)
    values = _given(
        url=url,
        name=name,
        take_over=take_over or None,
        steps=steps,
        groups=groups,
        max_staleness=max_staleness,
        seed=seed,
        recipe=recipe,
        optimiser=_given(lr=lr, epochs=epochs),
        compute=_given(token_budget=token_budget, threads=threads),
        report=_given(sinks=tuple(sink) if sink else None),
    )
    try:
        from rolltap.trainer_client.run.loop import run
        from rolltap.trainer_client.settings import load_trainer_settings
    except ImportError as error:
        raise ConfigError(f"the trainer needs {error.name}: {install_line('train')}") from error
    settings = load_trainer_settings(
        config_path(config),
        key=key,
        policy=policy,
        model=model,
        out=out,
        **values,
    )
    run(settings)


def _plane(path: Path | None, url: str | None, key: str | None) -> tuple[str, str]:
    """The trainer plane's URL and key: as given, else from the environment, else from the settings at `path`."""
    url, key = url or os.environ.get("ROLLTAP_TRAINER_URL"), key or os.environ.get("ROLLTAP_TRAINER_KEY")
    if url and key:
        return url, key
    settings = load_settings(path)
    named: str = read_settings_file(path).get("trainer", {}).get("url", "")
    key = key or settings.keys.trainer or kept_key("trainer", settings.data)
    return url or named or plane_url(settings, "trainer"), key


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@one_line_errors
def tinker(
    model: Annotated[Path, typer.Option(help="folder of the base model; adapters are trained over it")],
    out: Annotated[Path, typer.Option(help="folder for saved weights and the key")],
    config: ConfigOption = None,
    name: Annotated[str, typer.Option(help="the base model's name for clients; empty: the folder's path")] = "",
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port; 0 takes a free one")] = 8730,
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
        from rolltap.trainer_client.endpoint.app import run
        from rolltap.trainer_client.settings import load_trainer_settings
    except ImportError as error:
        raise ConfigError(f"the service needs {error.name}: {install_line('tinker')}") from error
    settings = load_trainer_settings(config_path(config), key="", policy="tinker", model=model, out=out)
    run(settings, name, (host, port), key, models, samplers)
