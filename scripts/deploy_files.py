"""Writes the files of deploy/ that follow from `rolltap.deployment.description`, as `rolltap up --local` does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rolltap.deployment.description import (
    COMPOSE,
    FIRST_PORT,
    RULES,
    local_layout,
    nginx_settings,
    policy_settings,
    ports_from,
    prometheus_settings,
)

DEPLOY = Path(__file__).parents[1] / "deploy"
MADE = "# Made by scripts/deploy_files.py from rolltap.deployment.\n"


def files() -> Mapping[Path, str]:
    local = local_layout(ports_from(FIRST_PORT), Path())
    policy = policy_settings(COMPOSE, kind="rolltap", model="tiny", tokenizer="/opt/rolltap/tiny")
    return {
        DEPLOY / "monitoring" / "alerts.yaml": MADE + RULES.read_text(encoding="utf-8"),
        DEPLOY / "nginx" / "rolltap.conf": MADE + nginx_settings(local),
        DEPLOY / "compose" / "nginx.conf": MADE + nginx_settings(COMPOSE),
        DEPLOY / "compose" / "prometheus.yaml": MADE + prometheus_settings(COMPOSE),
        DEPLOY / "compose" / "rolltap.toml": MADE + "# Put your own engines and policies here.\n" + policy,
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
