"""An agent that leaves odd files in every place that is read after it: `python odd_files.py SEED SECRET`.

The standard library only, as it is sent into a sandbox as source.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
import sys
from collections.abc import Callable
from contextlib import suppress

WORK_PLACES = (
    *(
        "calc.py",
        "reward.txt",
        "out",
        "out/reward.txt",
        "tests",
        "tests/test_calc.py",
        "tests/test_more.py",
        "conftest.py",
    ),
    *("pyproject.toml", "setup.cfg", ".git", ".git/config", ".npmrc", "x.pth", "logs/verifier/reward.txt", "gone.py"),
    *("a/b/c/deep.py", "trajectory.json", "answer.txt", "evil.dist-info/entry_points.txt"),
)
HOME_PLACES = (
    *(".bashrc", ".gitconfig", ".npmrc", ".local/bin/python3", ".config/pip/pip.conf"),
    *(".codex/sessions/2026/01/01/r.jsonl", ".local", ".codex", ".cache/x", "trajectory.json"),
)  # fmt: skip
TEXT = "import os\nos._exit(0)\n"
SECRET = sys.argv[2] if len(sys.argv) > 2 else "/etc/passwd"


def link_to_a_file(path: str) -> None:
    os.symlink(SECRET, path)


def link_to_a_folder(path: str) -> None:
    os.symlink(os.path.dirname(SECRET), path)


def link_up(path: str) -> None:
    os.symlink("../../../../../../" + SECRET, path)


def link_to_itself(path: str) -> None:
    os.symlink(os.path.basename(path), path)


def link_to_nothing(path: str) -> None:
    os.symlink("nothing", path)


def link_to_a_process(path: str) -> None:
    os.symlink(random.choice(["/proc/self/environ", "/proc/1/mem", "/dev/stdin", "/dev/zero", "/proc/self/root"]), path)


def hard_link(path: str) -> None:
    with suppress(OSError):
        os.link(SECRET, path)


def pipe(path: str) -> None:
    os.mkfifo(path)


def listener(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)


def device(path: str) -> None:
    with suppress(OSError):
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))


def hole(path: str) -> None:
    with open(path, "wb") as file:
        with suppress(OSError):
            file.truncate(1 << 40)
            return
        file.truncate(3 << 30)


def folder(path: str) -> None:
    os.makedirs(os.path.join(path, "in", "it"))


def deep_folder(path: str) -> None:
    """Deeper than a path can be long, and than Python recurses."""
    here = os.open(".", os.O_DIRECTORY)
    os.mkdir(path)
    os.chdir(path)
    for _ in range(3000):
        os.mkdir("d")
        os.chdir("d")
    os.symlink(SECRET, "end")
    os.fchdir(here)
    os.close(here)


def unreadable(path: str) -> None:
    text(path)
    os.chmod(path, 0)


def locked(path: str) -> None:
    os.makedirs(os.path.join(path, "in"))
    os.chmod(path, 0)


def odd_names(path: str) -> None:
    os.mkdir(path)
    for name in (b"\xff\xfe", b"n" * 255, b"line\nbreak", b"\x1b[2J", b"-rf", b" ", "ä\u202e.py".encode(), b"*"):
        with open(os.path.join(os.fsencode(path), name), "wb") as file:
            file.write(TEXT.encode())


def many(path: str) -> None:
    os.mkdir(path)
    for number in range(2000):
        os.symlink(SECRET, os.path.join(path, str(number)))


def set_user_id(path: str) -> None:
    text(path)
    os.chmod(path, 0o6755)


def no_text(path: str) -> None:
    with open(path, "wb") as file:
        file.write(bytes(range(256)) * 100)


def text(path: str) -> None:
    with open(path, "w") as file:
        file.write(TEXT)


def says_infrastructure(path: str) -> None:
    """Words and exit codes of runtimes."""
    text(path)
    print(
        "bwrap: No permissions to create new namespace\ndocker: Error response from daemon\n"
        "FATAL: container creation failed"
    )


KINDS: tuple[Callable[[str], None], ...] = (
    *(link_to_a_file, link_to_a_folder, link_up, link_to_itself, link_to_nothing, link_to_a_process, hard_link, pipe),
    *(listener, device, hole, folder, deep_folder, unreadable, locked, odd_names, many, set_user_id, no_text, text),
    says_infrastructure,
)
CODES = (0, 1, 2, 77, 125, 126, 127, 128, 137, 143, 255)


def plant(place: str, kind: Callable[[str], None]) -> None:
    with suppress(OSError):
        os.makedirs(os.path.dirname(place) or ".", exist_ok=True)
        if os.path.islink(place) or os.path.isfile(place):
            os.unlink(place)
        elif os.path.isdir(place):
            shutil.rmtree(place, ignore_errors=True)
        kind(place)


def main() -> None:
    chance = random.Random(int(sys.argv[1]))
    for places, base in ((HOME_PLACES, os.environ["HOME"]), (WORK_PLACES, os.getcwd())):
        os.chdir(base)
        for place in chance.sample(places, len(places) // 2):
            plant(place, chance.choice(KINDS))
    code = chance.choice(CODES)
    print(f"ended with {code}", flush=True)
    os._exit(code)


if __name__ == "__main__":
    main()
