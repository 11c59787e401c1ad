"""Where what a program wrote, printed or returned becomes a reward."""

from __future__ import annotations

import math
import re
from pathlib import Path

from rolltap.contract.admin import LARGEST_REWARD
from rolltap.errors import NoReward
from rolltap.harnesses.left_files import LeftFiles

REWARD_BYTES = 1 << 16
BLANKS = " \t\r\n"
"""What JSON allows around a number."""

NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
"""A number of JSON, and the plain decimals that programs print: `.5`, `1.`, `+1`."""


def read_reward(folder: Path, path: str) -> str | None:
    """The regular file `path` below `folder`; None if there is none, or a link in its path. Raises `NoReward` if it is
    too long for a reward."""
    try:
        file = LeftFiles(folder).open(path)
    except OSError:
        return None
    if file is None:
        return None
    with file:
        data = file.read(REWARD_BYTES + 1)
    if len(data) > REWARD_BYTES:
        raise NoReward(f"{path} has more than {REWARD_BYTES} bytes")  # its beginning may be another number
    return data.decode("utf-8", errors="replace")


def parse_reward(text: str) -> float:
    """`text` as a number. Raises `NoReward` unless it is a finite decimal number.

    Python's own `float` takes `1_0`, digits of other scripts and `nan`: what a program prints by mistake.
    """
    number = text.strip(BLANKS)
    if not NUMBER.fullmatch(number):
        raise NoReward(f"the reward {number[:80]!r} is not a number")
    if not math.isfinite(value := float(number)):
        raise NoReward(f"the reward {number[:80]!r} is not finite")
    return value


def check_reward(value: float) -> float:
    """The reward that counts. Raises `NoReward` for one that no server takes, so that the agent's work is judged as for
    any other text: what it prints may be its reward."""
    if not math.isfinite(value) or abs(value) > LARGEST_REWARD:
        raise NoReward(f"the reward is {value}; a reward is a finite number up to {LARGEST_REWARD:g}")
    return value
