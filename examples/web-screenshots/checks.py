"""The reward: whether the answer is the number of the parcel from Oslo."""

from pathlib import Path


def parcel_from_oslo(folder: Path) -> float:
    path = folder / "answer.txt"
    return float(path.is_file() and not path.is_symlink() and path.read_text().strip() == "4711")
