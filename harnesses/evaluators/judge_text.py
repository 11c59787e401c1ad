"""What a judge's text starts: which of the task's files, and whether all that it starts is known.

The text is known if each of its commands is the helper, a tool that only reads and writes, a file of the task, or an
interpreter with a program of the judge: inline, or a file outside the working copy. Anything else (`make`, `eval`,
`xargs`, a command in a variable) could run what the agent wrote beside the judge, so it is unknown. So is text that
this module can't parse: it knows less of shells than bash, never more. Programs that the helper starts don't count.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

from rolltap.harnesses.base import Workspace
from rolltap.harnesses.evaluators.judge_flow import COMPARES, LOOKS_AT_A_FILE, followed, shares_input
from rolltap.harnesses.evaluators.runners import runner_in
from rolltap.harnesses.evaluators.shell_words import (
    AS_WRITTEN,
    ASSIGNMENT,
    BARE,
    BEFORE,
    DEFINES,
    DOCUMENT,
    ENDS,
    EXPANDS,
    GLOB,
    INLINE,
    LANGUAGE,
    OF_THE_SYSTEM,
    OPTION,
    SHELL,
    SUBSTITUTION,
    WRAPPER,
    commands_of,
    plain,
    steps_of,
    without_what_is_before,
)
from rolltap.harnesses.runtimes.code_sandbox import VARIABLE

TOOLS = frozenset(
    (
        *("[", "[[", ":", "awk", "base64", "basename", "break", "cat", "cd", "chmod", "cmp", "column", "comm"),
        *("continue", "cp", "cut", "date", "diff", "dirname", "echo", "egrep", "exit", "export", "expr", "false"),
        *("fgrep", "file", "find", "fmt", "fold", "grep", "gunzip", "gzip", "head", "jq", "join", "kill", "ln"),
        *(
            "local",
            "ls",
            "mapfile",
            "md5sum",
            "mkdir",
            "mktemp",
            "mv",
            "nl",
            "od",
            "paste",
            "printf",
            "pwd",
            "read",
            "readarray",
        ),
        *("readlink", "realpath", "return", "rev", "rm", "rmdir", "sed", "seq", "set", "sha1sum", "sha256sum"),
        *("shift", "shopt", "sleep", "sort", "split", "stat", "sum", "tac", "tail", "tee", "test", "touch", "tr"),
        *("true", "truncate", "umask", "uname", "uniq", "unset", "wait", "wc", "xxd", "zcat"),
    )
)
"""They run no other program, but for the options in `RUNS_A_FILE`."""
RUNS_A_FILE = re.compile(
    r"(sed|jq) (-[a-zA-Z]*f|--f)|jq (-L|--l|.*\b(import|include) *\")|awk (-[^vF]|.*(system|\||@))"
    r"|find -(exec|ok)|sort --co|split --f|(mapfile|readarray) -\w*C",
    re.DOTALL,
)
"""A tool and the beginning of one of its arguments, by which it runs a program, or what a file says."""
NAMES_A_FILE: Mapping[str, re.Pattern[str]] = {
    **dict.fromkeys(("grep", "egrep", "fgrep"), re.compile(r"(?:-[^-efmABCdD]*f|--(?:file|exclude-from)(?:=|\Z))(.*)")),
    **dict.fromkeys(("sort", "wc", "du", "find"), re.compile(r"--?files0-from(?:=|\Z)(.*)")),
    **dict.fromkeys(("md5sum", "sha1sum", "sha256sum"), re.compile(r"(?:-\w*c\w*|--check)()")),
    "diff": re.compile(r"(?:-[^-FIxSUCW]*X|--exclude-from(?:=|\Z))(.*)"),
}
"""Options of tools that name a file of patterns or names; where the group is empty, the next argument does."""
SED_RUNS = re.compile(r"(?:^|[^\w\\]|_)[gpiImM\d]*e[gpiImM\d]*(?=\s|;|\}|$)")
"""The command or flag `e` of sed."""
WRITES = frozenset(("cp", "mv", "ln", "tee", "split"))
OTHERS_WRITE = ("/proc/", "/dev/", "/tmp/", "/var/tmp/", "/logs/")
"""Folders outside the working copy that are empty before the judge writes there, or that the agent could write to."""
RUNS_TEXT = frozenset(("eval", "trap", "alias", "coproc", "builtin", "case", "select", "function"))
"""What bash runs as it stands in their arguments."""
LOADS = re.compile(r"\w*PATH|LD_\w+|PYTHON\w+|PERL\w+|RUBY\w+|NODE_\w+|LUA_\w+|JULIA_\w+|R_\w+|BASH_ENV|ENV|IFS")
"""Variables that say what a program loads, or which program a name is."""
PLAIN_OPTION = re.compile(r"-[uBIsSOqbwnpaE0-9]*[ce]?|-[wnpla]*e|-[WX]\w*|--(eval|vanilla|input-type=\w+)|-")
"""Options of a language that load nothing and name no program."""
BEGINS_WITH_A_FILE: Mapping[str, str] = {"Rscript": "--vanilla", "bun": ""}
"""Languages that first obey a file of the folder in which they are started, and the option that keeps them from it."""
STARTS_MORE = re.compile(
    r"exec|eval|import_module|__import__|runpy|subprocess|system|popen|spawn|sys\.path|require|`|import\s*[('\"]"
    r"|from\s*['\"]|Kernel\.load|(?<![.\w])(load|do|dofile|loadfile|source|include)\s*[('\"]"
    r"|pickle|marshal|dill|joblib|shelve|torch\.load|yaml\.(\w+_)?(?<!safe_)load|ctypes|dlopen|(?<!re\.)\bcompile\("
    r"|zipimport|pkgutil|addsitedir|discover|doctest|logging\.config|unserialize|\bFunction\s*\(|\bvm\.|\bWorker\b|loadstring"
    r"|load_module|load_source|FileLoader|mainModule|\._load\b|use\s+lib|@INC|LOAD_PATH"
    r"|(?<![.\w$@%])(load|do|include|source)\s+([$@]|ARGV|ENV|File)"
    r"|pytest\.(console_)?main|unittest\.main\(\s*(module\s*=\s*)?['\"]|loadTestsFromName|unpack_archive"
    r"|tarfile[\s\S]{0,2000}\.extract(all)?\((?![^)\n]{0,200}filter)"
    r"|sympy|jinja|numexpr|get_type_hints|load_extension|load_model|from_pretrained|saved_model|jit\.load|read_hdf|readRDS"
    r"|\b(timeit|cProfile|profile|pdb|bdb|trace|code)\.\w+\(|\bqx\b|%x\W"
    r"|(open|IO\.\w+)\b[^;\n]{0,200}(['\"] {0,9}\| {0,9}[\w./]|[\w./] {0,9}\| {0,9}['\"])",
    re.I,
)
"""In a judge's inline program: it could run other files."""
OWN_VALUES = re.compile(rf"[${BARE}](\{{?({VARIABLE}|PWD|HOME)\b\}}?|[?#!$0])")
"""Expansions whose value no file of the agent's decides."""
STATUS = re.compile(rf"[${BARE}]\{{PIPESTATUS\[\d+\]\}}")
ARGUMENT = re.compile(rf"[${BARE}](\d|\{{\d+\}}|[@*])")
COMPUTES = re.compile(
    rf"[${BARE}](\[|\{{!|\{{\w+(@|\[(?![\d@*]+\])|:(?![-=?+]|[\d: ]*\}})))"
    rf"|[${BARE}]\{{\w+(\[[\d@*]+\])?([#%^,]|//?)[^}}/]*[${BARE}`]"
)
"""Bash computes what stands there, which may run commands: `${a[$i]}`, `${x:$i}`, `${x@P}`; or a value is a pattern:
`${x#$y}`."""
COMPUTES_BOTH = frozenset(("-eq", "-ne", "-lt", "-le", "-gt", "-ge"))
"""In `[[ ]]`, bash computes the texts on both sides: `a[$(COMMAND)]` runs the command."""
COMPARES_NUMBERS = COMPUTES_BOTH | {"-v", "-R"}
TAKES_A_PATTERN = frozenset(("=", "==", "!=", "=~"))
NAMES_VARIABLES = frozenset(("export", "local", "mapfile", "read", "readarray", "unset", "printf", "wait"))
SETS_OPTIONS = frozenset(("set", "shopt"))
PRINTS_ONLY = frozenset(("cat", "chmod", "echo", "ls", "printf", "rm", "touch", "[["))
"""Tools of which an option that is a file's name decides nothing; and bash's own, which takes no files."""
NAME = re.compile(r"(?<![\w$\1\2.-])[A-Za-z_]\w*")
"""In what bash computes, a name is the value of a variable, which it computes, too."""
OF_PROGRAMS: Mapping[str, Mapping[str, int]] = {
    **{grep: {"-m": 1, "-A": 1, "-B": 1, "-C": 1} for grep in ("grep", "egrep", "fgrep")},
    "awk": {"-v": 1, "-F": 1},
    "jq": {"--arg": 2, "--argjson": 2},
    "sed": {},
    "find": {},
    "sort": {},
    "split": {},
}
"""Tools whose arguments can be programs or patterns, or name some; and how many values some of their options take."""
TAKES_OPTIONS = frozenset((*OF_PROGRAMS, "diff", "cmp", "comm")) - {"awk"}
"""Tools that take an option at any place, if no `--` is before it: also `--help`, after which they end with 0."""


