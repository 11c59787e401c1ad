"""What a judge's text takes from others: lines that code under evaluation could take first, and names that the agent
wrote.

A text that a file of the agent's holds, or that its code printed, may name any file of the judge's, such as that with
the expected output. So no value of it may lead what the judge reads, writes or enters. Values are followed through
variables, functions, pipes and the files that the text writes, without order: what may be the agent's once, is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

from rolltap.harnesses.evaluators.shell_words import (
    AS_WRITTEN,
    ASSIGNMENT,
    BARE,
    DOCUMENT,
    INLINE,
    LANGUAGE,
    LITERAL,
    SHELL,
    SUBSTITUTION,
    TEXT,
    ShellStep,
    plain,
    steps_of,
    without_what_is_before,
)
from rolltap.harnesses.runtimes.code_sandbox import VARIABLE

HELPER = re.compile(rf"[${LITERAL}{BARE}]\{{?{VARIABLE}\b")
HELPER_ITSELF = re.compile(rf"[${BARE}](\{{{VARIABLE}\}}|{VARIABLE})")
GREPS = ("grep", "egrep", "fgrep")
VALUES: Mapping[str, str] = {
    **dict.fromkeys(GREPS, "eABCfmdD"),
    **dict.fromkeys(("mapfile", "readarray"), "dnOsuCc"),
    **dict.fromkeys(("fold", "base64"), "w"),
    "awk": "vFf",
    "cmp": "in",
    "column": "stcno",
    "cut": "dfcb",
    "diff": "FISUCWx",
    "fmt": "w",
    "head": "nc",
    "join": "12tjaoev",
    "jq": "f",
    "nl": "bdfhilnpsvw",
    "od": "AjNtwS",
    "paste": "d",
    "read": "dinNptu",
    "sed": "ef",
    "sort": "kSt",
    "split": "lnabC",
    "tail": "ncs",
    "uniq": "fsw",
    "xxd": "lcsgo",
}
"""Options of tools that take a value which is no file to be read."""
TWO_VALUES = frozenset(("--arg", "--argjson", "--rawfile", "--slurpfile"))
PROGRAM_FIRST = frozenset((*GREPS, "sed", "awk", "jq"))
TAKES_LINES = frozenset(
    (
        *GREPS,
        *("awk", "base64", "cat", "column", "cut", "fmt", "fold", "gunzip", "gzip", "head", "jq", "md5sum", "nl"),
        *("od", "rev", "sed", "sha1sum", "sha256sum", "sort", "split", "sum", "tac", "tail", "uniq", "wc", "xxd"),
        *("paste", "zcat"),
    )
)  # fmt: skip
"""Tools that read their input where they are given no file."""
READS = frozenset(("read", "mapfile", "readarray"))
READS_INPUT = re.compile(r"stdin|STDIN|input\(|fileinput|<>|\bgets\b|readline|/dev/fd/0|\bARGF\b|\$<")
"""In a judge's inline program."""
OPERAND_OF_INPUT = frozenset(("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"))
TAKES_TEXT = frozenset(
    (
        *("[", "[[", ":", "basename", "break", "continue", "date", "dirname", "echo", "exit", "export", "expr"),
        *("false", "kill", "local", "printf", "pwd", "return", "seq", "set", "shift", "shopt", "sleep", "test", "true"),
        *("umask", "uname", "unset", "wait", "tr", "mktemp", "for", *READS),
    )
)  # fmt: skip
"""Tools whose arguments are no paths, but for what `LOOKS_AT_ONE` says of `test`."""
COMPARES = frozenset(("[", "[[", "expr", "test"))
SAYS_NO = frozenset(
    (*GREPS, "awk", "cmp", "comm", "diff", "join", "jq", "md5sum", "sed", "sha1sum", "sha256sum", "sum", "uniq", "wc")
)
"""Tools that may say no to what they read, or count it; as `sort -c` does."""
LOOKS_AT_A_FILE = re.compile(r"-[b-hkprsuwxGLNOS]|-(nt|ot|ef)")
"""Operators of `test`."""
LOOKS_AT_ONE, LOOKS_AT_TWO = re.compile(r"-[a-hkprsuwxGLNOS]"), frozenset(("-nt", "-ot", "-ef"))
PRINTS_ARGUMENTS = frozenset(("echo", "printf", "expr", "basename", "dirname", "realpath", "export", "local"))
PRINTS_NAMES = frozenset(
    ("date", "find", "ls", "pwd", "seq", "stat", "uname", "wc", "md5sum", "sha1sum", "sha256sum", "sum")
)
PRINTS_NOTHING = TAKES_TEXT - PRINTS_ARGUMENTS - PRINTS_NAMES - {"tr"} | {
    "cd",
    "cp",
    "ln",
    "mkdir",
    "mv",
    "rm",
    "touch",
}
AWK_TEXT = re.compile(r"\"[^\"\\]*(?:\\.[^\"\\]*)*\"?", re.DOTALL)
AWK_READS = re.compile(r"\bgetline\b\s*(?:\w+\s*)?<[\s(]*(?![\s\"(])|\bARGV\[[^][]*\]\s*=(?!=)")
AWK_PRINTS = re.compile(r"\bprintf?\b")
AWK_REDIRECTS = re.compile(r"[()]|>>?\s*(?![\s\"&=>])")
CALL_OF_INPUT = re.compile(r"\b(\w+)\s*\(\s*(?=(?:open|input|sys\.stdin|Path|json\.load|f?\.read\w*)\s*[(.])")
OPENS = re.compile(r"open|Path|read|load")
INLINE_FOLLOWS = re.compile(r"\bFile\.\w+\(\s*(?:File|IO|gets|STDIN)|\bread\w*Sync\(\s*(?:fs\.)?read\w*Sync\(")
INLINE_READS = re.compile(rf"open|read|File|IO\.|argv|ARGV|{READS_INPUT.pattern}")
EXPANSION = re.compile(rf"[${BARE}]\{{?[!]?(\w+|[@*])")
ASSIGNS = re.compile(r"\{(\w+):?=")
BEGINS = re.compile(rf"[^${BARE}`*?\[~]*")
OWN, NAMED, THEIRS = range(3)
"""What a value may be: the place of a file that is the judge's; a name that the text, or a file of the judge's, gives a
file, wherever it is; a text of the agent's."""
PASSES = 9


