"""The words of a judge's text, and its steps: commands, with what they read and what stands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ENDS = frozenset(("}", "done", "fi", "esac"))
BEFORE = frozenset(("!", "if", "then", "elif", "else", "while", "until", "do", "{", "time", "exec", "command", "nohup"))
WRAPPER = re.compile(r"(env|nice|timeout)")
OF_THE_SYSTEM = re.compile(r"\A/(usr/(local/)?)?s?bin/(?=[\w.+-]+\Z)")
"""The folders of programs that are the same ones without a path: `/usr/bin/make`."""
OPTION = re.compile(r"-.*|[\d.]+[smh]?")
ASSIGNMENT = re.compile(r"\w+\+?=.*", re.DOTALL)
SHELL = re.compile(r"(/usr)?(/bin/)?(bash|dash|ksh|zsh|sh)")
LANGUAGE = re.compile(r"(/usr)?(/local)?(/bin/)?(python|pypy|node|deno|bun|ruby|perl|php|lua|Rscript|julia)[\d.]*")
INLINE = re.compile(r"-[a-zA-Z]*[ce]|--eval|-")
REDIRECTION = re.compile(r"(\d*[<>]+)(.*)", re.DOTALL)
HERE_DOCUMENT = re.compile(r"<<-?\s*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)")
DEFINES = "\0"
"""The first of two words, in place of the definition of a function with the second's name."""
SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
SEPARATORS = ";|&()\n"
LITERAL, BARE = "\1", "\2"
"""In place of a `$` that bash doesn't expand, and of one that it expands outside quotation marks. The latter's value is
split into words, and may be patterns, options and operators: `test $x = 42` holds for an x of `1 -o 1`."""
DOCUMENT, GLOB = "\3", "\4"
"""Before the text of a here document, and a pattern of paths that begins a word."""
AS_WRITTEN = str.maketrans({LITERAL: "$", BARE: "$", GLOB: ""})
EXPANDS = re.compile(rf"[${BARE}]([\w({{\[@*]|\Z)|`")
COUNTS = re.compile(r"\$\(\(((?:[\w \t+*/%-]|\$(?=[A-Za-z_]))+)\)\)")
COUNTS_ALONE = re.compile(r"\(\(((?:[\w \t+*/%=<>!-]|\$(?=[A-Za-z_]))+)\)\)")
"""What bash computes of numbers and variables; `plain` writes both as `$[...]`, the latter as the argument of `:`."""
LIST = re.compile(r"(?<![^\s;])(\w+\+?)=\(([^()`$<>|&;\\]*)\)(?=[\s;]|\Z)")
"""An array of written-out values; `plain` writes them as one text."""
SPACES = re.compile(r"'\\[nt]'")
BEGINS_A_GLOB = re.compile(r"[*?]|\[[^\s\[]")


def counted(text: str) -> str:
    """What bash computes, without spaces; with `?` between names without an operator, as a value may have one."""
    return re.sub(r"[$ \t]", "", re.sub(r"(?<=\w)[$ \t]+(?=\w)", "?", text))