@dataclass(slots=True)
class JudgeText:
    """`files`: of the task, below the working copy. `roots`: where its folders are in the judge's sandbox; `workdir`:
    the folder of these that the text begins in. `programs`: those files that the text starts. `unknown`: what it
    starts that may be the agent's, or why its text can't be parsed; "" if nothing. `only_tools`: it starts only tools
    that read and write. `decides`: it starts something that may decide on what the code under evaluation did. `tests`:
    the test runner that it starts by the helper; "" if none. `shares_input`: the code may read lines that the text
    reads. `follows`: a word by which a text of the agent's names a file of the judge's; "" if none does.
    `tools_are_known`: the task says that programs which it names without a path only read."""

    files: Collection[str]
    roots: Mapping[str, str]
    workdir: str
    programs: set[str] = field(default_factory=set)
    unknown: str = ""
    only_tools: bool = True
    decides: bool = False
    tests: str = ""
    shares_input: bool = False
    follows: str = ""
    _functions: set[str] = field(default_factory=set)
    tools_are_known: bool = False
    _started: set[str] = field(default_factory=set)  # programs outside the working copy
    _written: set[str] = field(default_factory=set)  # what the text writes: it may be the agent's
    _leaves: bool = False  # for a folder outside the working copy, or one that only bash knows

    @classmethod
    def of(
        cls,
        text: str,
        files: Collection[str],
        workspace: Workspace,
        *,
        tools_are_known: bool = False,
        is_kept: Callable[[str], bool] = lambda _: False,
    ) -> JudgeText:
        """`is_kept`: whether a file of the working copy is the task's, whatever an agent does."""
        roots = {
            str(place): "" if folder == workspace.folder else folder.name for place, folder in workspace.places.items()
        }
        root = next((each for each in roots if workspace.workdir.is_relative_to(each)), "/")
        workdir = os.path.normpath(os.path.join(roots.get(root, ""), os.path.relpath(workspace.workdir, root)))
        judge = cls(files, roots, "" if workdir == "." else f"{workdir}/", tools_are_known=tools_are_known)
        judge._read(text)
        written = [*judge._written, *re.findall(r">\s*['\"]?([^\s'\"&|;()<>]+)", text)]
        tops = set(map(_top, written)) - {""}
        names = {os.path.basename(each) for each in written if "$" in each or (judge._leaves and each[:1] != "/")}
        if both := {each for each in judge._started if _top(each) in tops or os.path.basename(each) in names}:
            judge._note(f"programs below {_top(min(both))}, where it writes")
        with suppress(ValueError):  # then it is unknown
            steps = steps_of(plain(text.replace("\\\n", "")))
            judge.shares_input = shares_input(steps)
            judge.follows, is_asked = followed(steps, judge.is_outside, lambda word: is_kept(judge.path_of(word)))
            judge.decides |= is_asked
        return judge

    @property
    def is_read_only(self) -> bool:
        return self.only_tools or (self.tools_are_known and not self.unknown)

    def _read(self, text: str) -> None:
        try:
            commands = list(commands_of(plain(text.replace("\\\n", ""))))
            own = own_variables(commands, self.is_outside)
            computed = [_computed(words) for words in commands]
            read = [[own.sub("", word) for word in words] for words in computed] if own else computed
            arguments = _arguments_of_functions(read)
            for words, others in zip(commands, read, strict=True):
                self._read_expansions(others)
                is_own = _compares_own(others, arguments)
                self._read_command([word.translate(AS_WRITTEN) for word in words], is_own=is_own)
        except ValueError as error:
            self._note(str(error))

    def _note(self, what: str) -> None:
        self.only_tools = False
        self.unknown = self.unknown or what.replace(DOCUMENT, "")[:100]

    def _read_command(self, words: list[str], *, is_own: bool) -> None:
        if words[0] == DEFINES:
            self._functions.update(words[1:])
            return
        self._read_variables(words)
        for word in words:
            for inner in SUBSTITUTION.findall(word):
                self._read(inner)
            if "`" in word or "$(" in SUBSTITUTION.sub("", word):
                self._note(word)
        rest = list(words)
        while rest:
            rest[0] = OF_THE_SYSTEM.sub("", rest[0])
            if not (rest[0] in BEFORE or ASSIGNMENT.fullmatch(rest[0]) or WRAPPER.fullmatch(rest[0])):
                break
            wrapped = WRAPPER.fullmatch(rest.pop(0))
            while wrapped and rest and OPTION.fullmatch(rest[0]):
                if (option := rest.pop(0)).startswith(("-S", "--split", "-i", "--ig", "-u", "--u")):
                    self._note(f"env {option}")
        if not rest or rest[0] in ENDS or rest[0] in self._functions or rest[0] == "for":
            return
        head, arguments = rest[0], rest[1:]
        self.only_tools = self.only_tools and head in TOOLS
        is_inline = SHELL.fullmatch(head) is not None and any(re.fullmatch(r"-\w*c", each) for each in arguments)
        is_helper = head in (f"${VARIABLE}", f"${{{VARIABLE}}}")
        has_a_say = head not in TOOLS or (head in COMPARES and not any(map(LOOKS_AT_A_FILE.fullmatch, arguments)))
        self.decides = self.decides or (has_a_say and not (is_own or is_inline or is_helper))
        if is_helper:
            self.tests = self.tests or runner_in(arguments)
            return
        if head in TOOLS:
            for each in arguments:
                if RUNS_A_FILE.match(f"{head} {each}") or (head == "sed" and SED_RUNS.search(each)):
                    self._note(f"{head} {each}")
            for each, following in pairwise((*arguments, "")):
                if head.endswith("sum") and not self.files:
                    continue  # among the agent's files: `expectations.py` knows whether it changed the sums
                if head in NAMES_A_FILE and (named := NAMES_A_FILE[head].fullmatch(each)):
                    self._start(named[1] or following or each)
            if head in WRITES and arguments:
                to_a_folder = any(each.startswith(("-t", "--target")) for each in arguments)
                self._written |= {*arguments} if to_a_folder else {*arguments[-1:]}
                if self._leaves or "$" in arguments[-1]:
                    self._written |= {f"$/{each}" for each in arguments}
            if head == "cd" and any(each[:1] in "/$~-" and not self.path_of(each) for each in arguments[-1:]):
                self._leaves = True
        elif SHELL.fullmatch(head) or head in ("source", "."):
            self._read_shell(head, arguments)
        elif LANGUAGE.fullmatch(head):
            self._read_language(head, arguments)
        elif not self.tools_are_known or "/" in head or head in RUNS_TEXT:
            self._start(head)

    def _read_expansions(self, words: Sequence[str]) -> None:
        """Notes a command in which a value would become a program, an option or an operator. `words`: as `plain`
        marks them; an unquoted `$(` ends the last one."""
        every, words = words, without_what_is_before(words)
        head, arguments = words[0], [OWN_VALUES.sub("", each) for each in words[1:]]
        paths = arguments[: arguments.index("--")] if "--" in arguments else arguments
        if head in TOOLS - PRINTS_ONLY and any(each.startswith(GLOB) for each in paths):
            self.only_tools = False  # a file of the agent's may be named as an option is; into a clean copy none comes
        bare = [each for each in arguments if BARE in each]
        expanded = [each for each in arguments if EXPANDS.search(each)]
        if head == "[[":
            risky = expanded if COMPARES_NUMBERS & set(arguments) else [each for each in bare if each.endswith(BARE)]
            risky += [two for one, two in pairwise(arguments) if one in TAKES_A_PATTERN and two in bare]
        elif head in ("test", "[", "expr"):
            risky = expanded if {"-v", "-R"} & set(arguments) else bare
            if head == "expr" and {":", "match"} & set(arguments):
                risky = bare + [each for each in expanded if each != arguments[0]]
        elif head in SETS_OPTIONS:
            risky = [each for each in paths if each in expanded]
        elif head in TAKES_OPTIONS or head in OF_PROGRAMS:
            values_of = OF_PROGRAMS.get(head, {})
            risky = bare + [
                each for each in _programs(arguments, values_of) if head in OF_PROGRAMS and each in expanded
            ]
            risky += [each for each in _options(arguments, values_of) if head in TAKES_OPTIONS and each in expanded]
        elif head in NAMES_VARIABLES:
            computes = any(re.fullmatch(r"-\w*i\w*", each) for each in arguments)
            of_printf = bool(arguments and EXPANDS.match(arguments[0])) and (len(arguments) > 1 or BARE in arguments[0])
            names_one = arguments[:1] == ["-v"] or of_printf  # as `-va[$(COMMAND)]`
            risky = [each for each in expanded if head != "printf" or names_one]
            risky = [each for each in risky if computes or EXPANDS.search(each.partition("=")[0])]
        elif SHELL.fullmatch(head) or LANGUAGE.fullmatch(head):
            risky = [
                two for one, two in pairwise(arguments) if one != "-" and INLINE.fullmatch(one) and two in expanded
            ]
            risky += [each for each in expanded if each.startswith(DOCUMENT)]
            if any(re.match(r"-\w*[np]", each) for each in arguments):  # perl and ruby run a file named `COMMAND|`
                risky += expanded
        else:
            risky = []
        risky += [word for word in every if COMPUTES.search(OWN_VALUES.sub("", word))]
        if risky:
            self._note(f"{head} {risky[0]}".translate(AS_WRITTEN))

    def _read_variables(self, words: list[str]) -> None:
        for word in words:
            name, _, value = word.partition("=")
            if name == "IFS" and without_what_is_before(words)[0] == "read" and word != words[-1]:
                continue  # it splits the line that is read
            if LOADS.fullmatch(name.removesuffix("+")) and ("=" in word or words[0] == "unset"):
                parts = value.split(":")
                if words[0] == "unset" or not all(each == f"${name}" or self.is_outside(each) for each in parts):
                    self._note(word)
                self._started |= {*parts}

    def _read_shell(self, head: str, arguments: list[str]) -> None:
        options = [each for each in arguments if each.startswith("-")]
        programs = [each for each in arguments if not each.startswith("-")]
        if not programs:
            self._note(f"{head} without a program")
        elif any("c" in each for each in options if not each.startswith("--")):
            self._read(programs[0])
        elif any("s" in each for each in options if not each.startswith("--")):
            self._note(f"{head} -s")  # it reads a program from its input
        else:
            self._start(programs[0])

    def _read_language(self, head: str, arguments: list[str]) -> None:
        if "-m" in arguments:
            module = arguments[arguments.index("-m") + 1 :][:1]
            self._start(f"./{module[0].replace('.', '/')}.py" if module else head)
            return
        option = BEGINS_WITH_A_FILE.get(os.path.basename(head))
        if option is not None and option not in arguments and not self.files:
            self._note(f"{head} among files that may be the agent's")
        for place, each in enumerate(arguments):
            without_safe_path = re.match(r"-[a-zA-Z]*E", each) and "I" not in each
            if without_safe_path or (each.startswith("-") and not PLAIN_OPTION.fullmatch(each)):
                self._note(f"{head} {each}")
            if INLINE.fullmatch(each):
                program = " ".join(arguments[place + 1 :])
                if STARTS_MORE.search(program) or (each == "-" and DOCUMENT not in program):
                    self._note(f"{head} {each}")
                return
            if not each.startswith("-"):
                self._start(each)
                return
        self._note(f"{head} without a program")

    def path_of(self, word: str) -> str:
        """The path below the working copy that a word may name; "" for what is outside."""
        root = next((each for each in self.roots if f"{word}/".startswith(f"{each}/")), "")
        if not root and word.startswith("/"):
            return ""
        place = os.path.join(self.roots[root], word[len(root) + 1 :]) if root else self.workdir + word
        path = os.path.normpath(place)
        return "" if path.startswith(("/", "..")) else path

    def _start(self, program: str) -> None:
        """A program by its path: of the task, or outside the working copy."""
        path = program.removeprefix("$PWD/").removeprefix("./")
        root = next((each for each in self.roots if path.startswith(f"{each}/")), "")
        if root:
            path = os.path.join(self.roots[root], path.removeprefix(f"{root}/"))
        name = path.removeprefix(self.workdir)
        own = {each for each in self.files if f"/{each}".endswith(f"/{name}")}
        self.programs |= own
        if self.is_outside(path):
            self._started.add(path)
        elif not own & {path, f"{self.workdir}{path}"}:
            self._note(program)

    def is_outside(self, path: str) -> bool:
        """Whether a path leads out of the working copy, and is written out."""
        written_out = path.startswith("/") and not set(path) & set("$*?[~") and ".." not in path
        real = os.path.normpath(f"/{path.lstrip('/')}")
        return written_out and not f"{real}/".startswith((*OTHERS_WRITE, *(f"{each}/" for each in self.roots)))


