"""Reads the text of a shell script into its statements, as bash's grammar has them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_BLANKS = re.compile(r"(?:[ \t]|\\\n|(?<![^\s;&|()])#[^\n]*)+")
_REDIRECTION = re.compile(r"(?:\d+|\{\w+\})?(?:<<<|<<-?|<>|<&|<(?!\()|>>|>&|>\||>(?!\()|&>>?)")
_FUNCTION = re.compile(r"([^\s;&|()<>$`'\"\\=]+)[ \t]*\([ \t]*\)")
_LITERAL = re.compile(r"[^\s;&|()<>$`'\"\\{}]+")
_IN_QUOTES = re.compile(r"[^$`\"\\]+")
_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|[\d#@*?!$-])")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=").fullmatch
_END_OF_WORD = " \t\n;&|()<>"
_END_OF_TEST = " \t\n"


@dataclass(frozen=True)
class Piece:
    """A part of a word. expands: True for an expansion, which begins with `$` or a backtick."""

    text: str
    quoted: bool = False
    expands: bool = False


@dataclass(frozen=True)
class Word:
    """A word. raw: its text. array: the words in the brackets of `NAME=(...)`."""

    raw: str
    pieces: list[Piece]
    array: list[Word] | None = None


@dataclass(frozen=True)
class Statement:
    """A statement. line: the number of the line where it begins. raw: its text."""

    line: int
    raw: str


@dataclass(frozen=True)
class Simple(Statement):
    """Assignments, a command or a test in `[[ ]]`."""

    words: list[Word]


@dataclass(frozen=True)
class Arithmetic(Statement):
    """`(( expression ))`."""

    expression: str


@dataclass(frozen=True)
class Sequence(Statement):
    """Statements one after the other, and which of them run in the background."""

    statements: list[Statement]
    in_background: list[bool]


@dataclass(frozen=True)
class Chain(Statement):
    """Statements with `&&` and `||` between them. signs: the one before each, "" for the first."""

    statements: list[Statement]
    signs: list[str]


@dataclass(frozen=True)
class Pipeline(Statement):
    """Statements with `|` between them. negated: whether `!` stands before them."""

    statements: list[Statement]
    negated: bool


@dataclass(frozen=True)
class Subshell(Statement):
    """`( statements )`."""

    body: Sequence


@dataclass(frozen=True)
class Branches(Statement):
    """`if`. branches: pairs of a condition, None for `else`, and its statements."""

    branches: list[tuple[Sequence | None, Sequence]]


@dataclass(frozen=True)
class Loop(Statement):
    """A loop. sign: `for`, `select`, `while` or `until`. name: the variable of `for`, or its
    expression in `(( ))`. words: what the variable becomes; None for the script's arguments."""

    sign: str
    name: str
    words: list[Word] | None
    condition: Sequence | None
    body: Sequence


@dataclass(frozen=True)
class Case(Statement):
    """`case`. clauses: the patterns of each and its statements. falls: whether one goes on in the
    next, by `;&` or `;;&`."""

    word: Word
    clauses: list[tuple[list[Word], Sequence]]
    falls: bool


@dataclass(frozen=True)
class Function(Statement):
    """The definition of a function."""

    name: str
    body: Statement


def parsed(script: str) -> Sequence:
    """Return the statements of a script; raises ValueError with the line that is not read."""
    try:
        return _Reader(script.replace("\r\n", "\n")).sequence(())
    except RecursionError:
        raise ValueError("it is not read as bash: too many brackets are open") from None


def pieces_of(text: str, quoted: bool) -> list[Piece]:
    """Return the parts of a text within `${NAME:-text}`. quoted: the expansion is in quotes."""
    reader = _Reader(text)
    if not quoted:
        return reader.word("").pieces
    pieces: list[Piece] = []
    reader.read_quoted(pieces, "")
    return pieces


