"""Expands the words of a shell script: variables, arithmetic and simple tests, as bash does.

What is not plainly seen is left as written, with its `$`.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from pgtoolkit.config.shell_syntax import Piece, Statement, Word, pieces_of

# Possessive repetitions (`++`, `*+`), so that no text takes long.
_CODE = r"\$\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\)"
_BRACED = r"\$\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+\}"
_split = re.compile(rf"(?:{_CODE}|{_BRACED}|`[^`]*+`|\S)++").findall
"""Splits a value at blanks, but not within an expansion, such as `$(date +%s)`."""

_ITSELF = r"\$\{?(?:0|BASH_SOURCE(?:\[0\])?)\}?"
_DIRNAME = rf"\$\(dirname(?:--)?(?:{_ITSELF}|\$\((?:realpath|readlink-f)(?:--)?{_ITSELF}\))\)"
_OWN_FOLDER = re.compile(
    rf"{_DIRNAME}|\$\(cd(?:--)?{_DIRNAME}(?:[12&]?>[&>/\w]*)?&&pwd(?:-P)?\)"
).fullmatch
"""Matches the code by which a script finds its own folder, once blanks and quotes are taken out."""

NAME = re.compile(r"[A-Za-z_]\w*").fullmatch
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=").match
_PARAMETER = re.compile(
    r"([A-Za-z_]\w*|\d+|[@*#])(?:\[([^]]*)\])?(?:(:?)([-=+?])(.*))?", re.S
).fullmatch
_QUOTED = re.compile(r"\$\{(\w+):?[-=](?:\"[^\"]*\"|'[^']*')\}").fullmatch
"""Matches an expansion with a default in quotes, such as `${NAME:-"text"}`."""

_CHANGED = re.compile(
    r"([A-Za-z_]\w*)(?:\[[^]]*\])?\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)"
    r"|(?:\+\+|--)\s*([A-Za-z_]\w*)"
).findall
"""Finds the names that an arithmetic expression changes."""

_BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
"""Finds braces that bash makes several words of, such as `{a,b}` and `{1..3}`."""

_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,17})").fullmatch

Value = str | list[str]
"""The text of a variable, or the elements of an array; an empty list for one that is unset."""


@dataclass
class State:
    """Holds the variables, functions and folder at a place of a script.

    values: `@` has the arguments of the script or function. functions: the bodies that a name may
    have; None among them: it may be no function. hidden: the values that the local variables of a
    function have outside of it. folder: the script's own, seen from the current one; None: not
    known. opened: a sentence on why any variable may have another value; "" if none may. over:
    whether the place is never reached.
    """

    values: dict[str, Value]
    folder: Path | None
    functions: dict[str, list[Statement | None]] = field(default_factory=dict)
    hidden: dict[str, Value | None] = field(default_factory=dict)
    opened: str = ""
    over: bool = False

    def copied(self) -> State:
        return replace(
            self,
            values={**self.values},
            functions={**self.functions},
            hidden={**self.hidden},
        )


class Words:
    """Expands words by the values of variables, and notes those that are not known.

    folder: the one that the script lies in, seen from the current one; None: it is not known.
    """

    def __init__(self, folder: Path | None):
        self._now = State({"HOME": "~", "PWD": "."}, folder)
        self._place = ""  # where the statement stands that is followed
        self._reasons: dict[str, str] = {}  # variable -> the place since which it is not known
        self._with_attributes: set[str] = set()  # names with attributes, such as of `declare -i`

    def _set(self, name: str, value: Value | None) -> None:
        """Set a variable. value: None where the script has not set it."""
        self._now.values.pop(name, None)
        if value is not None:
            self._now.values[name] = value

    def _assign(self, name: str, value: Value) -> None:
        """Set a variable to a value that is plainly seen."""
        if name in self._with_attributes:
            self._forget([name])
        else:
            self._now.values[name] = value

    def _forget(self, names: Iterable[str]) -> None:
        """Note that variables may be set here to values that are not known.

        Of the settings in their old values the keys stay.
        """
        for name in names:
            self._now.values[name] = merged(name, self._now.values.get(name, []), f"${name}")
            self._reasons[name] = self._place
            if name == "PWD":
                self._now.values.pop(name)

    def _open(self, reason: str) -> None:
        """Note that each variable may be set here."""
        self._now.opened = f"after {self._place}, each variable may be another: {reason}"
        self._forget(self._now.values.keys() - {"HOME", "PWD", "@"})

    def _fields(self, words: list[Word]) -> list[str]:
        """Return words as bash hands them to a command."""
        fields: list[str] = []
        for word in words:
            current: str | None = None  # the field that is being put together
            plain = "".join(
                "x" if piece.quoted or piece.expands else piece.text for piece in word.pieces
            )
            braces = _BRACES.search(plain)
            if braces and word.array is None:
                before, sign, after = self._text(word.pieces).partition("{")
                fields.append(f"{before}${sign}{after}")
                continue
            for piece in word.pieces:
                if not piece.expands:
                    current = (current or "") + piece.text
                    continue
                default = None if piece.quoted else _QUOTED(piece.text)
                is_default = default is not None and not self._held(default[1], None)
                value, may_split = self._value(piece)
                if is_default:
                    may_split = False  # since the default is in quotes
                elif not (piece.quoted or default) and re.search(
                    r"^\$\{.*[\"'].*\s", piece.text, re.S
                ):
                    value = piece.text
                    may_split = False
                parts = [value] if isinstance(value, str) else value
                if not piece.quoted and may_split:
                    joined = " ".join(parts)
                    if "IFS" in self._now.values and re.search(r"\W", joined):
                        joined = f"${{{piece.text.strip('${}')}}}"
                    parts = _split(joined)
                    if current is not None and joined[:1].isspace():
                        fields.append(current)
                        current = None
                for at, part in enumerate(parts):
                    if at:
                        fields.append(current or "")
                        current = ""
                    current = (current or "") + part
            if word.array is not None:  # here it is an argument, not an assignment
                current = f"{current or ''}$(...)"
            if current is not None:
                fields.append(current)
        return fields

    def _text(self, pieces: list[Piece]) -> str:
        """Return the text of pieces where bash splits no words."""
        texts = []
        for piece in pieces:
            value = self._value(piece)[0] if piece.expands else piece.text
            texts.append(value if isinstance(value, str) else " ".join(value))
        return "".join(texts)

    def _value(self, piece: Piece) -> tuple[Value, bool]:
        """Return the value of an expansion, and whether it is known; if not, it is its code."""
        text = piece.text
        if text.startswith("$(("):
            number = self._number(text[3:-2])
            self._forget(changed(text[3:-2]))
            return (text, False) if number is None else (str(number), True)
        if text.startswith(("$(", "`")):
            command = re.sub(r"[\s\"']", "", text)
            if command in ("$(pwd)", "$(pwd-P)") and "PWD" in self._now.values:
                return self._now.values["PWD"], True
            if self._now.folder is not None and _OWN_FOLDER(command):
                return str(self._now.folder), True
            return text, False
        parameter = _PARAMETER(text[2:-1] if text.startswith("${") else text[1:])
        if parameter is None or not text.startswith("$"):
            return self._altered(text)
        name, subscript, colon, sign, word = parameter.groups()
        held = self._held(name, subscript)
        if held is None and (sign in (None, "+", "?") or (self._now.opened and not name.isdigit())):
            return self._altered(text)
        takes_all = isinstance(held, list) and (subscript in ("@", "*") or name in "@*")
        if isinstance(held, list) and not takes_all:
            held = held[0] if held else None
        is_set = bool(held) or (held == "" and not colon)
        is_open = held and not takes_all and not is_known(str(held))
        if (is_open and sign == "+") or (not is_set and sign == "?"):
            return text, False
        if sign is None or (is_set and sign != "+"):
            value: Value = held or ""
            if isinstance(held, list) and "*" in (subscript, name) and piece.quoted:
                if "IFS" in self._now.values:
                    return text, False
                value = " ".join(held)
            return ([] if takes_all and not held else value), True
        if is_set != (sign == "+"):
            return "", True
        value = self._text(pieces_of(word, piece.quoted))
        if sign == "=":
            self._assign(name, value)
        return value, True

    def _held(self, name: str, subscript: str | None) -> Value | None:
        """Return what a variable holds; None where the script does not say."""
        arguments = self._now.values.get("@")
        if name.isdigit() or name == "#":
            if name == "0" or (arguments is None and name != "#"):
                return None
            arguments = [] if arguments is None else [*arguments]
            count = len(arguments) if name == "#" else int(name)
            if any(word.startswith(("$@", "$(")) for word in arguments[:count]):
                return f"${name}"
            if name == "#" and any(map(is_several, arguments)):
                return "$#"
            if name == "#":
                return str(count)
            return arguments[count - 1] if count <= len(arguments) else []
        held = self._now.values.get("@" if name == "*" else name)
        if held is None or subscript in (None, "@", "*"):
            return [held] if isinstance(held, str) and subscript in ("@", "*") else held
        elements = [held] if isinstance(held, str) else held
        is_plain = subscript.isdigit() and not any(map(is_several, elements))
        if not is_plain:
            return f"${{{name}[{subscript}]}}"
        return elements[int(subscript)] if int(subscript) < len(elements) else []

    def _altered(self, text: str) -> tuple[Value, bool]:
        """Return the value of any other expansion, such as `${NAME%x}`, and whether it is known.

        Known are the arguments from one on (`${@:2}`), and the keys of an array's settings.
        """
        self._forget(
            [
                name
                for name in re.findall(r"\$\{([A-Za-z_]\w*)(?:\[[^]]*\])?:?=", text)
                if name in self._now.values
            ]
        )
        for code in re.findall(r"\$\(\((.*?)\)\)", text, re.S):
            self._forget(changed(code))
        part = re.fullmatch(r"\$\{@:(\d+)\}", text)
        arguments = self._now.values.get("@")
        if part and isinstance(arguments, list) and int(part[1]):
            before = arguments[: int(part[1]) - 1]
            if not any(word.startswith(("$@", "$(")) for word in before):
                return arguments[len(before) :], True
        several = re.match(r"\$\{([A-Za-z_]\w*)\[@\]", text)
        held = self._now.values.get(several[1]) if several else None
        if several and isinstance(held, list) and any("=" in word for word in held):
            self._reasons.setdefault(several[1], self._place)
            return merged(several[1], held, []), True
        return text, False

    def _number(self, expression: str) -> int | None:
        """Return the value of an arithmetic expression; None for an unknown one."""

        def value(match: re.Match[str]) -> str:
            held = self._held(match[1], None)
            held = held[0] if isinstance(held, list) and held else held
            return f"({held})" if isinstance(held, str) and _INTEGER(held) else "$"

        text = re.sub(r"\$?\{?([A-Za-z_]\w*|(?<=[${])\d)\}?", value, expression.strip())
        if not re.fullmatch(r"[\d\s+*/%()<>=!-]+", text) or "++" in text or "--" in text:
            return None
        try:
            return _computed(ast.parse(text.replace("\n", " "), mode="eval").body)
        except (SyntaxError, ArithmeticError, RecursionError, MemoryError, ValueError):
            return None

    def _test(self, words: list[Word], is_new: bool) -> bool | None:
        """Return the result of a simple comparison of known texts; None for another test.

        is_new: it is `[[ ]]`, where words are not split and the right one is a pattern.
        """
        fields = [self._text(word.pieces) for word in words] if is_new else self._fields(words)
        is_negated = fields[:1] == ["!"]
        fields = fields[is_negated:]
        if not all(map(is_known, fields)) or len(fields) > 3:
            return None
        result: bool | None = None
        if len(fields) == 2 and fields[0] in ("-n", "-z"):
            result = bool(fields[1]) == (fields[0] == "-n")
        elif len(fields) == 1:
            result = bool(fields[0])
        elif len(fields) == 3:
            left, sign, right = fields
            if sign in ("=", "==", "!=") and not (is_new and re.search(r"[*?[\\(]", right)):
                result = (left == right) == (sign != "!=")
            elif sign in _COMPARED and _INTEGER(left) and _INTEGER(right):
                result = _COMPARED[sign](int(left), int(right))
        return None if result is None else result != is_negated


_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-lt": int.__lt__,
    "-le": int.__le__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
}


def _computed(node: ast.expr) -> int | None:
    """Return the value of an expression of whole numbers; division rounds to 0, as in bash."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            number = _computed(operand)
            return -number if number is not None and isinstance(sign, ast.USub) else number
        case ast.BinOp(left=left, op=sign, right=right):
            first = _computed(left)
            second = _computed(right)
            if first is None or second is None or abs(first) >= 2**31 or abs(second) >= 2**31:
                return None  # their product may be one that bash wraps around
            match sign:
                case ast.Add():
                    return first + second
                case ast.Sub():
                    return first - second
                case ast.Mult():
                    return first * second
                case ast.Div() | ast.Mod():
                    size = abs(first) // abs(second)
                    quotient = size if (first < 0) == (second < 0) else -size
                    return quotient if isinstance(sign, ast.Div) else first - quotient * second
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            first = _computed(left)
            second = _computed(right)
            names = {ast.Eq: "-eq", ast.NotEq: "-ne", ast.Lt: "-lt", ast.LtE: "-le"}
            names |= {ast.Gt: "-gt", ast.GtE: "-ge"}
            if first is not None and second is not None and type(sign) in names:
                return int(_COMPARED[names[type(sign)]](first, second))
    return None


