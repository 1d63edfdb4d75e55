"""Expands the words of a shell script: variables, whole numbers and simple tests, as bash does.

What is not plainly seen is left as its code, with its `$`: such a text is not known, nor is what
it becomes a part of.
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from pgtoolkit.config.shell_syntax import Piece, Word, pieces_of

_TO_CODE = {sign: 0xE000 + sign for sign in range(128)}
_FROM_CODE = {code: sign for sign, code in _TO_CODE.items()}
"""The signs of code that stands for its value, such as `$(date +%s)`, are apart from those of a
text: it is told from a `$` in quotes, and nothing that is in it ends a word."""

_GAP = "\ue100"
"""Stands between two words in a text that is not yet split."""

_KEPT = "\ue101"
"""Stands in a word that is kept where it is empty, since it has quotes."""

_ITSELF = r"\$\{?(?:0|BASH_SOURCE(?:\[0\])?)\}?"
_DIRNAME = rf"\$\(dirname(?:--)?(?:{_ITSELF}|\$\((?:realpath|readlink-f)(?:--)?{_ITSELF}\))\)"
_OWN_FOLDER = re.compile(
    rf"{_DIRNAME}|\$\(cd(?:--)?{_DIRNAME}(?:[12&]?>[&>/\w]*)?&&pwd(?:-P)?\)"
).fullmatch
"""Matches the code by which a script finds its own folder, once blanks and quotes are taken out."""

NAME = re.compile(r"[A-Za-z_]\w*").fullmatch
_PARAMETER = re.compile(
    r"([A-Za-z_]\w*|\d+|[@*#])(?:\[([^]]*)\])?(?:(:?)([-=+?])(.*))?", re.S
).fullmatch
_CHANGED = re.compile(
    r"([A-Za-z_]\w*)(?:\[[^]]*\])?\s*(?:(?:[-+*/%&|^:]|<<|>>)?=(?!=)|\+\+|--)"
    r"|(?:\+\+|--)\s*([A-Za-z_]\w*)"
).findall
"""Finds the names that an expression changes."""

_BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}").search
"""Finds braces that bash makes several words of, such as `{a,b}` and `{1..3}`."""

_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,8})").fullmatch

Value = str | list[str]
"""The text of a variable, or the elements of an array; an empty list for one that is unset."""


State = dict[str, Value]
"""What is known at a place of a script. Beside the variables:

`@`: the arguments of the script or function. `$0`: the script's own folder, seen from the current
one. `NAME()`: the text of a function. `export NAME`: is there where programs see the variable.
"""


class Words:
    """Expands words by the values of variables, and notes those that are not known.

    folder: the one that the script lies in, seen from the current one; None: it is not known.
    """

    def __init__(self, folder: Path | None):
        self._now: State = {"HOME": "~", "PWD": ".", "export HOME": "", "export PWD": ""}
        if folder is not None:
            self._now["$0"] = str(folder)
        self._opened = ""  # a sentence on why any variable may have another value
        self._place = ""  # where the statement stands that is followed
        self._reasons: dict[str, str] = {}  # variable -> the place since which it is not known

    def _set(self, name: str, value: Value | None) -> None:
        """Set a variable. value: None where the script has not set it."""
        self._now.pop(name, None)
        if value is not None:
            self._now[name] = value

    def _forget(self, names: Iterable[str]) -> None:
        """Note that variables may be set here to values that are not known.

        Of the settings in their old values the keys stay.
        """
        for name in names:
            self._now[name] = merged(name, self._now.get(name, []), code(f"${name}"))
            self._reasons[name] = self._place

    def _open(self, reason: str) -> None:
        """Note that each variable may be set here."""
        self._opened = f"after {self._place}, each variable may be another: {reason}"
        self._forget(name for name in [*self._now] if NAME(name) and name not in ("HOME", "PWD"))

    def _fields(self, words: list[Word]) -> list[str]:
        """Return words as bash hands them to a command."""
        fields: list[str] = []
        for word in words:
            text = self._expanded(word.pieces, splits=True)
            if word.array is not None:  # here it is an argument, not an assignment
                text += code("$(...)")
            elif has_braces(word):
                text = text.replace("{", code("${"), 1)
            fields += [part.replace(_KEPT, "") for part in text.split(_GAP) if part]
        return fields

    def _text(self, pieces: list[Piece]) -> str:
        """Return the text of pieces where bash splits no words."""
        return self._expanded(pieces, splits=False).replace(_KEPT, "").replace(_GAP, " ")

    def _expanded(self, pieces: list[Piece], splits: bool) -> str:
        """Return the text of pieces. splits: with gaps where bash splits it into words."""
        values = [self._value(each, splits) if each.expands else each.text for each in pieces]
        texts: list[str] = []
        for at, (piece, value) in enumerate(zip(pieces, values, strict=True)):
            if _may_join(["", *values][at], value, [*values, ""][at + 1]):
                value = code(piece.text)
            if isinstance(value, list):
                texts.append(_GAP.join(f"{_KEPT}{each}" for each in value))
            elif _KEPT in value or _GAP in value:  # of `${NAME:-word}`, which is expanded
                texts.append(value)
            elif piece.quoted:
                texts.append(f"{_KEPT}{value}")
            elif splits and piece.expands and "IFS" in self._now:
                texts.append(code(piece.text))
            else:
                texts.append(re.sub(r"[ \t\n]+", _GAP, value) if splits else value)
        return "".join(texts)

    def _value(self, piece: Piece, splits: bool) -> Value:
        """Return the value of an expansion, or its code where the value is unknown. A list is what
        bash keeps as several words."""
        text = piece.text
        if text.startswith("$(("):
            number = number_of(self._in_numbers(text[3:-2]))
            self._forget(changed(text))
            return code(text) if number is None else str(number)
        if text.startswith(("$(", "`")):
            command = re.sub(r"[\s\"']", "", text)
            if command in ("$(pwd)", "$(pwd-P)"):
                return self._now.get("PWD", code(text))
            return self._now.get("$0", code(text)) if _OWN_FOLDER(command) else code(text)
        parameter = _PARAMETER(text[2:-1] if text.startswith("${") else text[1:])
        if parameter is None:
            self._forget(changed(text))
            return code(text)
        name, subscript, colon, sign, word = parameter.groups()
        held = self._held(name, subscript)
        if held is None and (sign in (None, "+", "?") or (self._opened and not name.isdigit())):
            self._forget(changed(text))
            return code(text)
        takes_all = isinstance(held, list) and (subscript in ("@", "*") or name in "@*")
        if isinstance(held, list) and not takes_all:
            held = held[0] if held else None
        is_set = bool(held) or (held == "" and not colon)
        is_open = held and not takes_all and not is_known(str(held))
        if (is_open and sign == "+") or (not is_set and sign == "?"):
            return code(text)
        if sign is None or (is_set and sign != "+"):
            if not isinstance(held, list):
                return held or ""
            if piece.quoted and "*" not in (subscript, name):
                return held
            return code(text) if "IFS" in self._now else " ".join(held)
        if is_set != (sign == "+"):
            return [] if takes_all and piece.quoted else ""
        if sign == "=":
            self._now[name] = self._text(pieces_of(word, piece.quoted))
            return self._now[name]
        return self._expanded(pieces_of(word, piece.quoted), splits)

    def _held(self, name: str, subscript: str | None) -> Value | None:
        """Return what a variable holds; None where the script does not say."""
        arguments = self._now.get("@")
        if name.isdigit() or name == "#":
            if name == "0" or (arguments is None and name != "#"):
                return None
            arguments = [] if arguments is None else [*arguments]
            count = len(arguments) if name == "#" else int(name)
            if any(map(is_several, arguments[:count])):
                return code(f"${name}")
            if name == "#":
                return str(count)
            return arguments[count - 1] if count <= len(arguments) else []
        held = self._now.get("@" if name == "*" else name)
        if held is None or subscript in (None, "@", "*"):
            return [held] if isinstance(held, str) and subscript in ("@", "*") else held
        elements = [held] if isinstance(held, str) else held
        if not subscript.isdigit() or any(map(is_several, elements)):
            return code(f"${{{name}[{subscript}]}}")
        return elements[int(subscript)] if int(subscript) < len(elements) else []

    def _in_numbers(self, expression: str) -> str:
        """Return an arithmetic expression with the values of its variables."""

        def value(match: re.Match[str]) -> str:
            held = self._held(match[1], None)
            held = held[0] if isinstance(held, list) and held else held
            return f"({held})" if isinstance(held, str) and _INTEGER(held) else "$"

        return re.sub(r"\$?\{?([A-Za-z_]\w*|(?<=[${])\d)\}?", value, expression.strip())

    def _test(self, words: list[Word], is_new: bool) -> bool | None:
        """Return the result of a simple comparison of known texts; None for another test.

        is_new: it is `[[ ]]`, where words are not split and the right one is a pattern.
        """
        fields = [self._text(word.pieces) for word in words] if is_new else self._fields(words)
        is_negated = fields[:1] == ["!"]
        result: bool | None = None
        match fields[is_negated:]:
            case _ if not all(map(is_known, fields)):
                pass
            case ["-n" | "-z" as sign, text]:
                result = bool(text) == (sign == "-n")
            case [text]:
                result = bool(text)
            case [left, "=" | "==" | "!=" as sign, right]:
                if not (is_new and re.search(r"[*?[\\(]", right)):
                    result = (left == right) == (sign != "!=")
            case [left, sign, right] if sign in _COMPARED:
                number = number_of(f"{left}{_COMPARED[sign]}{right}")
                result = None if number is None else number == 1
        return None if result is None else result != is_negated


_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_COMPARED = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


def number_of(expression: str) -> int | None:
    """Return the value of an expression of whole numbers; None for an unknown one."""
    if not re.fullmatch(r"[\d\s+*/%()<>=!-]+", expression) or re.search(r"\+\+|--", expression):
        return None
    try:
        return _computed(ast.parse(expression.replace("\n", " "), mode="eval").body)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError, ValueError):
        return None


def _computed(node: ast.expr) -> int:
    """Return the value of an expression; raises ValueError for one that is not computed."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_computed(operand)
        case ast.BinOp(left=left, op=sign, right=right):
            pass
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            pass
        case _:
            raise ValueError("not computed")
    numbers = [_computed(left), _computed(right)]
    rounds = isinstance(sign, ast.Div | ast.Mod) and min(numbers) < 0  # bash rounds to 0
    if rounds or max(map(abs, numbers)) >= 2**31 or type(sign) not in _OPERATORS:
        raise ValueError("not computed")
    return int(_OPERATORS[type(sign)](*numbers))