def operands(head: str, arguments: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """The arguments of a tool that are neither options, nor their values, nor its program: files, if it takes files."""
    found, waiting, values = list[tuple[int, str]](), iter(arguments), VALUES.get(head, "")
    is_after, needs_program = False, head in PROGRAM_FIRST
    for at, word in waiting:
        if is_after or not word.startswith("-") or word == "-":
            found += [] if needs_program else [(at, word)]
            needs_program = False
        elif word == "--":
            is_after = True
        elif word.startswith("--"):
            needs_program = needs_program and not word.startswith(("--regexp", "--expression", "--f"))
            for _ in range(2 * (word in TWO_VALUES)):
                next(waiting, None)
        elif option := next((letter for letter in word[1:] if letter in values), ""):
            needs_program = needs_program and option not in "ef"
            if word.endswith(option) and word.index(option) == len(word) - 1:
                next(waiting, None)
    return found


def texts_in(word: str) -> Iterator[list[ShellStep]]:
    """The commands whose output a quoted word has."""
    for text in SUBSTITUTION.findall(word):
        with suppress(ValueError):
            yield steps_of(plain(text.translate(AS_WRITTEN)))


def awk_follows(program: str) -> str:
    """Where an awk program reads or writes the file which a value names; "" if it does nowhere."""
    program = AWK_TEXT.sub('"', program)
    if found := AWK_READS.search(program):
        return found[0]
    for statement in re.split(r"[;{}\n]", program):
        printed = AWK_PRINTS.search(statement)
        depth = 0
        for found in AWK_REDIRECTS.finditer(statement, printed.end()) if printed else ():
            depth += {"(": 1, ")": -1}.get(found[0], 0)
            if not depth and found[0].startswith(">"):  # within parentheses it compares
                return f"{printed and printed[0]} {found[0]}"
    return ""


def inline_follows(program: str) -> str:
    """The same of another inline program, as far as it stands in one expression."""
    calls = (found for found in CALL_OF_INPUT.finditer(program) if OPENS.search(found[1]))
    found = next(calls, None) or INLINE_FOLLOWS.search(program)
    return found[0] if found else ""


def shell_text(words: Sequence[str]) -> tuple[list[ShellStep], Sequence[str]] | None:
    """The steps that a shell gets as its argument, and the arguments of these; None if it gets none."""
    if SHELL.fullmatch(words[0]):
        for at, word in enumerate(words):
            if re.fullmatch(r"-\w*c", word) and len(words) > at + 1:
                with suppress(ValueError):
                    return steps_of(plain(words[at + 1].translate(AS_WRITTEN))), words[at + 2 :]
    return None


@dataclass(slots=True)
class _Use:
    """Of an input: whether the judge reads lines from it, and whether a program of the helper has it."""

    reads: bool = False
    runs: bool = False

    def add(self, other: _Use) -> None:
        self.reads |= other.reads
        self.runs |= other.runs


def shares_input(steps: Sequence[ShellStep]) -> bool:
    """Whether a program of the helper has the input from which the judge reads lines: it could take them all, so that a
    loop over cases ends with the first."""
    inputs = _Inputs()
    for _ in range(3):  # functions that call functions
        inputs.of(steps)
    return inputs.are_shared


@dataclass(slots=True)
class _Inputs:
    functions: dict[str, _Use] = field(default_factory=dict)
    are_shared: bool = False

    def of(self, steps: Iterable[ShellStep]) -> _Use:
        """How steps use the input that they have from around them."""
        use = _Use()
        for step in steps:
            own = self.of(step.steps) if step.steps else self._of_command(step.words)
            if step.name:
                self.functions.setdefault(step.name, _Use()).add(own)
                continue
            words = [*step.words, *(each for each in step.inputs if isinstance(each, str))]
            inner = [*step.inner.values(), *(each for each in step.inputs if isinstance(each, list))]
            for each in (*inner, *(text for word in words for text in texts_in(word))):
                use.add(self.of(each))
            if not step.has_input:
                use.add(own)
        self.are_shared |= use.reads and use.runs
        return use

    def _of_command(self, words: Sequence[str]) -> _Use:
        words = without_what_is_before(words)
        head, arguments = words[0], list(enumerate(words))[1:]
        if text := shell_text(words):
            return self.of(text[0])
        if known := self.functions.get(head):
            return known
        runs = bool(HELPER_ITSELF.fullmatch(head)) or any(
            HELPER.search(each) and not set("|<") & set(SUBSTITUTION.sub("", each)) and "$(" not in each
            for each in words
        )
        return _Use(self._takes_lines(head, arguments), runs)

    def _takes_lines(self, head: str, arguments: Sequence[tuple[int, str]]) -> bool:
        words = [each for _, each in arguments]
        if head in READS:
            from_other = next((two for one, two in pairwise(words) if re.fullmatch(r"-\w*u", one)), "0")
            return from_other == "0" and not any(re.fullmatch(r"-\w*u[1-9]\d*", each) for each in words)
        if head in ("tee", "tr") or (head not in TAKES_TEXT and OPERAND_OF_INPUT.intersection(words)):
            return not LANGUAGE.fullmatch(head) and not HELPER_ITSELF.fullmatch(head)
        if LANGUAGE.fullmatch(head):
            place = next((at for at, each in enumerate(words) if INLINE.fullmatch(each) and each != "-"), None)
            return place is not None and bool(READS_INPUT.search(" ".join(words[place + 1 :]).translate(AS_WRITTEN)))
        return head in TAKES_LINES and not operands(head, arguments)


def followed(
    steps: Sequence[ShellStep], is_own: Callable[[str], bool], is_kept: Callable[[str], bool]
) -> tuple[str, bool]:
    """A word by which a text of the agent's names a file or folder of a command ("" if there is none), and whether a
    tool that may say no gets what may be the agent's. `is_own`: whether a path is the judge's; `is_kept`: whether a
    file of the working copy is the task's, whatever an agent does."""
    names = _Names(is_own, is_kept)
    for _ in range(PASSES):
        before, names.is_asked = dict(names.levels), False
        names.read(steps, NAMED)
        if names.levels == before:
            break
    return names.followed, names.is_asked


@dataclass(slots=True)
class _Names:
    is_own: Callable[[str], bool]
    is_kept: Callable[[str], bool]
    levels: dict[str, int] = field(
        default_factory=lambda: {"0": OWN, "BASH_SOURCE": OWN}
    )  # variables, files, functions
    followed: str = ""
    is_asked: bool = False
    scope: str = ""
    functions: dict[str, ShellStep] = field(default_factory=dict)

    def read(self, steps: Iterable[ShellStep], input_level: int) -> int:
        """What the output of the steps may be, if their input is `input_level`."""
        outputs = dict[int, int]()
        for step in steps:
            own = self._input(step, input_level, outputs)
            outputs[id(step)] = self._of_step(step, own)
            for path in step.outputs:
                self._check(path, self.place(path))
                self._write(path, outputs[id(step)])
        piped = {id(step.before) for step in steps if step.before}
        return max((level for key, level in outputs.items() if key not in piped), default=OWN)

    def _set(self, name: str, level: int) -> None:
        self.levels[name] = max(self.levels.get(name, OWN), level)

    def _write(self, path: str, level: int) -> None:
        if not path.startswith("/dev/"):
            self._set(f">{path.translate(AS_WRITTEN)}", max(level, NAMED))

    def _check(self, word: str, level: int) -> None:
        if level == THEIRS:
            self.followed = self.followed or word.translate(AS_WRITTEN)[:100]

    def _input(self, step: ShellStep, input_level: int, outputs: Mapping[int, int]) -> int:
        level = outputs.get(id(step.before), input_level) if step.before else input_level
        for source in step.inputs:
            if isinstance(source, list):
                level = self.read(source, input_level)
            elif source.startswith((DOCUMENT, TEXT)):
                level = max(NAMED, self.place(source[1:]))
            else:
                self._check(source, self.place(source))
                level = self._content(source, input_level)
        return level

    def _of_step(self, step: ShellStep, input_level: int) -> int:
        if step.name:
            self.functions[step.name] = step
            before, self.scope = self.scope, step.name
            self._set(f"\0{step.name}", self.read(step.steps, self.levels.get(f"<{step.name}", NAMED)))
            self.scope = before
            return OWN
        return self.read(step.steps, input_level) if step.steps else self._of_command(step, input_level)

    def place(self, word: str, inner: Sequence[ShellStep] | None = None, input_level: int = NAMED) -> int:
        """What a word may be, as a path or a value."""
        expansions = [self.read(each, input_level) for each in texts_in(word)]
        variables = [self._variable(found[1]) for found in EXPANSION.finditer(SUBSTITUTION.sub("", word))]
        expansions = [*expansions, *variables] if word.startswith("$(") else [*variables, *expansions]
        if inner is not None:
            level = self.read(inner, input_level)
            expansions += [NAMED if word in ("<", ">") else level]  # else it is a file with their output
        if "`" in word:
            expansions.append(THEIRS)
        for name in ASSIGNS.findall(word):
            self._set(name, max(expansions, default=NAMED))
        if THEIRS in expansions:
            return THEIRS
        begins = BEGINS.match(word)
        prefix = begins[0] if begins else ""
        if prefix != word:
            prefix = prefix[: prefix.rfind("/") + 1]
        if not prefix and expansions and not (begins and begins[0]):
            return expansions[0]
        return OWN if len(prefix) > 1 and ".." not in word and self.is_own(prefix) else NAMED

    def _variable(self, name: str) -> int:
        if name.isdigit() or name in "@*":
            return self.levels.get(name if name == "0" else f"{self.scope}@", NAMED)
        return self.levels.get(f"{self.scope}:{name}", self.levels.get(name, NAMED))

    def _content(self, word: str, input_level: int, inner: Sequence[ShellStep] | None = None) -> int:
        """What the text of a file may be."""
        if word in OPERAND_OF_INPUT:
            return input_level
        if inner is not None and word == "<":
            return self.read(inner, input_level)
        place, path = self.place(word, inner, input_level), word.translate(AS_WRITTEN)
        written = [
            level for key, level in self.levels.items() if f"{path}/".startswith(f"{key[1:]}/") and key[0] == ">"
        ]
        if place == THEIRS or path == "/dev/null":
            return NAMED if place != THEIRS else THEIRS
        if written:
            return max(written)
        return NAMED if place == OWN or self.is_kept(path) else THEIRS

    def _of_command(self, step: ShellStep, input_level: int) -> int:
        """What a command prints. It notes which files the agent's texts name, and what they make of variables."""
        words = list(without_what_is_before(step.words))
        first = len(step.words) - len(words) if words != [""] else len(step.words)
        at = {number: step.inner.get(number) for number in range(-1, len(step.words))}
        for number, word in enumerate(step.words[:first]):
            self._assign(word, number, at, input_level)
        if words == [""]:  # also `$(< FILE)`
            return input_level if step.inputs else OWN
        head, arguments = words[0], [(first + number, word) for number, word in enumerate(words)][1:]
        values = [self.place(word, at[number], input_level) for number, word in arguments]
        if head == "for":
            for _, name in arguments[:1]:
                self._set(name, max([OWN, *values[2:]]) if len(values) > 2 else self._variable("@"))
        elif head in READS:
            for _, name in operands(head, arguments) or [(0, "REPLY"), (0, "MAPFILE")]:
                self._set(name, max(NAMED, input_level))
        elif head in ("export", "local"):
            for number, word in arguments:
                self._assign(word, number, at, input_level, f"{self.scope}:" * (head == "local"))
        elif head == "set":
            self._set(f"{self.scope}@", max([OWN, *values]))
        elif head == "printf" and arguments[:1] and arguments[0][1] == "-v" and len(arguments) > 1:
            self._set(arguments[1][1], max(values))
        self._check_files(head, arguments, dict(zip((number for number, _ in arguments), values, strict=True)))
        return self._output(words, arguments, values, at, input_level)

    def _assign(
        self, word: str, number: int, at: Mapping[int, list[ShellStep] | None], input_level: int, scope: str = ""
    ) -> None:
        name, mark, value = word.partition("=")
        if mark and ASSIGNMENT.fullmatch(word):
            self._set(scope + name.removesuffix("+"), self.place(value, at[number], input_level))

    def _check_files(self, head: str, arguments: Sequence[tuple[int, str]], places: Mapping[int, int]) -> None:
        """Notes what a command reads, writes, enters or looks at."""
        words = [word for _, word in arguments]
        if head in ("test", "[", "[["):
            for (_, one), (number, two) in pairwise(arguments):
                if LOOKS_AT_ONE.fullmatch(one) or one in LOOKS_AT_TWO:
                    self._check(two, places[number])
                if two in LOOKS_AT_TWO:
                    self._check(one, places[number - 1])
        elif LANGUAGE.fullmatch(head):
            if found := inline_follows(" ".join(words).translate(AS_WRITTEN)):
                self._check(found, THEIRS)
        elif not (
            head in TAKES_TEXT or SHELL.fullmatch(head) or HELPER_ITSELF.fullmatch(head) or head in self.functions
        ):
            for number, word in operands(head, arguments):
                self._check(word, places[number])
            if head == "awk" and (found := awk_follows(" ".join(words))):
                self._check(f"awk {found}", THEIRS)
            elif head not in PROGRAM_FIRST:
                for number, word in arguments:
                    self._check(word, places[number] * word.startswith("-"))

    def _ask(
        self,
        head: str,
        arguments: Sequence[tuple[int, str]],
        values: Sequence[int],
        contents: Sequence[int],
        input_level: int,
    ) -> None:
        """Notes whether a tool may say no to something of the agent's: one that looks at the judge's own files, or at
        an exit code, says the same whatever the agent did."""
        words = [word for _, word in arguments]
        if head in COMPARES:
            looked_at = [two for one, two in pairwise(words) if LOOKS_AT_A_FILE.fullmatch(one)]
            looked_at += [one for one, two in pairwise(words) if two in LOOKS_AT_TWO]
            self.is_asked |= any(self._content(each, NAMED) == THEIRS for each in looked_at)
        elif head in SAYS_NO or (head == "sort" and words[:1] == ["-c"]):
            names = [found[1] for word in words for found in EXPANSION.finditer(SUBSTITUTION.sub("", word))]
            unknown = any(name not in self.levels and not name.isdigit() for name in names)
            self.is_asked |= unknown or THEIRS in (*values, *(contents or [input_level]))

    def _output(
        self,
        words: Sequence[str],
        arguments: Sequence[tuple[int, str]],
        values: Sequence[int],
        at: Mapping[int, list[ShellStep] | None],
        input_level: int,
    ) -> int:
        head = words[0]
        contents = [self._content(word, input_level, at[number]) for number, word in operands(head, arguments)]
        self._ask(head, arguments, values, contents, input_level)
        if head in ("cp", "mv", "ln", "tee"):
            for _, word in operands(head, arguments)[0 if head == "tee" else -1 :]:
                self._write(word, input_level if head == "tee" else max([OWN, *contents[:-1]]))
        if head in self.functions:
            self._set(f"{head}@", max([OWN, *values]))
            self._set(f"<{head}", input_level)
            return self.levels.get(f"\0{head}", OWN)
        if text := shell_text(words):
            before, self.scope = self.scope, "-c"
            others = values[len(values) - len(text[1]) :] if text[1] else []
            self._set("-c@", max([OWN, *others]))
            self._set("0", max([OWN, *others[:1]]))
            level = self.read(text[0], input_level)
            self.scope = before
            return level
        if head in PRINTS_ARGUMENTS:
            level = max([OWN, *values])
            return max(level, NAMED) if head == "basename" else level
        if head == "mktemp" or head in PRINTS_NOTHING:
            return OWN
        if head in PRINTS_NAMES or (head in GREPS and any(re.fullmatch(r"-\w*[clLq]\w*", word) for word in words[1:])):
            return max([NAMED, *values])
        if LANGUAGE.fullmatch(head):
            texts = [word for word in words[1:] if word.startswith(DOCUMENT) or " " in word or "(" in word]
            reads = any(INLINE_READS.search(word) for word in texts)
            files = [self._content(word, input_level) for _, word in operands(head, arguments)[1:]]
            return max([THEIRS if reads else NAMED, input_level, *files])
        if head in TAKES_LINES or head in ("tr", "tee", "comm", "diff", "cmp", "join", "readlink", "file"):
            return max(contents) if contents and head not in ("tr", "tee") else input_level
        return THEIRS
