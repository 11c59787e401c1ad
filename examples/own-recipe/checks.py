"""The reward: the share of vowels in the answer."""

from pathlib import Path


def vowels(folder: Path) -> float:
    path = folder / "answer.txt"
    text = path.read_text() if path.is_file() and not path.is_symlink() else ""
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))
