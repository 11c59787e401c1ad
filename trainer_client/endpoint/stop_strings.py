"""Stop strings. The renderer that tinker-cookbook takes for base models samples with one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from rolltap.engine.sampling import Stops
from rolltap.errors import InvalidRequest


def stops_at(strings: Sequence[str], model: Path) -> Stops:
    """Ends a sample with the token that completes one of `strings`.

    `model` is the model's folder. Raises `InvalidRequest` if a string is empty, or the folder has no tokenizer.
    """
    if not all(strings):
        raise InvalidRequest("stop: an empty string ends nothing", param="stop")
    tokenizer = _tokenizer(model / "tokenizer.json")
    most = max(len(string.encode()) for string in strings)  # a token is one byte or more

    def stops(ids: Sequence[int]) -> bool:
        text = tokenizer.decode(list(ids[-most:]), skip_special_tokens=False)
        return any(string in text for string in strings)

    return stops


@cache
def _tokenizer(file: Path) -> Tokenizer:
    if not file.is_file():
        raise InvalidRequest("stop: strings need a tokenizer.json in the folder --model; give token ids", param="stop")
    return Tokenizer.from_file(str(file))
