"""Reads the commands of a shell script as bash would expand them, without running anything.

What a script does not say stays as it is written, with its `$`: the value of a variable that it
does not set, or that it sets in a branch or a loop.
"""

from __future__ import annotations

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
_BEGIN = ("if", "case", "for", "while", "until", "select")
_END = ("fi", "esac", "done")
_BEFORE_COMMANDS = ("then", "else", "do", "export", "local", "readonly", "declare")


class Script:
    """A shell script. commands: the words of each command, expanded."""

    def __init__(self, script: str):
        self.commands: list[list[str]] = []
        self._texts = {"HOME": "~"}
        self._arrays: dict[str, list[str]] = {"@": [], "*": []}
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
                self._assign(name, bool(adds), value, is_known=depth == 0)

    def _assign(self, name: str, adds: bool, value: str, is_known: bool) -> None:
        if not value.startswith("("):
            self._texts[name] = self._text(value) if is_known else f"${name}"
            return
        items = self._expanded([word for words in _statements(value[1:-1]) for word in words])
        if not is_known:
            items = [re.sub("=.*", f"=${name}", item, flags=re.S) for item in items]
        self._arrays[name] = [*self._arrays.get(name, []), *items] if adds else items

    def _expanded(self, words: list[str]) -> list[str]:
        expanded = []
        for word in words:
            array = re.fullmatch(r'"?\$\{?(\w+|@|\*)(?:\[[@*]\])?(?:[-+].*)?\}?"?', word, re.S)
            is_array = array is not None and array[1] in self._arrays
            expanded += self._arrays[array[1]] if array and is_array else [self._text(word)]
        return expanded

    def _text(self, word: str) -> str:
        """Return a word without its quotes, with its variables."""

        def piece(match: re.Match[str]) -> str:
            escaped, literal, quoted, expanded = match.groups()
            if quoted is not None:
                return re.sub(_EXPANDED, lambda part: self._value(part[0]), quoted)
            return escaped or literal or (self._value(expanded) if expanded else "")

        return _PIECE.sub(piece, word)

    def _value(self, expression: str) -> str:
        """Return the value of `$NAME`, `${NAME:-other}`, `$((a * b))`, or the expression itself."""
        if expression.startswith("$(("):
            names = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
            numbers = names.sub(lambda name: self._texts.get(name[1], name[0]), expression[3:-2])
            if not re.fullmatch(r"[\d\s+*/()%-]+", numbers) or re.search(
                r"\*\*|[\d)]\s*\(", numbers
            ):
                return expression
            try:
                return str(int(evaluate(numbers.replace("/", "//"))))
            except (ArithmeticError, SyntaxError):
                return expression
        match = _VARIABLE.fullmatch(expression)
        if match is None:
            return expression
        name, how, other, plain = match.groups()
        value = self._texts.get(name or plain)
        if how and bool(value) == (how == "+"):
            return self._text(other)
        return "" if how == "+" else expression if value is None else value


def _statements(script: str) -> Iterator[list[str]]:
    """Yield the words of each statement."""
    words: list[str] = []
    for token in [*_TOKEN.finditer(script), _TOKEN.match(";")]:
        if token is not None and token.lastgroup == "word":
            words.append(token[0])
        elif token is not None and token.lastgroup == "sign" and words:
            yield words
            words = []
