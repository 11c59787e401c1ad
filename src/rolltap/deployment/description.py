"""What each service of the deployment is started with, wherever it runs.

`DeploymentLayout` says where the services find each other and their files: `COMPOSE` for containers, `local_layout` for
the processes of one machine. Everything else is the same for both.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rolltap.settings import KeySettings, PlaneName

PROXIES = ("proxy-1", "proxy-2")
PLANES: tuple[PlaneName, ...] = get_args(PlaneName)
FIRST_PORT = 8700

POSTGRES_SETTINGS = {"max_connections": "200"}
"""Two proxies take 60 connections (`store.connections`), and a command 20."""

REDIS_SETTINGS = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "save": ""}
"""What makes a call durable before it is acknowledged; a proxy refuses a Redis with others."""

PASSWORDS = ("superuser", "store", "dump", "redis", "engine")


@dataclass(frozen=True, slots=True)
class DeploymentLayout:
    """`addresses` are `host:port` by service, for `nginx` and the proxies by `service.plane`.

    `public_url` is where agents find nginx, `listen_host` the address that the services listen on. `key_file` and
    `rules` are Prometheus's files.
    """

    addresses: Mapping[str, str]
    public_url: str
    listen_host: str
    key_file: str
    rules: str

    def port(self, service: str) -> int:
        return int(self.addresses[service].rpartition(":")[2])

    def url(self, service: str) -> str:
        return f"http://{self.addresses[service]}"


def ports_from(first: int) -> dict[str, int]:
    """The port of every service: nginx has the first three, each proxy three of the next tens."""
    ports = {f"nginx.{plane}": first + number for number, plane in enumerate(PLANES)}
    for tens, proxy in enumerate(PROXIES, 1):
        ports |= {f"{proxy}.{plane}": first + 10 * tens + number for number, plane in enumerate(PLANES)}
    beside = ("engine", "postgres", "redis", "prometheus")
    return ports | {name: first + 30 + number for number, name in enumerate(beside)}


RULES = Path(__file__).with_name("alerts.yaml")
"""Prometheus's alerts; deploy/monitoring has a copy."""


def local_layout(ports: Mapping[str, int], folder: Path) -> DeploymentLayout:
    """Everything on the loopback of this machine, with its files in `folder`."""
    addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    return DeploymentLayout(
        addresses, f"http://{addresses['nginx.agent']}", "127.0.0.1", str(folder / "viewer-key"), str(RULES)
    )


def _compose_addresses() -> dict[str, str]:
    own = {"engine": 8730, "postgres": 5432, "redis": 6379, "prometheus": 9090}
    planes = {"agent": 8710, "trainer": 8711, "admin": 8712}
    proxies = {f"{proxy}.{plane}": f"{proxy}:{port}" for proxy in PROXIES for plane, port in planes.items()}
    balancer = {f"nginx.{plane}": f"nginx:{FIRST_PORT + number}" for number, plane in enumerate(PLANES)}
    return {**{name: f"{name}:{port}" for name, port in own.items()}, **proxies, **balancer}


COMPOSE = DeploymentLayout(
    _compose_addresses(),
    public_url=f"http://127.0.0.1:{FIRST_PORT}",
    listen_host="0.0.0.0",
    key_file="/run/secrets/viewer_key",
    rules="/etc/prometheus/alerts.yaml",
)
"""Services reach each other by their names, on the ports that they usually have; agents use a port of the machine."""


def new_secrets() -> dict[str, str]:
    """The keys of the proxies (by role) and the passwords (by service), made now."""
    keys = {role: f"rt-{role}-{secrets.token_urlsafe(32)}" for role in KeySettings.model_fields}
    return keys | {f"{name}_password": secrets.token_hex(24) for name in PASSWORDS}


def proxy_environment(
    layout: DeploymentLayout,
    proxy: str,
    data: str,
    known: Mapping[str, str],
    *,
    redis: bool = True,
    engine: bool = True,
) -> dict[str, str]:
    """The environment of a `rolltap serve`, over the settings file that all proxies share. `engine`: the deployment has
    one of its own, which wants a key."""
    environment = {"ROLLTAP_DATA": data, "ROLLTAP_LISTEN__HOST": layout.listen_host}
    environment |= {f"ROLLTAP_LISTEN__{plane.upper()}_PORT": str(layout.port(f"{proxy}.{plane}")) for plane in PLANES}
    environment["ROLLTAP_LISTEN__PUBLIC_URL"] = layout.public_url
    store = f"rolltap:{known['store_password']}@{layout.addresses['postgres']}/rolltap"
    environment["ROLLTAP_STORE__URL"] = f"postgresql://{store}"
    if redis:
        ingest = f":{known['redis_password']}@{layout.addresses['redis']}/0"
        environment["ROLLTAP_STORE__INGEST"] = f"redis://{ingest}"
    if engine:
        environment["ROLLTAP_ENGINES__MAIN__API_KEY"] = known["engine_password"]
    return environment | {f"ROLLTAP_KEYS__{role.upper()}": known[role] for role in KeySettings.model_fields}


def policy_settings(layout: DeploymentLayout, *, kind: str, model: str, tokenizer: str) -> str:
    """The settings file of the proxies where the deployment has an engine of its own: one policy, `tiny`."""
    values: dict[str, dict[str, Any]] = {
        "engines.main": {"kind": kind, "url": layout.url("engine")},
        "policies.tiny": {"engine": "main", "model": model, "tokenizer": tokenizer, "family": "qwen3"},
    }
    sections = (
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items())
        for name, section in values.items()
    )
    return "\n".join(sections)


def nginx_settings(layout: DeploymentLayout, *, pinned: bool = True) -> str:
    """What is included in nginx's `http` block. `pinned`: a session stays with one proxy while that one is up."""
    planes = [
        {
            "name": plane,
            "servers": [layout.addresses[f"{proxy}.{plane}"] for proxy in PROXIES],
            "listen": f"{layout.listen_host}:{layout.port(f'nginx.{plane}')}",
        }
        for plane in PLANES
    ]
    return _filled("nginx.jinja", planes=planes, pinned=pinned)


def prometheus_settings(layout: DeploymentLayout) -> str:
    targets = json.dumps([layout.addresses[f"{proxy}.admin"] for proxy in PROXIES])
    return _filled("prometheus.jinja", targets=targets, key_file=layout.key_file, rules=layout.rules)


def postgres_arguments() -> list[str]:
    return [part for name, value in POSTGRES_SETTINGS.items() for part in ("-c", f"{name}={value}")]


ROLES = Path(__file__).with_name("roles.sql")


def _filled(template: str, **values: Any) -> str:
    from jinja2 import Environment, StrictUndefined

    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)  # noqa: S701
    return environment.from_string(text).render(**values)
