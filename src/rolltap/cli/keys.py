"""`rolltap keys` and `rolltap audit`: mint, list, rotate and revoke a server's keys, and which key did what."""

from __future__ import annotations

import json
import re
import time
from typing import Annotated

import typer
from rich.table import Column, Table

from rolltap.cli.common import ConfigOption, JsonOption, UrlOption, connect, one_line_errors, one_that_begins
from rolltap.cli.screen import Screen, json_text, say
from rolltap.cli.server_address import PlaneClient
from rolltap.contract.keys import ROLES, KeyBudget, KeyRecord, KeyWithSecret, MintKey, RotateKey
from rolltap.contract.planes import AdminPlane
from rolltap.errors import ConfigError
from rolltap.ids import ID_LENGTH

app = typer.Typer(help="Mint, list, rotate and revoke keys of a running server.", no_args_is_help=True)

KeyArgument = Annotated[str, typer.Argument(help="id, or a unique prefix")]
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
TTL_HELP = "its life: 90s, 15m, 12h, 30d; default: no end (or that of the key you mint with)"
ROLE_HELP = "; ".join(f"{role}: {right}" for role, right in ROLES.items())


@app.command()
@one_line_errors
def mint(
    role: Annotated[str, typer.Argument(help=ROLE_HELP)],
    name: Annotated[str, typer.Option(help="name of the key's owner, shown in the list and the audit log")],
    ttl: Annotated[str, typer.Option(help=TTL_HELP)] = "",
    policy: Annotated[list[str] | None, typer.Option(help="trainer: only these policies; several times")] = None,
    tenant: Annotated[str, typer.Option(help="of this tenant; default: that of the key you mint with")] = "",
    calls: Annotated[float | None, typer.Option(min=0, help="project: calls in all, as 1000 or 1e6")] = None,
    tokens: Annotated[
        float | None, typer.Option(min=0, help="project: prompt and output tokens in all, as 1e9")
    ] = None,
    mb: Annotated[float | None, typer.Option(min=0, help="project: request bodies in all, in MB")] = None,
    per_minute: Annotated[int | None, typer.Option(min=0, help="project: calls within a minute")] = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Mints a key and prints it. It is not shown again."""
    if role not in ROLES:
        raise ConfigError(f"no role {role!r}; known: {', '.join(ROLES)}")
    budget = KeyBudget(_count(calls, "--calls"), _count(tokens, "--tokens"), mb, per_minute)
    body = MintKey(
        role,
        name,
        ttl=seconds_of(ttl, "--ttl") if ttl else None,
        policies=policy or None,
        tenant=tenant or None,
        budget=None if budget == KeyBudget() else budget,
    )
    _print(connect("admin", config, url).ask(AdminPlane.mint_key, body), as_json)


@app.command("list")
@one_line_errors
def list_(as_json: JsonOption = False, url: UrlOption = None, config: ConfigOption = None) -> None:
    """Lists the minted keys, the newest first, without the settings' keys (keys.toml)."""
    keys = connect("admin", config, url).ask(AdminPlane.list_keys).keys
    if as_json:
        say(json_text(keys))
        return
    table = Table(Column("key", no_wrap=True), "name", "role", "tenant", "policies", "used", "minted by", "state")
    for key in keys:
        policies = " ".join(key.policies or ())
        table.add_row(key.id, key.name, key.role, key.tenant, policies, _used(key), key.minted_by, _state(key))
    Screen().print(table)


@app.command()
@one_line_errors
def rotate(
    key: KeyArgument,
    overlap: Annotated[str, typer.Option(help="how long the previous secret stays valid: 90s, 15m, 12h, 30d")] = "1h",
    ttl: Annotated[str, typer.Option(help="new expiry: 90s, 15m, 12h, 30d; default: as it was")] = "",
    as_json: JsonOption = False,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Adds a new secret to a key and prints it. The previous one stays valid for a while."""
    body = RotateKey(seconds_of(overlap, "--overlap"), seconds_of(ttl, "--ttl") if ttl else None)
    plane = connect("admin", config, url)
    _print(plane.ask(AdminPlane.rotate_key, _whole_id(plane, key), body), as_json)


@app.command()
@one_line_errors
def revoke(key: KeyArgument, url: UrlOption = None, config: ConfigOption = None) -> None:
    """Revokes a key and all keys that were minted with it."""
    plane = connect("admin", config, url)
    key = _whole_id(plane, key)
    revoked = plane.ask(AdminPlane.revoke_key, key).revoked
    for id in revoked:
        say(f"key {id} is revoked")
    if not revoked:
        say(f"key {key} was revoked before")


def _whole_id(plane: PlaneClient, text: str) -> str:
    """The id of the one minted key that begins with `text`; ids of the settings' keys are their roles."""
    if len(text) >= ID_LENGTH or text in ROLES:
        return text
    return one_that_begins(text, [key.id for key in plane.ask(AdminPlane.list_keys).keys], "keys")


def _count(number: float | None, option: str) -> int | None:
    """A number that may be written like 1e6, as an integer. `ConfigError` for a fraction."""
    if number is None or number.is_integer():
        return None if number is None else int(number)
    raise ConfigError(f"{option}: {number} is not a whole number")


def seconds_of(text: str, option: str) -> float:
    """Converts a duration like `15m` to seconds. Raises `ConfigError` with the option's name if it is invalid."""
    matched = DURATION.fullmatch(text)
    if matched is None:
        raise ConfigError(f"{option}: {text!r} is not a duration; write 90s, 15m, 12h or 30d")
    return float(matched[1]) * UNITS[matched[2]]


def _print(minted: KeyWithSecret, as_json: bool) -> None:
    if as_json:
        say(json_text(minted))
        return
    say(f"# {minted.role} key {minted.id} ({minted.name}), {_state(minted)}; it is shown only now")
    say(f"export ROLLTAP_{minted.role.upper()}_KEY={minted.key}")


def _used(key: KeyRecord) -> str:
    """What a project's key has used, each beside its budget if it has one: `12/1,000 calls`."""
    if key.role != "project":
        return ""
    budget, used = key.budget, key.used
    amounts = [
        (f"{used.calls:,}", budget.calls, "calls"),
        (f"{used.tokens:,}", budget.tokens, "tokens"),
        (f"{used.body_bytes / 1e6:,.1f}", budget.mb, "MB"),
    ]
    texts = [f"{amount}{'' if most is None else f'/{most:,}'} {unit}" for amount, most, unit in amounts]
    return "\n".join([*texts, *([] if budget.per_minute is None else [f"{budget.per_minute:,}/min"])])


def _state(key: KeyRecord) -> str:
    now = time.time()
    if key.revoked_at is not None:
        return "revoked"
    if key.expires_at is None:
        state = "no end"
    elif key.expires_at <= now:
        return "expired"
    else:
        state = f"ends {time.strftime('%Y-%m-%d %H:%M', time.localtime(key.expires_at))}"
    return f"{state}, rotating" if key.secrets > 1 else state


@one_line_errors
def audit(
    key: Annotated[str, typer.Option(help="only entries of the key with this id")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="maximum number of entries")] = 100,
    as_json: JsonOption = False,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Shows the newest entries of the audit log, including refusals: time, key and request."""
    entries = connect("admin", config, url).ask(AdminPlane.audit, key or None, limit=limit).entries
    if as_json:
        say(json_text(entries))
        return
    table = Table("at", "key", "role", "action", "detail")
    for entry in entries:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.at))
        table.add_row(at, entry.key_id, entry.role, entry.action, json.dumps(entry.detail))
    Screen().print(table)
