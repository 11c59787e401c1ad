"""What an attempt is worth, by the working copy that the agent left."""

from pathlib import Path


def _answer(folder: Path) -> str:
    path = folder / "answer.txt"
    return path.read_text().strip() if path.is_file() and not path.is_symlink() else ""


def two_lines(folder: Path) -> float:
    return float(_answer(folder) == "2")


def six_words(folder: Path) -> float:
    return float(_answer(folder) == "6")
