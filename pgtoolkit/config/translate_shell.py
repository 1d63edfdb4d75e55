"""Reads the commands of a shell script as bash would expand them, without running anything.

What a script does not say is left as written, with its `$`: the value of a variable that it
does not set, or that it sets in a branch or a loop.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from pgtoolkit.config.formulas import evaluate

# Possessive repetitions (`++`, `*+`), so that no text takes long.
_CODE = r"\$\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\)"
_BRACED = r"\$\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+\}"
_EXPANDED = rf"{_CODE}|{_BRACED}|\$[\w#@*]+"
_INNER = rf"""(?:\\.|{_CODE}|{_BRACED}|[^"\\])*+"""
_QUOTED = rf"""'[^']*'|"{_INNER}\""""
_SPACE = r"(?:[ \t\r]|\\\n(?:[ \t]*+\#.*\n)*+)++|(?<![^\s(])\#.*"
_ARRAY = rf"""\w+\+?=\((?:{_SPACE}|{_QUOTED}|{_CODE}|{_BRACED}|\\.|[^()'"\\])*+\)"""
_TOKEN = re.compile(
    rf"""(?P<space>{_SPACE})|(?P<word>{_ARRAY}|(?:\\.|{_QUOTED}|{_CODE}|{_BRACED}|`[^`]*`"""
    r"""|[^\s;&|()<>"'\\`])++)|(?P<sign>;;|&&|\|\||[;&|()<>\n])"""
)
_PIECE = re.compile(rf"""\\(.)|'([^']*)'|"({_INNER})"|({_EXPANDED})""", re.S)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?([-=+])(.*))?\}|\$([\w#]+)", re.S)
_WORDS = re.compile(r'"?\$\{?(\w+|@|\*)(?:\[[@*]\])?(?:[-+].*)?\}?"?', re.S)
_NUMBERS = re.compile(r"(?:[\d+/%)-]|\*(?!\*)|(?<![\d)])\()+")
_BEGIN = ("if", "case", "for", "while", "until", "select")
_END = ("fi", "esac", "done")
_BEFORE_COMMANDS = ("then", "else", "do", "export", "local", "readonly", "declare")


class Script:
    """A shell script. commands: the words of each command, expanded."""

    def __init__(self, script: str):
        self.commands: list[list[str]] = []
        self._values = {"HOME": ["~"], "@": [], "*": []}
        depth = 0
        for words in _statements(script):
            depth += (words[0] in _BEGIN) - (words[0] in _END)
            while words and words[0] in _BEFORE_COMMANDS:
                words = words[1:]
            assigned = [re.fullmatch(r"([A-Za-z_]\w*)(\+?)=(.*)", word, re.S) for word in words]
            if not all(assigned):
                self.commands.append(self._expanded(words))
                continue
            for name, adds, value in (match.groups() for match in assigned if match):
                values = self._assigned(value)
                if depth:  # in a branch or a loop
                    values = [
                        re.sub("^(.*?=)?.*", rf"\1${name}", word, flags=re.S) for word in values
                    ]
                self._values[name] = [*self._values.get(name, []), *values] if adds else values

    def _expanded(self, words: list[str]) -> list[str]:
        """Return words without their quotes, with the values of variables, of which those of an
        array are words of their own."""
        expanded = []
        for word in words:
            array = _WORDS.fullmatch(word)
            values = self._values.get(array[1]) if array else None
            expanded += [_PIECE.sub(self._piece, word)] if values is None else values
        return expanded

    def _assigned(self, value: str) -> list[str]:
        """Return the words of an array, or a text."""
        is_array = value.startswith("(")
        inner = [word for words in _statements(value[1:-1]) for word in words]
        return self._expanded(inner if is_array else [value])

    def _piece(self, match: re.Match[str]) -> str:
        """Return what a part of a word stands for, which is in quotes or an expansion."""
        escaped, literal, quoted, expression = match.groups()
        if quoted is not None:
            return re.sub(_EXPANDED, lambda part: self._value(part[0]), quoted)
        return escaped or literal or (self._value(expression) if expression else "")

    def _value(self, expression: str) -> str:
        """Return the value of `$NAME`, `${NAME:-other}`, `$((a * b))`, or the expression itself."""
        if expression.startswith("$(("):
            numbers = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", r"${\1}", expression[3:-2])
            numbers = re.sub(r"\s", "", _PIECE.sub(self._piece, numbers)).replace("/", "//")
            with contextlib.suppress(ArithmeticError, SyntaxError):
                return str(int(evaluate(numbers))) if _NUMBERS.fullmatch(numbers) else expression
        match = _VARIABLE.fullmatch(expression)
        if match is None:
            return expression
        name, how, other, plain = match.groups()
        values = self._values.get(name or plain)
        if how and any(values or []) == (how == "+"):
            return _PIECE.sub(self._piece, other)
        return "" if how == "+" else expression if values is None else " ".join(values)


def _statements(script: str) -> Iterator[list[str]]:
    """Yield the words of each statement."""
    words: list[str] = []
    for token in [*_TOKEN.finditer(script), _TOKEN.match(";")]:
        if token is not None and token.lastgroup == "word":
            words.append(token[0])
        elif token is not None and token.lastgroup == "sign" and words:
            yield words
            words = []
