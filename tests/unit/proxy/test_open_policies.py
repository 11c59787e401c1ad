"""Policies of one model share what a vocabulary costs."""

from __future__ import annotations

from typing import Any

from rolltap.engine.tiny import FOLDER
from rolltap.protocols.handles import Handles
from rolltap.proxy.call.open_policies import open_policies
from rolltap.proxy.engines.prompts import Prompts
from rolltap.settings import Settings


def test_policies_of_one_model_share_its_tokenizer_and_audit() -> None:
    model = {"engine": "main", "tokenizer": str(FOLDER), "family": "qwen3"}
    named: dict[str, Any] = {
        "one": model,
        "other": {**model, "pin": {"thinking": False}, "tokenizer": f"{FOLDER}/../{FOLDER.name}"},
        "template": {**model, "family": ""},
    }
    settings = Settings.model_validate(
        {"engines": {"main": {"kind": "vllm", "url": "http://127.0.0.1:9"}}, "policies": named}
    )
    policies, _ = open_policies(settings, Handles(b"0123456789abcdef"), None, Prompts())  # type: ignore[arg-type]
    one, other, template = (policies[name].source.continuation for name in named)  # type: ignore[union-attr]
    assert one.renderer is other.renderer
    assert one.fitting is other.fitting
    assert template.renderer is not one.renderer
    assert one is not other