def _computed(words: Sequence[str]) -> list[str]:
    """The words of a command; names in what bash computes as expansions: `x` of `[[ x -eq 1 ]]` or `a[x]=1`."""
    place = next((at for at, each in enumerate(words) if each not in BEFORE and not ASSIGNMENT.fullmatch(each)), 0)
    head, arguments = words[place], words[place + 1 :]
    if head == "[[" and COMPUTES_BOTH.intersection(arguments):
        computed = re.compile(r".+", re.DOTALL)
    elif head not in NAMES_VARIABLES and "-v" not in arguments:
        return list(words)
    else:
        is_integer = any(re.fullmatch(r"-\w*i\w*", each) for each in arguments)
        computed = re.compile(r"=.*" if is_integer else r"\[.*\]", re.DOTALL)
    changed = [computed.sub(lambda part: NAME.sub(rf"{BARE}\g<0>", part[0]), each) for each in arguments]
    return [*words[: place + 1], *changed]


def _programs(arguments: Sequence[str], values_of: Mapping[str, int]) -> list[str]:
    """The arguments of a tool that may be programs: all before its first file."""
    programs, waiting = list[str](), iter(arguments)
    for each in waiting:
        for _ in range(values_of.get(each, 0)):
            next(waiting, None)
        if each in values_of:
            continue
        programs.append(each)
        if not each.startswith("-"):
            break
    return programs


