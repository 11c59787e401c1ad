"""Commands with one odd value each, made from the command line's own description.

`python -m tests.unit.cli.odd_values FOLDER SEED COUNT` runs `COUNT` of them, drawn by `SEED` (0: all), each in a fresh
folder of `FOLDER` and in a process of its own, and prints a line of JSON for each that did not end as a mistake should.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
import types
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from rolltap.__main__ import main as command_line
from rolltap.cli.main import ELSEWHERE, app

NUMBERS = {int: ("-1", "99999999999999999999999"), float: ("-1", "nan", "inf")}
PATHS = ("missing", "folder", "bytes", "file/below", "nul\0")
TEXTS = ("", "missing", "two\nlines", "http://[", "-x", "\udcff", "file", "folder", "bytes", "%s{}[markup]")
STARTS = {"demo", "engine", "node", "tinker", "train", "try", "up", "harness install"}
"""Commands that would load torch, start processes or fetch packages: of these the numbers only."""
LIMIT_S = 5
"""A command that goes on for longer has taken the value."""


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its words."""
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "list_commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def type_of(parameter: Any) -> Any:
    """A parameter's type, or that of its items."""
    kind = parameter.type_descriptor.annotation
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    return typing.get_args(kind)[0] if typing.get_origin(kind) is list else kind


def cases() -> Iterator[list[str]]:
    """Command lines in which one value is odd, and the others that are needed are plain."""
    for words, command in commands(typer.main.get_command(app)):
        parameters = [each for each in command.params if each.name != "help" and type_of(each) is not bool]
        needed = [each for each in parameters if each.required]
        for odd in parameters:
            kind = type_of(odd)
            values = NUMBERS.get(kind) or (() if " ".join(words) in STARTS else PATHS if kind is Path else TEXTS)
            for value in values:
                options, arguments = [], []
                for each in [*needed, odd] if odd not in needed else needed:
                    text = value if each is odd else "folder" if type_of(each) is Path else "plain"
                    if each.param_type_name == "argument":
                        arguments.append(text)
                    else:
                        name = next(spelled for spelled in each.opts if spelled.startswith("--"))
                        options.append(f"{name}={text}")
                yield [*words, *options, "--", *arguments] if arguments else [*words, *options]


def run(words: list[str], folder: Path) -> tuple[int, str]:
    """The exit code of a command in a fresh folder, -SIGALRM if it went on, and what it printed."""
    folder.mkdir()
    (folder / "folder").mkdir()
    (folder / "file").write_text("a line\n")
    (folder / "bytes").write_bytes(b"\xff\xfe\0")
    output = folder / "output"
    sys.stdout.flush()
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output.read_text("utf-8", "replace")
    os.setsid()
    os.chdir(folder)
    file = os.open("output", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.alarm(LIMIT_S)
    sys.argv = ["rolltap", *words]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]  # with it a node starts itself anew, with mounts of its own
    code = 70
    try:
        command_line()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter shows what nothing caught
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_well(words: list[str], code: int, text: str) -> bool:
    """Whether the command took the value, or said in one line, or in the box of a usage error, what is wrong.

    The doctor has a table of what is wrong.
    """
    if code in (0, -signal.SIGALRM) or (words[0], code) == ("doctor", 1):
        return "Traceback" not in text
    said = [line for line in text.splitlines() if line.startswith("rolltap: ")]
    return "Traceback" not in text and ((code == 1 and len(said) == 1) or (code == 2 and "─ Error ─" in text))


def main() -> None:
    folder, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for _, module, _ in ELSEWHERE.values():
        import_module(f"rolltap.cli.{module}")
    every = list(cases())
    chosen = random.Random(seed).sample(every, count) if count else every
    for number, words in enumerate(chosen):
        code, text = run(words, folder / str(number))
        if not is_well(words, code, text):
            print(json.dumps({"words": words, "code": code, "text": text[-1500:]}), flush=True)
    print(json.dumps({"ran": len(chosen)}))


if __name__ == "__main__":
    main()
