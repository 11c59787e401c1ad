"""What every start makes alike, made once a process. A process of a user's has one server and one client; ours many.

FastAPI makes the validator of each parameter anew for each route of each application, each server audits its model's
template, and each client of a vendor's reads the certificates of some 150 authorities, most of them three times.
"""

from __future__ import annotations

import os
import ssl
from functools import cache
from pathlib import Path
from typing import Any

import certifi
from fastapi._compat import v2

from rolltap.engine.tiny import FOLDER
from rolltap.proxy.call import open_policies
from rolltap.proxy.continuation.fit import Fitting
from rolltap.proxy.continuation.rendering import FamilyRenderer, TokenRenderer


@cache
def keep_starts() -> None:
    """Later calls do nothing."""
    keep_validators()
    keep_fittings()
    keep_authorities()


def keep_validators() -> None:
    """Parameters that are declared alike share a validator, which has no state."""
    made, adapters = v2.ModelField.__post_init__, dict[tuple[Any, ...], tuple[Any, Any]]()

    def kept(field: v2.ModelField) -> None:
        parts = v2.asdict(field.field_info)
        key = parts["annotation"], repr(parts["metadata"]), repr(parts["attributes"]), repr(field.config)
        if key not in adapters:
            made(field)
            adapters[key] = field._type_adapter, parts  # what stands in `key` by its address lives on
        field._type_adapter = adapters[key][0]

    setattr(v2.ModelField, "__post_init__", kept)  # noqa: B010


def keep_fittings() -> None:
    """The audit of our own model's template, by family."""
    made, fittings = open_policies.find_fitting, dict[str, Fitting]()

    def kept(renderer: TokenRenderer) -> Fitting:
        if not isinstance(renderer, FamilyRenderer) or Path(renderer.tokenizer.name_or_path) != FOLDER:
            return made(renderer)
        if renderer.family not in fittings:
            fittings[renderer.family] = made(renderer)
        return fittings[renderer.family]

    setattr(open_policies, "find_fitting", kept)  # noqa: B010


def keep_authorities() -> None:
    """Contexts with the authorities that vendors' clients trust by themselves. One with a test's own is made anew."""
    made, public = ssl.create_default_context, {certifi.where(), os.environ.get("SSL_CERT_FILE", certifi.where())}
    kept = cache(made)

    def create(*purpose: ssl.Purpose, **trusted: Any) -> ssl.SSLContext:
        return (kept if trusted.get("cafile") in public else made)(*purpose, **trusted)

    setattr(ssl, "create_default_context", create)  # noqa: B010