def _options(arguments: Sequence[str], values_of: Mapping[str, int]) -> Iterator[str]:
    """The arguments that could be options by their value: those that begin with an expansion, before a `--`."""
    waiting = iter(arguments)
    for each in waiting:
        if each == "--":
            return
        for _ in range(values_of.get(each, 0)):
            next(waiting, None)
        if EXPANDS.match(each):
            yield each


def own_variables(
    commands: Iterable[Sequence[str]], is_outside: Callable[[str], bool] = lambda _: False
) -> re.Pattern[str] | None:
    """Matches the expansions of those variables that the text gives only written-out values, what bash computes of
    these, or names of files outside the working copy; None if there are none."""
    values, begun, others = defaultdict[str, list[str]](list), set[str](), set[str]()
    for words in filter(None, commands):
        if words[0] == "for" and words[2:3] == ["in"]:
            values[words[1]] += words[3:]
            begun.add(words[1])
            for each in words[3:]:
                written = re.sub(rf"[${BARE}]\{{[^{{}}]*\}}", "", each)
                begins = re.split(r"[*?[~]", written)[0]
                is_own = begins == written or (written == each and is_outside(begins[: begins.rfind("/") + 1]))
                others |= set() if is_own else {words[1]}
            continue
        program = without_what_is_before(words)
        assigning = words if program[0] in NAMES_VARIABLES else words[: len(words) - len(program) + (program == [""])]
        for place, word in enumerate(words):
            name, mark, value = word.partition("=")
            if mark and ASSIGNMENT.fullmatch(word):
                values[name.removesuffix("+")].append(STATUS.sub("", value))
                is_first = place < len(assigning) and not re.search(rf"\b{name}\b", value)  # not `n=$((n + 1))`
                begun |= {name} if is_first else set()
            others.update(re.findall(r"\{(\w+):?=", word))
            others |= {word} if words[0] not in TOOLS - NAMES_VARIABLES else set()
    own = begun - others
    while own:
        names = "|".join(map(re.escape, sorted(own)))
        counts = rf"\[(?:\b(?:{names}|\d+)\b|[-+*/%=<>!])+\]"
        item = rf"\[(?:\d+|[@*]|[${BARE}]?(?:{names}))\]"
        numbers = rf"[${BARE}](?:\{{!(?:{names})\[[@*]\]\}}|{counts})"
        kept = {name for name in own if not any(EXPANDS.search(re.sub(numbers, "", each)) for each in values[name])}
        if kept == own:
            braced = rf"\{{#?(?:{names})(?:{item})?(?:[%#]{{1,2}}[^{{}}`${BARE}]*)?\}}"
            return re.compile(rf"[${BARE}](?:{braced}|(?:{names})(?!\w))|{numbers}")
        own = kept
    return None


def _arguments_of_functions(commands: Iterable[Sequence[str]]) -> Sequence[str]:
    """What the text's own functions are called with."""
    commands = list(map(without_what_is_before, commands))
    functions = {name for words in commands for name in words[1:] if words[0] == DEFINES}
    return [each for words in commands if words[0] in functions for each in words[1:]]


def _compares_own(words: Sequence[str], arguments: Sequence[str]) -> bool:
    """Whether a command compares nothing but what the judge itself knows: texts, exit codes, and variables of these."""
    words = without_what_is_before(words)
    if words[0] not in COMPARES:
        return False
    if arguments and any(map(ARGUMENT.search, words)):
        words = [*(ARGUMENT.sub("", each) for each in words), *arguments]
    return not any(EXPANDS.search(OWN_VALUES.sub("", STATUS.sub("", each))) for each in words)


def _top(path: str) -> str:
    """The first folder of an absolute path; "" for others."""
    return "/" + path.split("/")[1] if path.startswith("/") else ""
