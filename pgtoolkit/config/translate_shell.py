"""Reads the commands of a shell script as bash would expand them, without running anything.

What a script does not say is left as written, with its `$`: the value of a variable that it
does not set, or that it sets in a branch or a loop.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

# Possessive repetitions (`++`, `*+`), so that no text takes long.
_CODE = r"\$\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\)"
_BRACED = r"\$\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+\}"
_EXPANDED = rf"{_CODE}|{_BRACED}|\$[\w#@*]+"
_INNER = rf"""(?:\\[\s\S]|{_CODE}|{_BRACED}|[^"\\])*+"""
_TOKEN = re.compile(
    rf"""(?:[ \t\r]|\\\n)++|(?<![^\s(])\#.*|(?P<sign>[;&|()\n]|\d*[<>])"""
    rf"""|(?P<word>(?:\\.|'[^']*'|"{_INNER}"|{_EXPANDED}|[^\s;&|()<>"'\\])++)"""
)
_PIECE = re.compile(rf"""\\(.)|'([^']*)'|"({_INNER})"|({_EXPANDED})""")
_ITSELF = r"\$\{?(?:0|BASH_SOURCE(?:\[0\])?)\}?"
_DIRNAME = rf"\$\(dirname(?:--)?(?:{_ITSELF}|\$\((?:realpath|readlink-f)(?:--)?{_ITSELF}\))\)"
_OWN_FOLDER = re.compile(
    rf"{_DIRNAME}|\$\(cd(?:--)?{_DIRNAME}(?:[12&]?>[&>/\w]*)?&&pwd(?:-P)?\)"
).fullmatch
"""Matches what a script finds its own folder by, without blanks and quotes."""

_NUMBERS = re.compile(r"(?:[\d+/%)-]|\*(?!\*)|(?<![\d)])\()+")
_BEGIN = ("if", "case", "for", "while", "until", "select")
_END = ("fi", "esac", "done")
_BEFORE_COMMANDS = ("then", "else", "do", "export", "local", "readonly", "declare")


class Script:
    """A shell script. commands: the words of each command, expanded.

    folder: the one that the script lies in, seen from the current one; None: it is not known. The
        script is started in the current folder.
    """

    def __init__(self, script: str, folder: Path | None = None):
        self.commands: list[list[str]] = []
        self._values = {"HOME": ["~"], "PWD": ["."]}
        self._folder = folder
        depth = 0  # of branches and loops
        array = ""  # the name of one whose bracket is open, with its sign
        words: list[str] = []
        for token in _TOKEN.finditer(f"{script}\n;"):
            if token["word"]:
                words.append(token["word"])
            elif token["sign"] == "(" and words and words[-1].endswith("="):
                array = words[-1]
                words = []
            elif array and token["sign"] == ")":
                self._assign(array, words, depth)
                array = ""
                words = []
            elif token["sign"] and not array:
                depth += sum((word in _BEGIN) - (word in _END) for word in words[:1])
                while words and words[0] in _BEFORE_COMMANDS:
                    words = words[1:]
                if all(re.match(r"[A-Za-z_]\w*\+?=", word) for word in words):
                    for name, sign, value in (word.partition("=") for word in words):
                        self._assign(name + sign, [value], depth)
                else:
                    self.commands.append(self._expanded(words))
                    if words[0] in ("cd", "pushd", "popd"):
                        self._values.pop("PWD", None)  # no longer the current folder
                        self._folder = None  # $0 may be seen from the folder before
                words = []

    def _assign(self, name: str, words: list[str], depth: int) -> None:
        """Set or extend a variable. name: with its sign, `=` or `+=`.

        In a branch or a loop only what it is set to before as well is certain; else a setting
        keeps its key, and its value is the variable's name.
        """
        values = self._expanded(words)
        adds = name.endswith("+=")
        name = name.rstrip("+=")
        before = self._values.get(name, [])
        if depth:  # what held before may hold as well
            certain = {*" ".join(before).split()} & {*" ".join(values).split()}

            def known(part: re.Match[str]) -> str:
                return part[0] if part[0] in certain else f"{part[1] or ''}${name}"

            words = values if adds else [*before, *values]
            known_words = [re.sub(r"(\S+?=)?\S+", known, word) or f"${name}" for word in words]
            values = [*dict.fromkeys(known_words)]
        self._values[name] = [*before, *values] if adds else values

    def _expanded(self, words: list[str]) -> list[str]:
        """Return words without their quotes, with the values of variables."""
        expanded = []
        for word in words:
            variable = re.fullmatch(r'("?)\$\{?(\w+)(?:\[[@*]\])?\}?"?', word)
            values = self._values.get(variable[2]) if variable else None
            if variable is None or values is None:
                expanded.append(_PIECE.sub(self._piece, word))
            else:
                expanded += values if variable[1] else " ".join(values).split()
        return expanded

    def _piece(self, match: re.Match[str]) -> str:
        """Return what a part of a word stands for, which is in quotes or an expansion."""
        escaped, literal, quoted, expression = match.groups()
        if quoted is not None:
            joined = quoted.replace("\\\n", "")
            return re.sub(_EXPANDED, lambda part: self._value(part[0]), joined)
        return escaped or literal or (self._value(expression) if expression else "")

    def _value(self, expression: str) -> str:
        """Return the value of `$NAME`, `${NAME:-other}`, `$((a * b))`, or the expression itself."""
        if expression.startswith("$(("):
            numbers = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", r"${\1}", expression[3:-2])
            numbers = re.sub(r"\s", "", _PIECE.sub(self._piece, numbers)).replace("/", "//")
            with contextlib.suppress(ArithmeticError, SyntaxError):
                return str(eval(numbers)) if _NUMBERS.fullmatch(numbers) else expression
        if expression.startswith("$("):
            command = re.sub(r"[\s\"']", "", expression)
            if command in ("$(pwd)", "$(pwd-P)"):
                expression = "$PWD"
            elif self._folder is not None and _OWN_FOLDER(command):
                return str(self._folder)
        match = re.fullmatch(r"\$\{?(\w+)(?::?-(.*))?\}?", expression, re.S)
        if match is None:
            return expression
        values = self._values.get(match[1])
        if match[2] is not None and not any(values or []):
            return _PIECE.sub(self._piece, match[2].removesuffix("}"))
        return expression if values is None else " ".join(values)
