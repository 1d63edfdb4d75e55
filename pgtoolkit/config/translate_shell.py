"""Reads the commands of a shell script, without running anything.

The script is taken to start in the current folder, without arguments. A variable that it does not
set, or whose value is not known, is left as written, with its `$`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pgtoolkit.config.shell_syntax import Node, Word, parsed
from pgtoolkit.config.shell_words import (
    NAME,
    State,
    Value,
    Words,
    changed,
    code,
    has_braces,
    is_known,
    is_several,
    merged,
    number_of,
    shown,
)

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=").match
_ENVIRONMENT = re.compile(
    r"conda|/activate\b|bashrc|/\.?(?:bash_)?profile\b|set_env\.sh|setvars\.sh"
).search
"""Finds files and commands that set up a terminal or an environment."""

_READERS = ("read", "readarray", "mapfile", "getopts", "let", "unset", "printf", "wait")
"""Builtins that set variables that they name, some of them with an option `-v` or `-p` alone."""

_READ_INTO = ("REPLY", "MAPFILE", "OPTARG", "OPTIND")
"""Variables that these set beside the named ones."""

_SHELLS = ("bash", "sh", "/bin/bash", "/bin/sh", "/usr/bin/bash")
_RUNNERS = ("nohup", "env", "setsid", "srun", "timeout")
"""Commands that start the one behind their options, with the variables that programs see."""

_DECLARATIONS = ("export", "declare", "typeset", "local", "readonly")
_SUCCEEDS = ("cd", "pushd", "popd", "echo", "printf", "mkdir", "set", "shopt", "ulimit", "shift")
_STEPS = 20_000
"""Statements that are followed at most, those of loops and functions each time."""

_CALLS = 20
"""Functions and files within each other that are followed at most."""


@dataclass
class Command:
    """A command. words: as bash gives them to it. assumed: sentences on how they were read.

    gpus: what CUDA_VISIBLE_DEVICES is where it names several; else "".
    """

    words: list[str]
    assumed: list[str]
    gpus: str


class _Left(Exception):
    """Is raised where the next statement is never reached."""


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
        self._frames: list[tuple[str, list[State]]] = []
        """The loops, functions and files that are followed, and the states at their ends."""
        self._steps = 0
        self._definitions: list[Node] = []  # of functions
        self._locals: set[str] = set()  # variables of functions: at their end not known
        self._apart(parsed(script))

    def _run(self, node: Node) -> bool | None:
        """Follow a statement; return whether it succeeds, None where that is not known."""
        self._steps += 1
        if self._steps > _STEPS:
            raise ValueError("its loops and functions are too many to follow")
        place = self._place
        first_line = node.raw.partition("\n")[0]
        self._place = f"line {node.line}{self._file}, {first_line[:60]}"
        try:
            return self._followed(node)
        finally:
            self._place = place

    def _followed(self, node: Node) -> bool | None:
        status: bool | None = True
        match node.sign:
            case "":
                return self._simple(node)
            case ";":
                for part in node.parts:
                    status = self._run(part)
            case "&" | "(" | "|":
                for part in node.parts:
                    status = self._apart(part)
                return True if node.sign == "&" else status
            case "!":
                status = self._run(node.parts[0])
                return None if status is None else not status
            case "&&" | "||":
                status = self._run(node.parts[0])
                if status is None:
                    self._either([lambda: None, lambda: self._run(node.parts[1])])
                elif status == (node.sign == "&&"):
                    return self._run(node.parts[1])
            case "((":
                number = number_of(self._in_numbers(node.raw[2:-2]))
                self._forget(changed(node.raw))
                return None if number is None else number != 0
            case "function":
                self._now[f"{node.words[0].raw}()"] = node.raw
                self._definitions.append(node)
            case "if":
                conditions = [functools.partial(self._run, part) for part in node.parts[::2]]
                return self._first([*zip(conditions, node.parts[1::2], strict=True)])
            case "case":
                word = self._text(node.words[0].pieces)
                return self._first(
                    [
                        (functools.partial(self._matches, word, clause.words), clause.parts[0])
                        for clause in node.parts
                    ]
                )
            case _:
                return self._loop(node)
        return status

    def _apart(self, node: Node) -> bool | None:
        """Follow a statement in a shell of its own: what it sets does not last."""
        before = {**self._now}
        status = None
        with contextlib.suppress(_Left):
            status = self._run(node)
        self._now = before
        return status

    def _either(self, ways: Iterable[Callable[[], object]]) -> None:
        """Follow several ways, of which bash takes one that is not known."""
        before = self._now
        states: list[State] = []
        for way in ways:
            self._now = {**before}
            with contextlib.suppress(_Left):
                way()
                states.append(self._now)
        self._join(states)

    def _join(self, states: list[State]) -> None:
        """Go on with all that is certain where one of these states holds."""
        if not states:
            raise _Left
        self._now = {**states[0]}
        for name in dict.fromkeys(name for state in states for name in state):
            missing: Value = [] if NAME(name) else code("$")
            values = [state.get(name, missing) for state in states]
            if any(state.get(name) != states[0].get(name) for state in states):
                self._now[name] = functools.reduce(functools.partial(merged, name), values)
                self._reasons[name] = self._place

    def _framed(self, kind: str, way: Callable[[], bool | None]) -> bool | None:
        """Follow a loop, a function or a file, which `break`, `continue` and `return` may leave."""
        self._frames.append((kind, []))
        status = None
        states: list[State] = []
        with contextlib.suppress(_Left):
            status = way()
            states.append(self._now)
        left = self._frames.pop()[1]
        self._join([*states, *left])
        return None if left else status

    def _leave(self, name: str) -> bool:
        """Follow `break`, `continue` or `return`: what holds here may hold where they lead to."""
        inner = itertools.takewhile(lambda frame: frame[0] == "loop", reversed(self._frames))
        left = [*inner]
        if name == "return":
            left = self._frames[-1 - len(left) :] if len(left) < len(self._frames) else []
        if not left:
            return False  # an error, which ends nothing
        for _, states in left:
            states.append({**self._now})
        raise _Left

    def _first(self, ways: list[tuple[Callable[[], bool | None], Node]]) -> bool | None:
        """Follow the first statements whose condition holds, or those that may be the first.

        ways: pairs of a function that says whether a condition holds, and the statements behind it.
        """
        if not ways:
            return True
        condition, body = ways[0]
        holds = condition()
        if holds is None:
            self._either([lambda: self._run(body), lambda: self._first(ways[1:])])
            return None
        return self._run(body) if holds else self._first(ways[1:])

    def _matches(self, word: str, patterns: list[Word]) -> bool | None:
        """Return whether a word is of one of the patterns of `case`."""
        texts = [self._text(pattern.pieces) for pattern in patterns]
        if "*" in [pattern.raw for pattern in patterns]:
            return True
        is_open = not is_known(word) or any(
            re.search(r"[*?[\\]", text) or not is_known(text) for text in texts
        )
        return None if is_open else word in texts

    def _loop(self, node: Node) -> None:
        """Follow a loop over known words one by one, and any other until a further pass changes no
        variable."""
        items = self._fields(node.words[1:])
        is_plain = not any(re.search(r"[*?[]", word) or not is_known(word) for word in items)
        if node.words and is_plain and not re.search(r"\b(break|continue|return)\b", node.raw):
            for word in items:
                self._now[node.words[0].raw] = word
                self._run(node.parts[0])
            return
        first = len(self.commands)
        before: State = {}
        while self._now != before:
            del self.commands[first:]  # this pass notes them anew: variables may differ
            before = {**self._now}
            if node.sign == "for":
                self._forget([word.raw for word in node.words[:1]] or changed(node.raw))
            elif self._run(node.parts[0]) == (node.sign == "until"):
                return  # the body is not reached, or no longer
            body = functools.partial(self._run, node.parts[-1])
            self._either([lambda: None, functools.partial(self._framed, "loop", body)])
            self._join([before, self._now])

    def _call(self, words: list[str]) -> bool | None:
        """Follow a function, or each that it may be."""
        if len(self._frames) > _CALLS:
            self._open("it calls itself")
            return None
        named = [node for node in self._definitions if node.words[0].raw == words[0]]
        certain = [node for node in named if node.raw == self._now[f"{words[0]}()"]]
        ways: list[Callable[[], bool | None]] = [
            functools.partial(self._run, node.parts[0]) for node in certain[:1] or named
        ]
        if not certain:
            self._open("its function is not certain")
            self._note(words, [])
            ways.append(lambda: None)
        arguments = self._now.get("@")
        self._set("@", arguments if words[1:] == [code("$@")] else words[1:])
        run = ways[0] if certain else functools.partial(self._either, ways)
        status = self._framed("function", run)
        self._forget(self._locals)
        self._set("@", arguments)
        return status

    def _assume(self, sentence: str) -> None:
        if sentence not in self._assumed:
            self._assumed.append(sentence)

    def _simple(self, node: Node) -> bool | None:
        """Follow assignments, a builtin that changes variables, a function or a command."""
        is_setting = [_ASSIGNMENT(word.raw) is not None for word in node.words]
        count = [*is_setting, False].index(False)
        settings = node.words[:count]
        words = node.words[count:]
        if not words:
            for word in settings:
                self._assignment(word)
            return None if _runs(settings) else True
        before = [self._text(word.pieces) for word in settings]
        if words[0].raw in _DECLARATIONS:
            return self._declaration(words)
        if words[0].raw == "[[":
            return self._test(words[1:-1], is_new=True)
        if words[0].raw in ("[", "test"):
            is_closed = words[0].raw == "["
            return self._test(words[1 : len(words) - is_closed], is_new=False)
        fields = self._fields(words)
        name = fields[0] if fields else ""
        while fields and fields[0] in ("command", "builtin", "exec", "time"):
            del fields[0]
        if not fields:
            return True
        if name == "exec":
            self._command(fields, before)
            raise _Left
        if f"{name}()" not in self._now:
            return self._command(fields, before)
        saved = {each: self._now.get(each) for each in _names(before)}
        for word in settings:  # they hold in the function alone
            self._assignment(word)
        status = self._call(fields)
        for each, value in saved.items():
            self._set(each, value)
        return status

    def _command(self, words: list[str], before: list[str]) -> bool | None:
        """Note a command, or follow a builtin. before: the assignments before its name."""
        name = words[0]
        rest = words[1:]
        shell = next((at for at, word in enumerate(words) if word in _SHELLS), len(words))
        if name in ("true", ":", "false"):
            return name != "false"
        if name in _READERS:
            self._forget([*_READ_INTO, *re.findall(r"[A-Za-z_]\w*", " ".join(rest))])
            for word in rest:
                self._now.pop(f"{word}()", None)
            if name not in ("printf", "wait") and any(map(is_several, rest)):
                self._open("its names are not known")
        elif name in ("eval", ".", "source"):
            return self._sourced(name, rest)
        elif shell == 0 or (name in _RUNNERS and shell < len(words)):
            self._child(words, shell, before)
        elif name == "shift":
            self._shift(rest)
        elif name == "set":
            self._options(rest)
        elif name == "exit":
            raise _Left
        elif name in ("return", "break", "continue"):
            return self._leave(name)
        elif name == "shopt" and {"lastpipe", "expand_aliases"} & {*rest}:
            raise ValueError(f"{self._place}: {' '.join(words)} is not read")
        else:
            if name in ("cd", "pushd", "popd"):
                self._now.pop("PWD", None)  # no longer the current folder
                self._now.pop("$0", None)  # it may be seen from the folder before
            self._note(words, before)
        return True if name in _SUCCEEDS else None

    def _note(self, words: list[str], before: list[str]) -> None:
        """Note a command, and for each variable in it that is not known, since when.

        before: its own variables.
        """
        words = [*map(shown, words)]
        before = [*map(shown, before)]
        named = dict.fromkeys(re.findall(r"\$\{?[!#]?(\w+)", " ".join([*before, *words])))
        places: dict[str, list[str]] = {}
        for name in named:
            if name in self._reasons:
                places.setdefault(self._reasons[name], []).append(f"${name}")
        opened = [self._opened] if self._opened else []
        unknown = [
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not known after {place}"
            for place, names in places.items()
            if not opened or place not in opened[0]
        ]
        of_command = dict(setting.split("=", 1) for setting in before)
        gpus = of_command.get("CUDA_VISIBLE_DEVICES", self._now.get("CUDA_VISIBLE_DEVICES"))
        several = gpus if isinstance(gpus, str) and re.fullmatch(r"\d+(,\d+)+", gpus) else ""
        self.commands.append(Command(words, [*self._assumed, *opened, *unknown], several))

    def _shift(self, words: list[str]) -> None:
        arguments = self._now.get("@")
        count = words[0] if words else "1"
        if isinstance(arguments, list) and count.isdigit():
            is_certain = not any(map(is_several, arguments[: int(count)]))
            self._now["@"] = arguments[int(count) :] if is_certain else [code("$@")]

    def _options(self, words: list[str]) -> None:
        """Follow `set`."""
        if "--" in words or (words and words[0][:1] not in "-+"):
            self._now["@"] = words[words.index("--") + 1 if "--" in words else 0 :]
        elif "allexport" in words or any(re.match(r"-[a-z]*a", word) for word in words):
            self._now["export *"] = ""

    def _text_of(self, name: str) -> tuple[Path, str] | None:
        """Return a file of the current folder or the script's, and its text; None for none."""
        path = Path(name).expanduser()
        places = [path, *([self._home / path] if self._home else [])]
        if not is_known(name) or (self._now.get("PWD") != "." and not path.is_absolute()):
            return None
        for place in places:
            if place.is_file() and place.stat().st_size <= 1 << 20:
                return place, place.read_text(encoding="utf-8", errors="replace")
        return None

    def _read(self, text: str) -> bool | None:
        """Follow the statements of a text."""
        try:
            body = parsed(text)
        except ValueError:
            self._open("it is not read as bash")
            return None
        if len(self._frames) > _CALLS:
            self._open("it calls itself")
            return None
        return self._run(body)

    def _read_file(self, file: Path, text: str, verb: str) -> bool | None:
        """Follow the statements of a file. verb: what its script does with it."""
        outer = self._file
        self._file = f" of {file}"
        self._assume(f"{file}, which it {verb}, is read")
        status = self._framed("file", lambda: self._read(text))
        self._file = outer
        return status

    def _sourced(self, name: str, words: list[str]) -> bool | None:
        """Follow the statements of a file, for `source`, or of a text, for `eval`."""
        text = " ".join(words)
        if not words:
            return True
        if _ENVIRONMENT(shown(text)):
            self._assume(f"{self._place} sets no variable of these")
            return None
        if name == "eval" and is_known(text):
            return self._read(text)
        read = None if name == "eval" else self._text_of(words[0])
        if read is None:
            is_eval = name == "eval"
            self._open("its text is not known" if is_eval else f"{shown(words[0])} is not found")
            return None
        held = {name: self._now.get(name) for name in ("@", "$0")}
        if words[1:]:
            self._now["@"] = words[1:]
        if read[0].parent != self._home:
            self._now.pop("$0", None)
        status = self._read_file(*read, "sources")
        if words[1:]:
            self._set("@", held["@"])
        if self._now.get("PWD") == ".":
            self._set("$0", held["$0"])
        return status

    def _child(self, words: list[str], shell: int, before: list[str]) -> None:
        """Follow what `bash FILE` and `bash -c TEXT` run, which see the exported variables alone.

        shell: the place of `bash` in the words. before: the assignments before the command.
        """
        options = [*itertools.takewhile(lambda word: word[:1] in "-+", words[shell + 1 :])]
        rest = words[shell + 1 + len(options) :]
        is_text = any(re.fullmatch(r"-[a-z]*c", word) for word in options)
        read = self._text_of(rest[0]) if rest and not is_text else None
        if not rest or not (is_text or read):
            self._note(words, before)
            return
        held = (self._now, self._opened, self._home)
        self._now = {}
        for key, flag in held[0].items():
            name = key.removeprefix("export ")
            if name != key and name in held[0]:
                self._now |= {key: flag, name: code(f"${name}") if flag else held[0][name]}
        if "export *" in held[0]:
            self._open("set -a hands variables to it")
        for setting in [*before, *filter(_ASSIGNMENT, words[:shell])]:
            name, _, value = setting.partition("=")
            adds = name.endswith("+")
            name = name.rstrip("+")
            self._now |= {f"export {name}": "", name: code(f"${name}") if adds else value}
        arguments = rest[2:] if is_text else rest[1:]
        if arguments != [code("$@")]:
            self._now["@"] = arguments
        with contextlib.suppress(_Left):
            if read is None:
                self._read(rest[0])
            else:
                self._home = read[0].parent
                self._now["$0"] = str(self._home)
                self._read_file(*read, "starts")
        self._now, self._opened, self._home = held

    def _declaration(self, words: list[Word]) -> bool | None:
        """Follow `export`, `local` and the like."""
        kind = words[0].raw
        options = "".join(word.raw[1:] for word in words if word.raw.startswith(("-", "+")))
        if {*"fp"} & {*options}:
            return True
        if {*"ilnu"} & {*options} and kind != "export":
            raise ValueError(f"{self._place}: {kind} -{options} is not read")
        in_function = "function" in [frame for frame, _ in self._frames]
        is_own = in_function and kind not in ("export", "readonly") and "g" not in options
        if kind == "local" and not is_own:
            return False  # an error, which sets nothing
        for word in words[1:]:
            if word.raw.startswith(("-", "+")):
                continue
            setting = _ASSIGNMENT(word.raw)
            for text in [word.raw] if setting else self._fields([word]):
                name = setting[1] if setting else text.partition("=")[0]
                if not NAME(name):
                    self._open("its names are not known")
                    continue
                if is_own:
                    self._locals.add(name)
                if kind == "export" or "x" in options:
                    self._now[f"export {name}"] = ""
                if setting and has_braces(word):  # bash makes several words of it
                    self._forget([name])
                elif setting:
                    self._assignment(word)
                elif "=" in text:
                    self._now[name] = text.partition("=")[2]
                elif is_own:
                    self._now[name] = []
        return None if _runs(words) else True

    def _assignment(self, word: Word) -> None:
        """Follow `NAME=value`, `NAME+=value`, `NAME=(...)` or `NAME[...]=value`."""
        setting = _ASSIGNMENT(word.raw)
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
        held = self._now.get(name, code(f"${name}") if self._opened else [])
        self._now[name] = _sum(held, value) if adds else value
        if (
            adds
            and elements is None
            and code("$") in re.sub(r"^\S+", "", str(held))
            and not added[:1].isspace()
        ):
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


def _runs(words: list[Word]) -> bool:
    """Return whether words run a command, whose status is that of the assignments."""
    return any(piece.text.startswith(("$(", "`")) for word in words for piece in word.pieces)
