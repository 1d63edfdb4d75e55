"""Reads the commands of a shell script, without running anything.

The script is taken to start in the current folder, without arguments. A variable that it does not
set, or whose value is not known, is left as written, with its `$`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from pgtoolkit.config.shell_syntax import (
    Arithmetic,
    Branches,
    Case,
    Chain,
    Function,
    Loop,
    Pipeline,
    Sequence,
    Simple,
    Statement,
    Subshell,
    Word,
    parsed,
)
from pgtoolkit.config.shell_words import (
    ASSIGNMENT,
    NAME,
    State,
    Value,
    Words,
    changed,
    is_known,
    is_several,
    merged,
)

_ENVIRONMENT = re.compile(
    r"conda|/activate\b|bashrc|/\.?(?:bash_)?profile\b|set_env\.sh|setvars\.sh"
)
"""Finds files and commands that set up a terminal or an environment."""

_READERS = {
    "read": ["REPLY"],
    "readarray": ["MAPFILE"],
    "mapfile": ["MAPFILE"],
    "getopts": ["OPTARG", "OPTIND"],
}
"""Builtins that set the variables that they name -> those that they may set beside these."""

_SETS = {"printf": "-v", "wait": "-p"}
"""A builtin -> its option that names a variable to set."""

_DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")
_SUCCEEDS = ("cd", "pushd", "popd", "echo", "printf", "mkdir", "set", "shopt", "ulimit", "shift")
_STEPS = 20_000
"""Statements that are followed at most, those of loops and functions each time."""

_CALLS = 20
"""Functions and sourced files within each other that are followed at most."""


@dataclass
class Command:
    """A command. words: as bash gives them to it. assumed: sentences on how they were read.

    gpus: what CUDA_VISIBLE_DEVICES is where it names several; else "".
    """

    words: list[str]
    assumed: list[str]
    gpus: str


class Script(Words):
    """A shell script. commands: those that it runs or may run, in their order.

    folder: the one that the script lies in, seen from the current one; None: it is not known.
    Raises ValueError for a text that is no script.
    """

    def __init__(self, script: str, folder: Path | None = None):
        super().__init__(folder)
        self.commands: list[Command] = []
        self._home = folder
        self._assumed: list[str] = []
        self._file = ""
        self._left: list[list[State]] = [[]]  # states at `return`, of each function
        self._broken: list[list[State]] = [[]]  # states at `break`, of each loop
        self._depth = 0  # of functions
        self._steps = 0
        self._run(parsed(script))

    def _run(self, node: Statement) -> bool | None:
        """Follow a statement; return whether it succeeds, None where that is not known."""
        if self._now.over:
            return None
        self._steps += 1
        if self._steps > _STEPS:
            raise ValueError("its loops and functions are too many to follow")
        place = self._place
        first_line = node.raw.strip().partition("\n")[0]
        self._place = f"line {node.line}{self._file}, {first_line[:60]}"
        try:
            return self._followed(node)
        finally:
            self._place = place

    def _followed(self, node: Statement) -> bool | None:
        match node:
            case Simple():
                return self._simple(node)
            case Sequence():
                status: bool | None = True
                for statement, in_background in zip(
                    node.statements, node.in_background, strict=True
                ):
                    if in_background:
                        self._apart(statement)
                        status = True
                    else:
                        status = self._run(statement)
                return status
            case Chain():
                return self._chain(node)
            case Pipeline():
                if len(node.statements) == 1:
                    status = self._run(node.statements[0])
                else:
                    for statement in node.statements:
                        status = self._apart(statement)
                return not status if node.negated and status is not None else status
            case Subshell():
                return self._apart(node.body)
            case Arithmetic():
                result = self._number(node.expression)
                self._forget(changed(node.expression))
                return None if result is None else result != 0
            case Function():
                self._now.functions[node.name] = [node.body]
                return True
            case Branches():
                return self._branches(node)
            case Case():
                return self._case(node)
            case Loop():
                self._loop(node)
        return None

    def _apart(self, node: Statement) -> bool | None:
        """Follow a statement in a shell of its own: what it sets does not last."""
        before = self._now.copied()
        status = self._run(node)
        self._now = before
        return status

    def _either(self, ways: Iterable[Callable[[], object]]) -> None:
        """Follow several ways, of which bash takes one that is not known."""
        before = self._now
        states = []
        for way in ways:
            self._now = before.copied()
            way()
            states.append(self._now)
        self._now = self._joined(states)

    def _joined(self, states: list[State]) -> State:
        """Return what is certain where one of these states holds."""
        alive = [state for state in states if not state.over]
        if len(alive) < 2:
            return alive[0] if alive else states[0]
        joined = alive[0].copied()
        for name in dict.fromkeys(name for state in alive for name in state.values):
            held = [state.values.get(name) for state in alive]
            if any(value != held[0] for value in held) and name == "PWD":
                joined.values.pop(name, None)
            elif any(value != held[0] for value in held):
                values = [[] if value is None else value for value in held]
                joined.values[name] = reduce(
                    lambda before, after: merged(name, before, after), values
                )
                self._reasons[name] = self._place
        for name in dict.fromkeys(name for state in alive for name in state.functions):
            bodies = [body for state in alive for body in state.functions.get(name, [None])]
            joined.functions[name] = [
                body for at, body in enumerate(bodies) if body not in bodies[:at]
            ]
        for name in dict.fromkeys(name for state in alive for name in state.hidden):
            if any(name not in state.hidden for state in alive):
                joined.hidden[name] = f"${name}"
                self._reasons[name] = self._place
        joined.opened = next((state.opened for state in alive if state.opened), "")
        if any(state.folder != joined.folder for state in alive):
            joined.folder = None
        return joined

    def _chain(self, node: Chain) -> bool | None:
        pairs = [*zip(node.signs, node.statements, strict=True)]
        status = self._run(pairs[0][1])
        at = 1
        while at < len(pairs):
            sign, statement = pairs[at]
            at += 1
            if status is not None:
                status = self._run(statement) if status == (sign == "&&") else status
                continue
            behind = [statement]
            while at < len(pairs) and pairs[at][0] == sign:  # what depends on the same status
                behind.append(pairs[at][1])
                at += 1
            signs = ["", *[sign] * (len(behind) - 1)]
            rest = Chain(node.line, node.raw, behind, signs)
            self._either([lambda: None, lambda rest=rest: self._run(rest)])
        return status

    def _branches(self, node: Branches) -> bool | None:
        """Follow the branches that may be taken."""
        statuses: list[bool | None] = []

        def follow(branches: list[tuple[Sequence | None, Sequence]]) -> None:
            if not branches:
                statuses.append(True)
                return
            condition, body = branches[0]
            holds = True if condition is None else self._run(condition)
            if holds is None:
                self._either(
                    [lambda: statuses.append(self._run(body)), lambda: follow(branches[1:])]
                )
            elif holds:
                statuses.append(self._run(body))
            else:
                follow(branches[1:])

        follow(node.branches)
        return statuses[0] if len({*statuses}) == 1 else None

    def _case(self, node: Case) -> None:
        """Follow the clauses that may be taken."""
        word = self._text(node.word.pieces)
        possible: list[Callable[[], object]] = []
        for patterns, body in node.clauses:
            texts = [self._text(pattern.pieces) for pattern in patterns]
            is_taken = "*" in [pattern.raw for pattern in patterns]
            is_open = any(re.search(r"[*?[$`\\]", text) for text in texts)
            is_taken |= is_known(word) and word in texts and not is_open
            if is_taken or is_open or not is_known(word):
                possible.append(lambda body=body: self._run(body))
            if is_taken and not node.falls:
                break
        else:
            possible.append(lambda: None)
        if node.falls:
            for way in possible:
                self._either([way, lambda: None])
        else:
            self._either(possible)

    def _loop(self, node: Loop) -> None:
        """Follow the body of a loop until a further pass changes no variable."""
        first = len(self.commands)
        words = None if node.words is None else self._fields(node.words)
        runs_once = words is not None and len(words) == 1 and not re.search(r"[$`*?[]", words[0])
        if words == []:
            return
        while True:
            del self.commands[first:]  # this pass notes them anew: variables may differ
            before = self._now.copied()
            if node.sign in ("while", "until"):
                holds = self._run(node.condition) if node.condition else None
                if holds == (node.sign == "until"):
                    return  # the body is not reached, or no longer
            elif node.name.startswith("(("):
                self._forget(changed(node.name))
            elif runs_once and words:
                self._assign(node.name, words[0])
            else:
                self._forget([node.name])
            skipped = self._now.copied()
            self._broken.append([])
            self._run(node.body)
            states = [self._now, *self._broken.pop()]
            self._now = self._joined([*states, *([] if runs_once else [skipped, before])])
            if runs_once or self._now.over or self._now == before:
                return

    def _call(self, bodies: list[Statement | None], words: list[str]) -> bool | None:
        """Follow a function. bodies: those that its name may have."""
        if len(self._left) > _CALLS:
            self._open("it calls itself")
            return None
        arguments = self._now.values.pop("@", None)
        hidden = self._now.hidden
        self._now.hidden = {}
        if words[1:] != ["$@"]:
            self._now.values["@"] = words[1:]
        elif arguments is not None:
            self._now.values["@"] = arguments
        self._left.append([])
        self._depth += 1
        broken = self._broken
        self._broken = [[]]
        statuses: list[bool | None] = []
        self._either(
            [lambda body=body: body and statuses.append(self._run(body)) for body in bodies]
        )
        returned = self._left.pop()
        self._depth -= 1
        self._broken = broken
        self._now = self._joined([self._now, *returned])
        for name, value in self._now.hidden.items():
            self._set(name, value)
        self._now.hidden = hidden
        self._set("@", arguments)
        return statuses[0] if len(statuses) == 1 and not returned else None

    def _assume(self, sentence: str) -> None:
        if sentence not in self._assumed:
            self._assumed.append(sentence)

    def _simple(self, node: Simple) -> bool | None:
        """Follow assignments, a builtin that changes variables, a function or a command."""
        is_setting = [ASSIGNMENT(word.raw) is not None for word in node.words]
        count = [*is_setting, False].index(False)
        if count == len(node.words):
            for word in node.words:
                self._assignment(word)
            runs = any(piece.text[:2] in ("$(", "`") for w in node.words for piece in w.pieces)
            return None if runs else True
        before = [self._text(word.pieces) for word in node.words[:count]]
        words = node.words[count:]
        if words[0].raw in _DECLARATIONS:
            return self._declaration(words)
        if words[0].raw == "[[":
            return self._test(words[1:-1], is_new=True)
        if words[0].raw in ("[", "test"):
            is_closed = words[0].raw == "["
            return self._test(words[1 : len(words) - is_closed], is_new=False)
        fields = self._fields(words)
        is_plain = False
        while fields and fields[0] in ("command", "builtin", "exec"):
            ends = fields.pop(0) == "exec" and fields
            is_plain = True
            if ends:
                self._command(fields, before)
                self._now.over = True
                return None
        if not fields:
            return True
        bodies = self._now.functions.get(fields[0]) if not is_plain else None
        if bodies is not None:
            if before:  # they hold in the function alone
                saved = {name: self._now.values.get(name) for name in _names(before)}
                for word in node.words[:count]:
                    self._assignment(word)
                status = self._call(bodies, fields)
                for name, value in saved.items():
                    self._set(name, value)
                return status
            if None in bodies:
                self._command(fields, before)
            return self._call(bodies, fields)
        return self._command(fields, before)

    def _command(self, words: list[str], before: list[str]) -> bool | None:
        """Note a command, or follow a builtin. before: the assignments before its name."""
        name = words[0]
        rest = words[1:]
        names = [word.partition("[")[0] for word in rest]
        names = [word for word in names if NAME(word)]
        is_seen = not any(map(is_several, rest))
        if name in ("true", ":", "false"):
            return name != "false"
        if name in _READERS or _SETS.get(name) in rest:
            self._forget([*names, *_READERS.get(name, [])])
            if not is_seen and name != "printf":
                self._open("its names are not known")
            if name == "getopts" and "@" not in self._now.values:
                return False  # since there is no argument
        elif name == "let":
            self._forget([each for word in rest for each in changed(word)])
            if not is_seen:
                self._open("its names are not known")
        elif name == "unset":
            self._unset(rest)
        elif name in ("eval", ".", "source"):
            return self._sourced(name, rest)
        elif name == "shift":
            self._shift(rest)
        elif name == "set":
            self._arguments(rest)
        elif name in ("exit", "return", "break", "continue"):
            if name == "return" and len(self._left) == 1:
                return False  # an error, which ends nothing
            if name == "return":
                self._left[-1].append(self._now.copied())
            elif name != "exit":
                for broken in self._broken[1:]:  # `break 2` leaves more loops than one
                    broken.append(self._now.copied())
            self._now.over = True
        elif name in ("shopt", "trap", "alias") and re.search(
            r"lastpipe|expand_aliases|\b(DEBUG|ERR|RETURN)\b", " ".join(rest)
        ):
            self._open("it changes how commands are read")
        else:
            if name in ("cd", "pushd", "popd"):
                self._now.values.pop("PWD", None)  # no longer the current folder
                self._now.folder = None  # $0 may be seen from the folder before
            self._note(words, before)
        return True if name in _SUCCEEDS else None

    def _note(self, words: list[str], before: list[str]) -> None:
        """Note a command, and for each variable in it that is not known, since when.

        before: its own variables.
        """
        text = " ".join([*before, *words])
        named = dict.fromkeys(re.findall(r"\$\{?[!#]?(\w+)", text))
        places: dict[str, list[str]] = {}
        for name in named:
            if name in self._reasons:
                places.setdefault(self._reasons[name], []).append(f"${name}")
        opened = [self._now.opened] if self._now.opened else []
        unknown = [
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not known after {place}"
            for place, names in places.items()
            if not opened or place not in opened[0]
        ]
        own = dict(setting.split("=", 1) for setting in before)
        gpus = own.get("CUDA_VISIBLE_DEVICES", self._now.values.get("CUDA_VISIBLE_DEVICES"))
        several = gpus if isinstance(gpus, str) and re.fullmatch(r"\d+(,\d+)+", gpus) else ""
        self.commands.append(Command(words, [*self._assumed, *opened, *unknown], several))

    def _unset(self, words: list[str]) -> None:
        for word in words:
            if "[" in word:
                self._forget([word.partition("[")[0]])
            elif not is_known(word):
                self._open("its names are not known")
            elif not word.startswith("-"):
                if "-f" in words or word not in self._now.values:
                    self._now.functions.pop(word, None)
                if "-f" not in words:
                    self._now.values[word] = []

    def _shift(self, words: list[str]) -> None:
        arguments = self._now.values.get("@")
        if isinstance(arguments, list):
            count = words[0] if words else "1"
            if count.isdigit() and "$" not in "".join(arguments[: int(count)]):
                self._now.values["@"] = arguments[int(count) :]
            else:
                self._forget(["@"])

    def _arguments(self, words: list[str]) -> None:
        """Follow `set`."""
        if "--" in words:
            self._now.values["@"] = words[words.index("--") + 1 :]
        elif words and not words[0].startswith(("-", "+")):
            self._now.values["@"] = words

    def _sourced(self, name: str, words: list[str]) -> bool | None:
        """Follow the statements of a file, for `source`, or of a text, for `eval`."""
        if not words:
            return True
        text = " ".join(words)
        file = self._file
        folder = self._now.folder
        if _ENVIRONMENT.search(text):
            self._assume(f"{self._place} sets no variable of these")
            return None
        if name == "eval":
            if not is_known(text):
                self._open("its text is not known")
                return None
        else:
            path = Path(words[0]).expanduser()
            places = [path, *([self._home / path] if self._home else [])]
            if "PWD" not in self._now.values and not path.is_absolute():
                places = []
            sourced = next((place for place in places if place.is_file()), None)
            if sourced is None or sourced.stat().st_size > 1 << 20 or not is_known(words[0]):
                self._open(f"{words[0]} is not found" if sourced is None else "it is not read")
                return None
            text = sourced.read_text(encoding="utf-8", errors="replace")
            self._file = f" of {sourced}"
            self._now.folder = folder if sourced.parent == self._home else None
            self._assume(f"{sourced}, which it sources, is read")
        if len(self._left) > _CALLS:
            self._open("it calls itself")
            return None
        try:
            body = parsed(text)
        except ValueError:
            self._file = file
            self._open("it is not read as bash")
            return None
        arguments = self._now.values.get("@")
        if words[1:] and name != "eval":
            self._now.values["@"] = words[1:]
        self._left.append([])
        status = self._run(body)
        self._now = self._joined([self._now, *self._left.pop()])
        if words[1:] and name != "eval":
            self._set("@", arguments)
        self._file = file
        if folder is not None and "PWD" in self._now.values:
            self._now.folder = folder
        return status

    def _declaration(self, words: list[Word]) -> bool | None:
        """Follow `export`, `local` and the like."""
        kind = words[0].raw
        options = "".join(word.raw[1:] for word in words if word.raw.startswith(("-", "+")))
        if "f" in options or "p" in options:
            return True
        if "n" in options and kind != "export":
            self._open("it names a variable by another")
        is_own = self._depth > 0 and kind not in ("export", "readonly") and "g" not in options
        if kind == "local" and not is_own:
            return False  # an error, which sets nothing
        runs = False
        for word in words[1:]:
            if word.raw.startswith(("-", "+")):
                continue
            setting = ASSIGNMENT(word.raw)
            expanded = [word.raw] if setting else self._fields([word])
            runs |= any(piece.text.startswith(("$(", "`")) for piece in word.pieces)
            for text in expanded:
                name = setting[1] if setting else text.partition("=")[0]
                if not NAME(name):
                    self._open("its names are not known")
                    continue
                if is_own:
                    self._now.hidden.setdefault(name, self._now.values.get(name))
                if {*"iluA"} & {*options}:
                    self._with_attributes.add(name)
                if setting:
                    self._assignment(word)
                elif "=" in text:
                    self._assign(name, text.partition("=")[2])
                elif is_own:
                    self._now.values[name] = []
                elif name in self._with_attributes:
                    self._forget([name])
        return None if runs else True

    def _assignment(self, word: Word) -> None:
        """Follow `NAME=value`, `NAME+=value`, `NAME=(...)` or `NAME[...]=value`."""
        setting = ASSIGNMENT(word.raw)
        assert setting is not None
        name, subscript, adds = setting.groups()
        text = self._text(word.pieces)
        elements = None if word.array is None else self._fields(word.array)
        by_index = any(element.raw.startswith("[") for element in word.array or [])
        if subscript is not None or by_index:
            self._forget([name])
            return
        added = text[len(setting[0]) :]
        value: Value = added if elements is None else elements
        held = self._now.values.get(name, f"${name}" if self._now.opened else [])
        if adds:
            value = _sum(held, value)
        self._assign(name, value)
        if adds and elements is None and " $" in str(held) and not added[:1].isspace():
            self._forget([name])  # the text may belong to the last word, which is not known


def _sum(held: Value, added: Value) -> Value:
    """Return the value after `+=`; a text is added to the first element of an array."""
    if isinstance(added, list):
        return [*([held] if isinstance(held, str) else held), *added]
    if isinstance(held, str) or not held:
        return "".join(held) + added
    return [held[0] + added, *held[1:]]


def _names(settings: list[str]) -> list[str]:
    return [text.partition("=")[0].rstrip("+") for text in settings]
