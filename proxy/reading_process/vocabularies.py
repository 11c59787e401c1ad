"""The tokenizers of the served policies, to show recorded tokens as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rolltap.reading import Vocabulary, folder_vocabulary


class Vocabularies:
    """One tokenizer per policy, read from its folder at first use."""

    def __init__(self, folders: Mapping[str, str]) -> None:
        self._folders = folders
        self._known: dict[str, Vocabulary] = {}

    def of_policy(self, policy: str) -> Vocabulary | None:
        """Returns the policy's tokenizer; None if it has no folder: then only its upstream has one."""
        folder = self._folders.get(policy)
        if folder and folder not in self._known:
            self._known[folder] = folder_vocabulary(Path(folder))
        return self._known.get(folder or "")