@dataclass
class _Reader:
    text: str
    at: int = 0
    _documents: list[tuple[str, bool]] = field(default_factory=list)
    """The here-documents that begin behind this line: the line that ends each, and whether tabs
    may stand before it."""

    def _damage(self, lacks: str) -> ValueError:
        return ValueError(f"line {self._line(self.at)} of it is not read as bash: {lacks}")

    def _line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def _starts(self, *signs: str) -> bool:
        return self.text.startswith(signs, self.at)

    def _skip(self, newlines: bool = False) -> None:
        """Go behind blanks and comments, and behind line ends where asked to."""
        while True:
            blanks = _BLANKS.match(self.text, self.at)
            if blanks:
                self.at = blanks.end()
            elif newlines and self._starts("\n"):
                self._end_line()
            else:
                return

    def _end_line(self) -> None:
        """Go behind a line end and the here-documents that follow it."""
        self.at += 1
        for last, tabs in self._documents:
            indented = r"\t*" if tabs else ""
            end = re.compile(rf"^{indented}{re.escape(last)}$", re.M).search(self.text, self.at)
            if end is None:  # bash then takes all the rest, with a warning
                self.at = len(self.text)
            else:
                self.at = min(end.end() + 1, len(self.text))
        self._documents = []

    def _is_next(self, word: str) -> bool:
        """Return whether a word of the grammar, or a sign, stands here."""
        end = self.at + len(word)
        is_word = word[0].isalpha() or word in "{}!"
        after = self.text[end : end + 1]
        return self._starts(word) and not (is_word and after and after not in _END_OF_WORD)

    def _take(self, *words: str) -> str:
        """Go behind one of the words of the grammar, which has to stand here, and return it."""
        self._skip(newlines=True)
        for word in words:
            if self._is_next(word):
                self.at += len(word)
                return word
        raise self._damage(f"no {' or '.join(words)} follows")

    def sequence(self, ends: tuple[str, ...]) -> Sequence:
        """Return the statements before one of the words in `ends`; all where that is empty."""
        start = self.at
        statements: list[Statement] = []
        in_background: list[bool] = []
        while True:
            self._skip(newlines=True)
            if self.at >= len(self.text):
                if ends:
                    raise self._damage(f"no {' or '.join(ends)} follows")
                break
            if any(map(self._is_next, ends)):
                break
            statements.append(self._chain())
            self._skip()
            in_background.append(self._starts("&") and not self._starts("&&"))
            if in_background[-1] or (self._starts(";") and not self._starts(";;", ";&")):
                self.at += 1
            elif self.at < len(self.text) and not self._starts("\n", ")", ";"):
                raise self._damage(f"{self.text[self.at]} is not expected")
        raw = self.text[start : self.at]
        return Sequence(self._line(start), raw, statements, in_background)

    def _chain(self) -> Statement:
        start = self.at
        statements = [self._pipeline()]
        signs = [""]
        self._skip()
        while self._starts("&&", "||"):
            signs.append(self.text[self.at : self.at + 2])
            self.at += 2
            self._skip(newlines=True)
            statements.append(self._pipeline())
            self._skip()
        raw = self.text[start : self.at]
        return Chain(self._line(start), raw, statements, signs) if signs[1:] else statements[0]

    def _pipeline(self) -> Statement:
        start = self.at
        negated = False
        while self._is_next("!") or self._is_next("time"):
            negated ^= self._starts("!")
            self.at += 1 if self._starts("!") else 4
            self._skip()
        statements = [self._statement()]
        self._skip()
        while self._starts("|") and not self._starts("||"):
            self.at += 2 if self._starts("|&") else 1
            self._skip(newlines=True)
            statements.append(self._statement())
            self._skip()
        if not negated and len(statements) == 1:
            return statements[0]
        return Pipeline(self._line(start), self.text[start : self.at], statements, negated)

    def _statement(self) -> Statement:
        start = self.at
        line = self._line(start)
        function = _FUNCTION.match(self.text, self.at)
        is_named = self._is_next("function")
        if self._starts("((") and self._end_of_arithmetic(start + 2):
            self.at = self._end_of_arithmetic(start + 2)
            raw = self.text[start : self.at]
            made: Statement = Arithmetic(line, raw, raw[2:-2])
        elif self._starts("("):
            self.at += 1
            body = self.sequence((")",))
            self._take(")")
            made = Subshell(line, self.text[start : self.at], body)
        elif self._is_next("{"):
            self.at += 1
            made = self.sequence(("}",))
            self._take("}")
        elif self._is_next("if"):
            made = self._branches()
        elif any(map(self._is_next, ("for", "select", "while", "until"))):
            made = self._loop()
        elif self._is_next("case"):
            made = self._case()
        elif function or is_named:
            if is_named:
                self.at += len("function")
                self._skip()
                name = self.word().raw
                self._skip()
                brackets = re.compile(r"\(\s*\)").match(self.text, self.at)
                self.at = brackets.end() if brackets else self.at
            else:
                name = function[1] if function else ""
                self.at = function.end() if function else self.at
            self._skip(newlines=True)
            made = Function(line, self.text[start : self.at], name, self._statement())
        else:
            return self._simple()
        self._redirections()
        return made

    def _redirections(self) -> bool:
        """Go behind redirections; return whether there was one."""
        self._skip()
        redirection = _REDIRECTION.match(self.text, self.at)
        if redirection is None:
            return False
        self.at = redirection.end()
        self._skip()
        word = self.word()
        if not word.raw:
            raise self._damage("a redirection leads nowhere")
        if redirection[0].lstrip("0123456789") in ("<<", "<<-"):
            last = "".join(piece.text for piece in word.pieces)
            self._documents.append((last, redirection[0].endswith("-")))
        self._redirections()
        return True

    def _simple(self) -> Statement:
        start = self.at
        words: list[Word] = []
        redirected = False
        is_test = self._is_next("[[") and self.text[self.at + 2 : self.at + 3].isspace()
        while True:
            redirected |= not is_test and self._redirections()
            self._skip(newlines=is_test)
            if is_test and self._starts("]]"):
                is_test = False
            word = self.word(_END_OF_TEST if is_test else _END_OF_WORD)
            if not word.raw:
                break
            words.append(word)
        if is_test or not (words or redirected):
            sign = self.text[self.at : self.at + 1]
            raise self._damage(f"{sign} is not expected" if sign.strip() else "it ends too early")
        return Simple(self._line(start), self.text[start : self.at].strip(), words)

    def _branches(self) -> Statement:
        start = self.at
        branches: list[tuple[Sequence | None, Sequence]] = []
        word = self._take("if")
        while word in ("if", "elif"):
            condition = self.sequence(("then",))
            self._take("then")
            branches.append((condition, self.sequence(("elif", "else", "fi"))))
            word = self._take("elif", "else", "fi")
        if word == "else":
            branches.append((None, self.sequence(("fi",))))
            self._take("fi")
        return Branches(self._line(start), self.text[start : self.at], branches)

    def _loop(self) -> Statement:
        start = self.at
        sign = self._take("for", "select", "while", "until")
        name = ""
        words: list[Word] | None = None
        condition = None
        self._skip()
        if sign in ("while", "until"):
            condition = self.sequence(("do",))
        elif self._starts("(("):
            begin = self.at
            self.at = self._end_of_arithmetic(begin + 2)
            name = self.text[begin : self.at or begin]
            if not self.at:
                self.at = begin
                raise self._damage("no )) follows")
        else:
            name = self.word().raw
            self._skip(newlines=True)
            if self._is_next("in"):
                self.at += 2
                words = self._words()
        self._skip(newlines=True)
        if self._starts(";"):
            self.at += 1
        first = self._take("do", "{")
        body = self.sequence(("done",) if first == "do" else ("}",))
        self._take("done", "}")
        line = self._line(start)
        return Loop(line, self.text[start : self.at], sign, name, words, condition, body)

    def _words(self, newlines: bool = False) -> list[Word]:
        """Return the words that follow. newlines: whether they may stand on several lines."""
        words = []
        while True:
            self._skip(newlines)
            word = self.word()
            if not word.raw:
                return words
            words.append(word)

    def _case(self) -> Statement:
        start = self.at
        self._take("case")
        self._skip()
        word = self.word()
        self._take("in")
        clauses: list[tuple[list[Word], Sequence]] = []
        falls = False
        self._skip(newlines=True)
        while not self._is_next("esac"):
            if self._starts("("):
                self.at += 1
            patterns: list[Word] = []
            while not patterns or self._take("|", ")") == "|":
                self._skip(newlines=True)
                patterns.append(self.word())
                if not patterns[-1].raw:
                    raise self._damage("a pattern is expected")
            clauses.append((patterns, self.sequence((";;", ";&", "esac"))))
            if not self._is_next("esac"):
                sign = self._take(";;&", ";;", ";&")
                falls |= sign != ";;"
            self._skip(newlines=True)
        self._take("esac")
        line = self._line(start)
        return Case(line, self.text[start : self.at], word, clauses, falls)

    def word(self, ends: str = _END_OF_WORD) -> Word:
        """Return the word that stands here; one without text where there is none.

        ends: the signs that end a word.
        """
        start = self.at
        pieces: list[Piece] = []
        array: list[Word] | None = None
        while self.at < len(self.text):
            sign = self.text[self.at]
            if sign in "<>" and self._starts("<(", ">(") and ends == _END_OF_WORD:
                pieces.append(self._code(quoted=False))
            elif sign == "(" and _ARRAY(self.text[start : self.at]) and ends == _END_OF_WORD:
                self.at += 1
                array = self._words(newlines=True)
                self._take(")")
            elif sign in ends:
                break
            elif sign == "\\":
                if not self._starts("\\\n"):
                    pieces.append(Piece(self.text[self.at + 1 : self.at + 2], quoted=True))
                self.at += 2
            elif sign == "'":
                self.at += 1
                pieces.append(Piece(self._until("'"), quoted=True))
            elif sign == '"' or self._starts('$"'):
                self.at += 2 if sign == "$" else 1
                before = len(pieces)
                self.read_quoted(pieces, '"')
                if len(pieces) == before:
                    pieces.append(Piece("", quoted=True))
            elif sign in "$`":
                pieces.append(self._expansion(quoted=False))
            else:
                literal = _LITERAL.match(self.text, self.at)
                end = literal.end() if literal else self.at + 1
                pieces.append(Piece(self.text[self.at : end]))
                self.at = end
        self.at = min(self.at, len(self.text))
        return Word(self.text[start : self.at], pieces, array)

    def _until(self, sign: str) -> str:
        """Return the text before a sign, and go behind it."""
        end = self.text.find(sign, self.at)
        if end < 0:
            raise self._damage(f"no {sign} follows")
        text = self.text[self.at : end]
        self.at = end + 1
        return text

    def read_quoted(self, pieces: list[Piece], end: str) -> None:
        """Read a text in double quotes, and go behind them. end: `"`, or "" for the whole text, in
        which quotes are left out."""
        while self.at < len(self.text):
            sign = self.text[self.at]
            if sign == '"':
                self.at += 1
                if end:
                    return
            elif sign == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                text = escaped if escaped and escaped in '$`"\\' else f"\\{escaped}"
                if escaped != "\n":
                    pieces.append(Piece(text, quoted=True))
                self.at += 2
            elif sign in "$`":
                pieces.append(self._expansion(quoted=True))
            else:
                literal = _IN_QUOTES.match(self.text, self.at)
                stop = literal.end() if literal else self.at + 1
                pieces.append(Piece(self.text[self.at : stop], quoted=True))
                self.at = stop
        if end:
            raise self._damage(f"no {end} follows")

    def _expansion(self, quoted: bool) -> Piece:
        """Return what begins with `$` or a backtick."""
        start = self.at
        if self._starts("`"):
            self.at += 1
            while not self._starts("`"):
                self.at += 2 if self._starts("\\") else 1
                if self.at >= len(self.text):
                    raise self._damage("no ` follows")
            self.at += 1
        elif self._starts("$((") and self._end_of_arithmetic(start + 3):
            self.at = self._end_of_arithmetic(start + 3)
        elif self._starts("$("):
            return self._code(quoted)
        elif self._starts("${"):
            self.at += 2
            self._to_brace(quoted)
        elif self._starts("$'") and not quoted:
            self.at += 2
            while not self._starts("'"):
                self.at += 2 if self._starts("\\") else 1
                if self.at >= len(self.text):
                    raise self._damage("no ' follows")
            self.at += 1
            text = self.text[start + 2 : self.at - 1]
            if "\\" not in text:
                return Piece(text, quoted=True)
        else:
            variable = _VARIABLE.match(self.text, self.at)
            self.at = variable.end() if variable else self.at + 1
            return Piece(self.text[start : self.at], quoted, variable is not None)
        return Piece(self.text[start : self.at], quoted, True)

    def _code(self, quoted: bool) -> Piece:
        """Return `$(...)`, `<(...)` or `>(...)`."""
        start = self.at
        documents = self._documents
        self._documents = []
        self.at += 2
        self.sequence((")",))
        self._take(")")
        self._documents = documents
        return Piece(self.text[start : self.at], quoted, True)

    def _to_brace(self, quoted: bool) -> None:
        """Go behind the brace that ends `${`."""
        while not self._starts("}"):
            if self.at >= len(self.text):
                raise self._damage("no } follows")
            if self._starts("\\"):
                self.at += 2
            elif self._starts("'"):
                self.at += 1
                self._until("'")
            elif self._starts('"'):
                self.at += 1
                self.read_quoted([], '"')
            elif self._starts("$", "`"):
                self._expansion(quoted)
            else:
                self.at += 1
        self.at += 1

    def _end_of_arithmetic(self, at: int) -> int:
        """Return the place behind the `))` that closes an expression; 0 where none closes it.

        at: where the expression begins.
        """
        depth = 0
        for sign in re.compile(r"[()]").finditer(self.text, at):
            if sign[0] == "(":
                depth += 1
            elif depth:
                depth -= 1
            else:
                end = sign.start() + 2
                return end if self.text[sign.start() : end] == "))" else 0
        return 0