def plain(text: str) -> str:
    """A text without comments, with `- 'TEXT'` for each here document. Raises `ValueError` for what it can't parse."""
    plain, quote, at, document = list[str](), "", 0, (0, 0)  # where the line's here document is
    while at < len(text):
        char, step = text[at], 1
        if quote == "'":
            quote = "" if char == "'" else quote
            char = LITERAL if char == "$" else char
        elif text.startswith("\\$", at):
            char, step = LITERAL, 2
        elif not quote and (values := LIST.match(text, at)):
            char, step = f"{values[1]}={shlex.quote(values[2])}", len(values[0])
        elif counts := COUNTS.match(text, at):
            char, step = f"{'$' if quote else BARE}[{counted(counts[1])}]", len(counts[0])
        elif not quote and char == "(" and (counts := COUNTS_ALONE.match(text, at)) and text[at - 1 : at] != "$":
            char, step = f': "$[{counted(counts[1])}]"', len(counts[0])
        elif char == "\\":
            char, step = text[at : at + 2], 2
        elif quote:
            quote = "" if char == quote else quote
            if text.startswith("$(", at) and set("'\"\\") & set(text[at : text.find(")", at)]):
                raise ValueError("a quotation in a quotation")
        elif char in "'\"":
            if (spaces := SPACES.match(text, at)) and plain[-1:] == [BARE]:
                plain[-1:] = ["'\t'" if "t" in spaces[0] else "'\n'"]
                at += len(spaces[0])
                continue
            if plain[-1:] == [BARE]:
                raise ValueError(f"${char}")
            quote = char
        elif char == "#" and (not plain or plain[-1][-1] in f" \t{SEPARATORS}"):
            at = (at + text[at:].find("\n")) if "\n" in text[at:] else len(text)
            continue
        elif BEGINS_A_GLOB.match(text, at) and (not plain or plain[-1][-1] in f" \t{SEPARATORS}"):
            char = GLOB + char
        elif char == "$":
            char = BARE if EXPANDS.match(text[at : at + 2]) or text[at + 1 : at + 2] in set("#?!$-'\"") else LITERAL
        elif text.startswith("<<<", at):
            char, step = "<<<", 3
        elif text.startswith("<<", at):
            found = HERE_DOCUMENT.match(text, at)
            start = text.find("\n", at)
            end = found and re.compile(rf"^\t*{found['end']}$", re.MULTILINE).search(text, start + 1)
            if found is None or not end or start < 0 or document[1]:
                raise ValueError("a here document")
            document = start, end.end()
            body = text[start : end.start()]
            if not found["quote"] and re.search(r"\$\(|`", body):
                raise ValueError("a command in a here document")
            body = body.replace("$", LITERAL) if found["quote"] else body
            plain.append(f" - {shlex.quote(DOCUMENT + body)} ")
            at = found.end()
            continue
        elif char == "\n" and document[1]:
            if at != document[0]:
                raise ValueError("a here document in a quotation")
            at, document = document[1], (0, 0)
            plain.append("\n")
            continue
        plain.append(char)
        at += step
    if quote or document[1]:
        raise ValueError("an open quotation")
    text = re.sub(r"(?<!\d)(\d*)<&(\d)", r"\1< /dev/fd/\2", "".join(plain))
    return re.sub(r"&>>?", ">", re.sub(r"(?<!\d)\d*>&[\d-]", " ", text))


def without_what_is_before(words: Sequence[str]) -> Sequence[str]:
    """A command's words from its program on, which wrappers (`timeout 5`) may start; one empty word without any."""
    rest = [*words]
    while rest:
        rest[0] = OF_THE_SYSTEM.sub("", rest[0])
        if not (rest[0] in BEFORE or ASSIGNMENT.fullmatch(rest[0]) or WRAPPER.fullmatch(rest[0])):
            return rest
        is_wrapper = WRAPPER.fullmatch(rest.pop(0))
        while is_wrapper and rest and OPTION.fullmatch(rest[0]):
            rest.pop(0)
    return [""]


def tokens(text: str) -> shlex.shlex:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=SEPARATORS)
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    return lexer


def commands_of(text: str) -> Iterator[list[str]]:
    """The simple commands of a text, as words. Raises `ValueError` for an open quotation."""
    words: list[str] = []
    closed = False  # what follows a closing bracket are the arguments of the command before it
    for word in (*tokens(text), ";"):
        if not word or word.strip(SEPARATORS):
            closed = closed and word != "{"
            if not closed:
                words.append(word)
            continue
        if "((" in word:  # also a folder of commands in another: a name there could be a tool's, as `sum` is
            raise ValueError("what bash computes")
        if words:
            is_definition = word.startswith("()") and len(words) == 1
            command = [DEFINES, *words] if is_definition else list(without_redirections(words))
            if command:
                yield command
        words, closed = [], word.endswith(")")


def without_redirections(words: list[str]) -> Iterator[str]:
    is_target = False
    for word in words:
        found = REDIRECTION.fullmatch(word)
        if not found and not is_target:
            yield word
        is_target = bool(found and not found[2])