def merged(name: str, before: Value, after: Value) -> Value:
    """Return the words that are certain of a variable that has one of two values.

    Settings that both have stay. Of others only the key is certain: the variable's name stands for
    the value.
    """
    if before == after:
        return before
    is_text = isinstance(before, str) and isinstance(after, str)
    words_before = _split(before) if isinstance(before, str) else before
    words_after = _split(after) if isinstance(after, str) else after
    pairs = itertools.zip_longest(words_before, words_after)
    ahead = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
    certain = {*_single(words_before)} & {*_single(words_after)}
    behind: list[str] = []
    for word in [*words_before[ahead:], *words_after[ahead:]]:
        key = re.match(r"[^\s=]+=", word)
        kept = word if word in certain else f"{key[0] if key else ''}${name}"
        if kept not in [*words_before[:ahead], *behind]:
            behind.append(kept)
    words = [*words_before[:ahead], *behind]
    if all(f"${name}" not in word for word in words):
        words.append(f"${name}")
    return " ".join(words) if is_text or _is_scalar(before, after) else words


def _is_scalar(before: Value, after: Value) -> bool:
    """Return whether one of two values is a text, and the other one unset."""
    return (isinstance(before, str) and after == []) or (isinstance(after, str) and before == [])


def _single(words: list[str]) -> list[str]:
    """Return the settings whose keys occur once."""
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    return [
        word for word, key in zip(words, keys, strict=True) if "=" in word and keys.count(key) == 1
    ]


def is_known(text: str) -> bool:
    return "$" not in text and "`" not in text


def is_several(word: str) -> bool:
    """Return whether a word may stand for several, or for none."""
    return re.fullmatch(r"\$(?:[\w@*]+|\{.*\}|\(.*\))|`.*`", word, re.S) is not None


def changed(expression: str) -> list[str]:
    return [name or other for name, other in _CHANGED(expression)]
