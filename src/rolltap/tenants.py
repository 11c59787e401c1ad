"""The tenant for which the current asyncio task works: a transaction on Postgres reads and writes only its rows.

A tenant is one of several users of a deployment that must not see each other. A policy belongs to one
(`policies.NAME.tenant`), and so does a key; rows that are created with them are the tenant's. The planes begin each
request as `NOBODY`, who sees no row, and call `act_for` with the tenant of its key once they know it. A task inherits
the tenant of the task that starts it. Postgres enforces the separation by row-level security
(`rolltap.calllog.schema`).

Code that must see all tenants uses `acting_for(EVERY_TENANT)`: keys are looked up before their tenant is known
(`session_by_key`, `Keys.working`), and the store's own work (the writer of facts, the registry of processes, versions
of tables, parts of requests) is for all. Rows that `EVERY_TENANT` writes get no tenant automatically.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

DEFAULT_TENANT = "default"
"""The deployment's own: that of the settings' keys, and of policies that name none. On SQLite there is no other."""
EVERY_TENANT = "*"
NOBODY = ""

TENANT_TAG = "rolltap.tenant"
"""The tag that names a session's tenant. Users chose the name `tenant` before. The default tenant's have none."""
TENANT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")

_current: ContextVar[str] = ContextVar("tenant", default=os.environ.get("ROLLTAP_TENANT") or DEFAULT_TENANT)


def current_tenant() -> str:
    """The tenant that this task acts for."""
    return _current.get()


def act_for(tenant: str) -> None:
    """From now on this task acts for `tenant`."""
    _current.set(tenant)


@contextmanager
def acting_for(tenant: str) -> Iterator[None]:
    """Acts for `tenant` within the context."""
    token = _current.set(tenant)
    try:
        yield
    finally:
        _current.reset(token)


def tenant_tags() -> dict[str, str]:
    """The tag of a session that is opened now; none for the default tenant's."""
    tenant = current_tenant()
    return {} if tenant == DEFAULT_TENANT else {TENANT_TAG: tenant}


def tenant_of(tags: Mapping[str, str]) -> str:
    """Whose session has these tags."""
    return tags.get(TENANT_TAG, DEFAULT_TENANT)
