"""Several policies in one rollout, one for each role.

A role's name is the model that the harness asks for: `{"solver": "tiny", "judge": "frozen"}`. At most one of the
policies is trainable: the group belongs to it, and only its calls carry loss. The session's tag `roles` holds the
roles. The main role is the first one with the session's policy: its calls are the main agent's. Other roles' calls are
recorded under the role's name (`Call.agent`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from rolltap.errors import InvalidRequest
from rolltap.proxy.conversation.chat import ChatRequest
from rolltap.types import CallKind, Session

if TYPE_CHECKING:
    from rolltap.proxy.call.policies import Policies

TAG = "roles"
MAX_ROLES = 16
NAME = re.compile(r"[\w.:/-]{1,128}")


def trained_policy(roles: Mapping[str, str], policies: Policies) -> str:
    """The policy that the group belongs to: the trainable one, or else the first.

    Raises `InvalidRequest` if invalid.
    """
    if not 1 <= len(roles) <= MAX_ROLES:
        raise InvalidRequest(f"policy: name 1 to {MAX_ROLES} roles, not {len(roles)}", param="policy")
    for role, policy in roles.items():
        if not NAME.fullmatch(role):
            raise InvalidRequest(f"policy: invalid role name {role!r}: use letters, digits, . : / - _", param="policy")
        if policy not in policies.names:
            known = ", ".join(policies.names)
            raise InvalidRequest(f"policy: role {role!r}: no policy {policy!r}; served: {known}", param="policy")
    trainable = list(dict.fromkeys(policy for policy in roles.values() if policies[policy].settings.trainable))
    if len(trainable) > 1:
        raise InvalidRequest(
            f"policy: {' and '.join(trainable)} are trainable, and a rollout trains one policy: set "
            f"policies.{trainable[1]}.trainable = false, or give both roles one policy",
            param="policy",
        )
    return trainable[0] if trainable else next(iter(roles.values()))


def main_role(roles: Mapping[str, str], policy: str) -> str:
    """The first role with `policy`."""
    return next(role for role, name in roles.items() if name == policy)


def role_tags(roles: Mapping[str, str]) -> dict[str, str]:
    """The tags of a session with `roles`."""
    return {TAG: json.dumps(dict(roles))} if roles else {}


def roles_of(session: Session) -> dict[str, str]:
    """The session's policy by role; empty if the session has only one policy."""
    return json.loads(session.tags[TAG]) if TAG in session.tags else {}


def in_role(session: Session, chat: ChatRequest) -> ChatRequest:
    """`chat` with the agent and kind of the role that its model names. A role's calls are never side calls."""
    roles = roles_of(session)
    if chat.model not in roles:
        return chat
    agent = chat.hints.agent if chat.model == main_role(roles, session.policy) else chat.model
    hints = msgspec.structs.replace(chat.hints, agent=agent, kind=chat.hints.kind or CallKind.MAIN.value)
    return msgspec.structs.replace(chat, hints=hints)