@dataclass(slots=True)
class ShellStep:
    """A command, or what stands between brackets or words such as `while` and `done` (`steps`).

    `words`: of a command, without redirections. `inner`: by the number of a word, the steps whose output it is, or
    that it is a file of (`<(`). `inputs`: where its input comes from, if it has one of its own: paths, texts of here
    documents (which begin with `DOCUMENT`), here strings (with `TEXT`), or steps. `outputs`: the paths that it writes.
    `before`: what is piped into it. `name`: of a function whose body it is."""

    words: list[str] = field(default_factory=list)
    steps: list[ShellStep] = field(default_factory=list)
    inner: dict[int, list[ShellStep]] = field(default_factory=dict)
    inputs: list[str | list[ShellStep]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    before: ShellStep | None = None
    name: str = ""

    @property
    def has_input(self) -> bool:
        return bool(self.inputs) or self.before is not None


TEXT = "\5"
"""Before the text of a here string."""
OPENS = frozenset(("while", "until", "if", "for", "{"))
BETWEEN = frozenset(("then", "do", "else", "elif", "!", "time"))
OPERATOR = re.compile(r"\|\||&&|\|&|[;|&()\n]")
SAME_INPUT = re.compile(r"/dev/(stdin|fd/0)|/proc/(self|\$\$)/fd/0")


def steps_of(text: str) -> list[ShellStep]:
    """The steps of a text, as `plain` returns it. What is not closed ends with the text."""
    found = list[str]()
    for token in tokens(text):
        found += [token] if not token or token.strip(SEPARATORS) else OPERATOR.findall(token)
    parser, steps = _Parser(found), list[ShellStep]()
    while parser.at < len(found):
        steps += parser.steps()
        parser.at += 1  # what closes nothing
    return steps


@dataclass(slots=True)
class _Parser:
    tokens: list[str]
    at: int = 0

    def steps(self) -> list[ShellStep]:
        """Up to a closing bracket or word that opens with none of them."""
        steps, before = list[ShellStep](), None
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token == ")" or token in ENDS:
                break
            if token in ("|", "|&"):
                before = steps[-1] if steps else None
            elif token != "(" and OPERATOR.fullmatch(token):
                before = before if token == "\n" else None
            elif token not in BETWEEN:
                step = self._step()
                step.before, before = before, None
                steps.append(step)
                continue
            self.at += 1
        return steps

    def _step(self) -> ShellStep:
        token = self.tokens[self.at]
        if token not in OPENS and token != "(":
            return self._command()
        self.at += token != "for"
        header = [self._command()] if token == "for" else []
        step = ShellStep(steps=[*header, *self.steps()])
        while self.tokens[self.at : self.at + 1] == [")"] and token != "(":  # a bracket too many
            self.at += 1
            step.steps += self.steps()
        self.at += 1
        rest = self._command()
        step.inputs, step.outputs = rest.inputs, rest.outputs
        return step

    def _command(self) -> ShellStep:
        words, inner = list[str](), dict[int, list[ShellStep]]()
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token == "(" and len(words) == 1 and self.tokens[self.at + 1 : self.at + 2] == [")"]:
                self.at += 2
                while self.tokens[self.at : self.at + 1] == ["\n"]:
                    self.at += 1
                body = self._step() if self.at < len(self.tokens) else ShellStep()
                return ShellStep(steps=[body], name=words[0])
            if token == "(":
                self.at += 1
                inner[len(words) - 1] = self.steps()
            elif OPERATOR.fullmatch(token):
                break
            else:
                words.append(token)
            self.at += 1
        return _redirected(words, inner)


def _redirected(words: Sequence[str], inner: dict[int, list[ShellStep]]) -> ShellStep:
    """A command, of all its words."""
    step, at = ShellStep(), 0
    while at < len(words):
        word, found = words[at], REDIRECTION.fullmatch(words[at])
        if word.startswith(DOCUMENT):
            step.inputs.append(word)
            step.words.pop()  # the `-` in its place
        elif found and not (at in inner and not found[2]):
            at += not found[2]
            target = found[2] or "".join(words[at : at + 1])
            if "<" not in found[1]:
                step.outputs.append(target)
            elif at in inner:
                step.inputs.append(inner[at])
            elif found[1] == "<<<":
                step.inputs.append(TEXT + target)
            elif found[1] in ("<", "0<") and not SAME_INPUT.fullmatch(target):
                step.inputs.append(target)
        else:
            if at in inner:
                step.inner[len(step.words)] = inner[at]
            step.words.append(word)
        at += 1
    return step