def merged(name: str, before: Value, after: Value) -> Value:
    """Return the words that are certain of a variable that has one of two values.

    Settings that both have stay. Of others only the key is certain: the variable's name stands for
    the value.
    """
    if before == after:
        return before
    unknown = code(f"${name}")
    words_before = before.split() if isinstance(before, str) else before
    words_after = after.split() if isinstance(after, str) else after
    pairs = itertools.zip_longest(words_before, words_after)
    ahead = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
    certain = {*_single(words_before)} & {*_single(words_after)}
    behind: list[str] = []
    for word in [*words_before[ahead:], *words_after[ahead:]]:
        key = re.match(r"[^\s=]+=", word)
        kept = word if word in certain else f"{key[0] if key else ''}{unknown}"
        if kept not in [*words_before[:ahead], *behind]:
            behind.append(kept)
    words = [*words_before[:ahead], *behind]
    if all(unknown not in word for word in words):
        words.append(unknown)
    are_texts = all(isinstance(value, str) or not value for value in (before, after))
    return " ".join(words) if are_texts else words


def _single(words: list[str]) -> list[str]:
    """Return the settings whose keys occur once."""
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    return [
        word for word, key in zip(words, keys, strict=True) if "=" in word and keys.count(key) == 1
    ]


def _may_join(before: Value, value: Value, after: Value) -> bool:
    """Return whether the text beside a value may belong to another of its words than it seems to,
    since the first or the last may stand for none."""
    words = value.split() if isinstance(value, str) else value
    is_open = len(words) > 1 and (is_several(words[0]) or is_several(words[-1]))
    ends = [str(before)[-1:], str(after)[:1]]
    is_apart = isinstance(value, str) and all(end.isspace() for end in ends if end)
    return is_open and any(ends) and not is_apart


def has_braces(word: Word) -> bool:
    """Return whether bash makes several words of one for its braces."""
    pieces = word.pieces
    plain = ["x" if piece.quoted or piece.expands else piece.text for piece in pieces]
    return _BRACES("".join(plain)) is not None


def code(text: str) -> str:
    """Return the code of an expansion, as the value that is not known."""
    return text.translate(_TO_CODE)


def shown(text: str) -> str:
    """Return a text as the script has it."""
    return text.translate(_FROM_CODE)


def is_known(text: str) -> bool:
    return not any("\ue000" <= sign < "\ue080" for sign in text)


def is_several(word: str) -> bool:
    """Return whether a word may stand for several, or for none."""
    is_one = re.fullmatch(r"\$(?:[\w@*]+|\{.*\}|\(.*\))|`.*`", shown(word), re.S) is None
    return not is_one and not is_known(word)


def changed(expression: str) -> list[str]:
    return [name or other for name, other in _CHANGED(expression)]
