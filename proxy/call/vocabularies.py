"""The tokenizers of the served policies, for showing recorded tokens as text."""

from __future__ import annotations

from pathlib import Path

from rolltap.errors import NotFound
from rolltap.proxy.call.policies import Policies, Policy
from rolltap.proxy.call.sources.tokens import TokenSource
from rolltap.reading.opening import folder_vocabulary
from rolltap.reading.vocabulary import Vocabulary


class Vocabularies:
    """One a policy, made when it is first asked for."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._known: dict[str, Vocabulary | None] = {}

    def of_policy(self, name: str) -> Vocabulary | None:
        """None for a policy that is not served here, or whose tokenizer is its upstream's own."""
        if name not in self._known:
            try:
                self._known[name] = _vocabulary(self._policies[name])
            except NotFound:
                return None
        return self._known[name]


def _vocabulary(policy: Policy) -> Vocabulary | None:
    if isinstance(policy.source, TokenSource):
        return Vocabulary(policy.source.continuation.renderer.tokenizer.decode)
    return folder_vocabulary(Path(policy.settings.tokenizer)) if policy.settings.tokenizer else None
