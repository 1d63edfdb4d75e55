"""Reads the commands of a shell script as bash would expand them, without running anything.

What a script does not say stays as it is written, with its `$`: the value of a variable that it
does not set, or that it sets in a branch whose condition is not known.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pgtoolkit.config.formulas import evaluate

_CODE = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_BRACED = r"\$\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_EXPANDED = rf"{_CODE}|{_BRACED}|\$[\w#@*]+"
_INNER = rf"""(?:\\.|{_CODE}|{_BRACED}|[^"\\])*"""
_QUOTED = rf"""'[^']*'|"{_INNER}\""""
_SPACE = r"(?:[ \t\r]|\\\n(?:[ \t]*\#.*\n)*)+|(?<![^\s(])\#.*"
_ARRAY = rf"""\w+\+?=\((?:{_SPACE}|{_QUOTED}|{_CODE}|{_BRACED}|\\.|[^()'"\\])*\)"""
_TOKEN = re.compile(
    rf"""(?P<space>{_SPACE})|(?P<word>{_ARRAY}|(?:\\.|{_QUOTED}|{_CODE}|{_BRACED}|`[^`]*`"""
    r"""|[^\s;&|()<>"'\\`])+)|(?P<sign>;;|&&|\|\||[;&|()<>\n])"""
)
_PIECE = re.compile(rf"""\\(.)|'([^']*)'|"({_INNER})"|({_EXPANDED})""", re.S)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?([-=+])(.*))?\}|\$([\w#]+)", re.S)
_COMPARED = re.compile(r"\[+ (\S*) (==?|!=) (\S*) \]+ (?:;|\n|&&|$)")
_TO_SKIP = ("then", "else", "do", "fi", "esac", "done", "export", "local", "readonly", "declare")


@dataclass
class _Branch:
    """Where a script is in an `if`, `case` or loop.

    subject: the word that the patterns of a `case` are held against; None elsewhere. runs: whether
    this part runs; None if that is not known. before: the same of the parts before it.
    """

    subject: str | None
    runs: bool | None = None
    before: bool | None = False

    def begin(self, holds: bool | None) -> None:
        """Begin the next part, under a condition that holds or not."""
        self.runs = holds if self.before is False else None
        if self.before or holds is False:
            self.runs = False
        self.before = self.before or self.runs


class Script:
    """A shell script. commands: the words of each command, expanded."""

    def __init__(self, script: str):
        self.commands: list[list[str]] = []
        self._texts = {"HOME": "~", "#": "0"}
        self._arrays: dict[str, list[str]] = {"@": [], "*": []}
        self._branches: list[_Branch] = []
        self._head: list[str] | None = None  # of a condition, or of the patterns of a case
        for words, sign in _statements(script):
            self._read(words, sign)

    def _read(self, words: list[str], sign: str) -> None:
        """Read a statement, up to the sign that ends it."""
        keyword = words[0] if words else ""
        if keyword in ("if", "for", "while", "until", "select", "case"):
            self._branches.append(_Branch(self._text(words[1]) if keyword == "case" else None))
        if keyword in ("if", "elif", "case"):
            self._head = []
            words = [] if keyword == "case" else words[1:]
        if self._head is not None and keyword not in ("then", "esac"):
            self._head += [*words, sign]
            subject = self._branches[-1].subject
            if sign == ")" and subject is not None:
                self._branches[-1].begin(self._matches(subject, self._head))
                self._head = None
            return
        if keyword == "then" and self._head is not None:
            self._branches[-1].begin(self._holds(self._head))
        elif keyword == "else" and self._branches:
            self._branches[-1].begin(True)
        elif keyword in ("fi", "esac", "done") and self._branches:
            self._branches.pop()
        self._head = [] if sign == ";;" else None
        while words and words[0] in _TO_SKIP:
            words = words[1:]
        if all(branch.runs is not False for branch in self._branches):
            self._run(words)

    def _matches(self, subject: str, patterns: list[str]) -> bool | None:
        if any(fnmatch.fnmatchcase(subject, self._text(word)) for word in patterns):
            return True
        return None if "$" in subject else False

    def _holds(self, condition: list[str]) -> bool | None:
        """Return whether texts are equal, or not, as a condition says; None for any other one."""
        written = "".join(f"{self._text(word)} " for word in condition)
        written = re.sub(r"-n (\S*) ", r"\1 !=  ", re.sub(r"-z (\S*) ", r"\1 =  ", written))
        compared = _COMPARED.findall(written)
        if "$" in written or _COMPARED.sub("", written).strip():
            return None
        return all(fnmatch.fnmatchcase(a, b) == (sign != "!=") for a, sign, b in compared)

    def _run(self, words: list[str]) -> None:
        """Assign variables, or keep a command."""
        assigned = [re.fullmatch(r"([A-Za-z_]\w*)(\+?)=(.*)", word, re.S) for word in words]
        if not all(assigned):
            self.commands.append(self._expanded(words))
            return
        is_known = all(branch.runs for branch in self._branches)
        for name, adds, value in (match.groups() for match in assigned if match is not None):
            if not value.startswith("("):
                self._texts[name] = self._text(value) if is_known else f"${name}"
                continue
            words_of_array = [word for words, _ in _statements(value[1:-1]) for word in words]
            items = self._expanded(words_of_array)
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
            is_plain = re.fullmatch(r"[\d\s+*/()%-]+", numbers) and "**" not in numbers
            return str(int(evaluate(numbers.replace("/", "//")))) if is_plain else expression
        fallback = re.search(r"\|\|\s*echo\s+(\w+)\s*\)$", expression)
        match = _VARIABLE.fullmatch(expression)
        if match is None:  # the fallback of a command that most machines lack
            return fallback[1] if fallback else expression
        name, how, other, plain = match.groups()
        value = self._texts.get(name or plain)
        if how and (bool(value) == (how == "+")):
            return self._text(other)
        return "" if how == "+" else expression if value is None else value


def _statements(script: str) -> Iterator[tuple[list[str], str]]:
    """Yield (words, the sign that ends them) of each statement."""
    words: list[str] = []
    for token in _TOKEN.finditer(script):
        if token.lastgroup == "word":
            words.append(token[0])
        elif token.lastgroup == "sign":
            yield words, token[0]
            words = []
    yield words, "\n"
