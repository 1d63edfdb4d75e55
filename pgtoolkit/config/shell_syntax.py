"""Reads the text of a shell script into its statements, as bash's grammar has them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_BLANKS = re.compile(r"(?:[ \t]|\\\n|(?<![^\s;&|()])#[^\n]*)+")
_REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|<>|<&|<(?!\()|>>|>&|>\||>(?!\()|&>>?)")
_FUNCTION = re.compile(
    r"function[ \t]+([^\s;&|()<>]+)(?:[ \t]*\([ \t]*\))?|([^\s;&|()<>$`'\"\\=]+)[ \t]*\([ \t]*\)"
)
_LITERAL = re.compile(r"[^\s;&|()<>$`'\"\\{}]+|(?s:.)")
_IN_QUOTES = re.compile(r"[^$`\"\\]+|(?s:.)")
_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|[\d#@*?!$-])?")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=").fullmatch
_ESCAPED = re.compile(r"(?s:`(?:\\.|[^\\`])*`|\$'(?:\\.|[^\\'])*')")
_NOT_READ = ("select", "coproc", "then", "elif", "else", "fi", "do", "done", "esac", "}")
"""Words of the grammar that no command begins with, or that are not read."""

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
class Node:
    """A statement. line: the number of the line where it begins. raw: its text.

    sign, and the words and parts that go with it:
        "": a command, assignments or a test in `[[ ]]`: its words.
        ";": parts, one after the other. "|": parts of a pipeline.
        "&&", "||": two parts. "!": the part behind it.
        "&", "(": the part that runs in a shell of its own.
        "((": arithmetic.
        "if": conditions, each before its statements; that of `else` is empty.
        "for": the name and what it becomes; its statements. No word: it counts in `(( ))`.
        "while", "until": the condition and its statements.
        "case": the word; the clauses, which are of sign ")": patterns and statements.
        "function": the name; its statements.
    """

    sign: str
    line: int
    raw: str
    words: list[Word] = field(default_factory=list)
    parts: list[Node] = field(default_factory=list)


def parsed(script: str) -> Node:
    """Return the statements of a script; raises ValueError with the line that is not read."""
    try:
        return _Reader(script.replace("\r\n", "\n")).block()[0]
    except RecursionError:
        raise ValueError("it is not read as bash: too many brackets are open") from None


def pieces_of(text: str, quoted: bool) -> list[Piece]:
    """Return the parts of a text within `${NAME:-text}`. quoted: the expansion is in quotes."""
    reader = _Reader(text)
    return reader.in_quotes("") if quoted else reader.word("").pieces


class _Reader:
    def __init__(self, text: str):
        self.text = text
        self.at = 0
        self._documents: list[tuple[str, str]] = []
        """The here-documents that begin behind this line: the redirection and the line that ends
        each."""

    def _damage(self, lacks: str) -> ValueError:
        line = self.text.count("\n", 0, self.at) + 1
        return ValueError(f"line {line} of it is not read as bash: {lacks}")

    def _node(
        self,
        sign: str,
        start: int,
        words: list[Word] | None = None,
        parts: list[Node] | None = None,
    ) -> Node:
        """Return a statement that reaches from `start` to here."""
        line = self.text.count("\n", 0, start) + 1
        return Node(sign, line, self.text[start : self.at].strip(), words or [], parts or [])

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
        for sign, last in self._documents:
            tabs = r"\t*" if sign == "<<-" else ""
            end = re.compile(rf"^{tabs}{re.escape(last)}$", re.M).search(self.text, self.at)
            # Without its end bash takes all the rest, with a warning.
            self.at = min(end.end() + 1, len(self.text)) if end else len(self.text)
        self._documents = []

    def _is_next(self, *words: str) -> str:
        """Return the word of the grammar, or the sign, of these that stands here; "" for none."""
        for word in words:
            after = self.text[self.at + len(word) : self.at + len(word) + 1]
            is_word = word[0].isalpha() or word in ("{", "}", "!", "[[")
            if self._starts(word) and not (is_word and after and after not in _END_OF_WORD):
                return word
        return ""

    def _take(self, *words: str) -> str:
        """Go behind one of the words of the grammar, which has to stand here, and return it."""
        self._skip(newlines=True)
        word = self._is_next(*words)
        if not word:
            raise self._damage(f"no {' or '.join(words)} follows")
        self.at += len(word)
        return word

    def block(self, *ends: str) -> tuple[Node, str]:
        """Return the statements before one of the words in `ends`, and that word, behind which the
        reader then is. Without any, all statements are read."""
        start = self.at
        parts: list[Node] = []
        while True:
            self._skip(newlines=True)
            if self.at >= len(self.text) and ends:
                raise self._damage(f"no {' or '.join(ends)} follows")
            if self.at >= len(self.text) or self._is_next(*ends):
                node = self._node(";", start, parts=parts)
                return node, self._take(*ends) if ends else ""
            begin = self.at
            part = self._chain()
            if self._starts("&"):
                part = self._node("&", begin, parts=[part])
                self.at += 1
            elif self._starts(";") and not self._starts(";;", ";&"):
                self.at += 1
            elif self.at < len(self.text) and not self._starts("\n", ")", ";"):
                raise self._damage(f"{self.text[self.at]} is not expected")
            parts.append(part)

    def _chain(self) -> Node:
        start = self.at
        node = self._pipeline()
        while self._starts("&&", "||"):
            sign = self._take("&&", "||")
            self._skip(newlines=True)
            node = self._node(sign, start, parts=[node, self._pipeline()])
        return node

    def _pipeline(self) -> Node:
        start = self.at
        if self._is_next("!"):
            self._take("!")
            self._skip()
            part = self._pipeline()
            return self._node("!", start, parts=[part])
        parts = [self._statement()]
        self._skip()
        while self._starts("|") and not self._starts("||"):
            self._take("|&", "|")
            self._skip(newlines=True)
            parts.append(self._statement())
            self._skip()
        return self._node("|", start, parts=parts) if parts[1:] else parts[0]

    def _statement(self) -> Node:
        start = self.at
        function = _FUNCTION.match(self.text, self.at)
        sign = (
            self._is_next("{", "if", "for", "while", "until", "case")
            or self.text[start : start + 1]
        )
        end = self._end_of_arithmetic(start + 2) if self._starts("((") else 0
        if end:
            self.at = end
            node = self._node("((", start)
        elif sign in ("(", "{"):
            self.at += 1
            body, _ = self.block(")" if sign == "(" else "}")
            node = self._node("(", start, parts=[body]) if sign == "(" else body
        elif sign == "if":
            node = self._branches()
        elif sign in ("for", "while", "until"):
            node = self._loop()
        elif sign == "case":
            node = self._case()
        elif function:
            name = function[1] or function[2]
            self.at = function.end()
            self._skip(newlines=True)
            body = self._statement()
            node = self._node("function", start, [Word(name, [])], [body])
        else:
            return self._simple()
        self._redirections()
        return node

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
        sign = redirection[0].lstrip("0123456789")
        if sign in ("<<", "<<-"):
            self._documents.append((sign, "".join(piece.text for piece in word.pieces)))
        self._redirections()
        return True

    def _simple(self) -> Node:
        start = self.at
        words: list[Word] = []
        redirected = False
        reserved = self._is_next(*_NOT_READ)
        if reserved:
            raise self._damage(f"{reserved} is not expected")
        is_test = bool(self._is_next("[["))
        while True:
            redirected |= not is_test and self._redirections()
            self._skip(newlines=is_test)
            is_test &= not self._starts("]]")
            word = self.word(_END_OF_TEST if is_test else _END_OF_WORD)
            if not word.raw:
                break
            words.append(word)
        if is_test or not (words or redirected):
            sign = self.text[self.at : self.at + 1]
            raise self._damage(f"{sign} is not expected" if sign.strip() else "it ends too early")
        return self._node("", start, words)

    def _branches(self) -> Node:
        start = self.at
        parts: list[Node] = []
        word = self._take("if")
        while word != "fi":
            is_last = word == "else"
            parts.append(self._node(";", self.at) if is_last else self.block("then")[0])
            body, word = self.block("fi") if is_last else self.block("elif", "else", "fi")
            parts.append(body)
        return self._node("if", start, parts=parts)

    def _loop(self) -> Node:
        start = self.at
        sign = self._take("for", "while", "until")
        words: list[Word] = []
        parts: list[Node] = []
        self._skip()
        if sign != "for":
            parts.append(self.block("do")[0])
        elif self._starts("(("):
            end = self._end_of_arithmetic(self.at + 2)
            if not end:
                raise self._damage("no )) follows")
            self.at = end
        else:
            words = [self.word(), Word('"$@"', [Piece("$@", quoted=True, expands=True)])]
            self._skip(newlines=True)
            if self._is_next("in"):
                self._take("in")
                words[1:] = self._words()
        if sign == "for":
            self._skip()
            self.at += self._starts(";")
            self._take("do")
        parts.append(self.block("done")[0])
        return self._node(sign, start, words, parts)

    def _words(self, newlines: bool = False) -> list[Word]:
        """Return the words that follow. newlines: whether they may stand on several lines."""
        words = []
        while True:
            self._skip(newlines)
            word = self.word()
            if not word.raw:
                return words
            words.append(word)

    def _case(self) -> Node:
        start = self.at
        self._take("case")
        self._skip()
        word = self.word()
        self._take("in")
        self._skip(newlines=True)
        clauses: list[Node] = []
        end = ""
        while end != "esac" and not (self._is_next("esac") and self._take("esac")):
            begin = self.at
            self.at += self._starts("(")
            patterns: list[Word] = []
            while not patterns or self._take("|", ")") == "|":
                self._skip(newlines=True)
                patterns.append(self.word())
                if not patterns[-1].raw:
                    raise self._damage("a pattern is expected")
            body, end = self.block(";;", "esac")  # `;&` and `;;&` are not read
            clauses.append(self._node(")", begin, patterns, [body]))
            self._skip(newlines=True)
        return self._node("case", start, [word], clauses)

    def word(self, ends: str = _END_OF_WORD) -> Word:
        """Return the word that stands here; one without text where there is none.

        ends: the signs that end a word.
        """
        start = self.at
        pieces: list[Piece] = []
        array: list[Word] | None = None
        while self.at < len(self.text):
            sign = self.text[self.at]
            if ends == _END_OF_WORD and self._starts("<(", ">("):
                pieces.append(self._expansion(quoted=False))
            elif ends == _END_OF_WORD and sign == "(" and _ARRAY(self.text[start : self.at]):
                self.at += 1
                array = self._words(newlines=True)
                self._take(")")
            elif sign in ends:
                break
            elif sign == "\\":
                if self.text[self.at + 1 : self.at + 2] not in ("\n", ""):
                    pieces.append(Piece(self.text[self.at + 1], quoted=True))
                self.at = min(self.at + 2, len(self.text))
            elif sign == "'":
                self.at += 1
                pieces.append(Piece(self._until("'"), quoted=True))
            elif sign == '"':
                self.at += 1
                pieces += self.in_quotes('"') or [Piece("", quoted=True)]
            elif sign in "$`":
                pieces.append(self._expansion(quoted=False))
            else:
                pieces.append(Piece(self._matched(_LITERAL)))
        return Word(self.text[start : self.at], pieces, array)

    def _matched(self, pattern: re.Pattern[str]) -> str:
        """Return what a pattern matches here, and go behind it."""
        match = pattern.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return match[0]

    def _until(self, sign: str) -> str:
        """Return the text before a sign, and go behind it."""
        end = self.text.find(sign, self.at)
        if end < 0:
            raise self._damage(f"no {sign} follows")
        text = self.text[self.at : end]
        self.at = end + 1
        return text

    def in_quotes(self, end: str) -> list[Piece]:
        """Return the parts of a text in double quotes, and go behind them. end: `"`, or "" for the
        whole text, in which quotes are left out."""
        pieces: list[Piece] = []
        while self.at < len(self.text):
            sign = self.text[self.at]
            if sign == '"':
                self.at += 1
                if end:
                    return pieces
            elif sign == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                text = escaped if escaped and escaped in '$`"\\' else f"\\{escaped}"
                if escaped != "\n":
                    pieces.append(Piece(text, quoted=True))
                self.at += 2
            elif sign in "$`":
                pieces.append(self._expansion(quoted=True))
            else:
                pieces.append(Piece(self._matched(_IN_QUOTES), quoted=True))
        if end:
            raise self._damage(f"no {end} follows")
        return pieces

    def _expansion(self, quoted: bool) -> Piece:
        """Return what begins with `$`, a backtick, `<(` or `>(`."""
        start = self.at
        end = self._end_of_arithmetic(start + 3) if self._starts("$((") else 0
        escaped = self._starts("`") or (self._starts("$'") and not quoted)
        if escaped:
            match = _ESCAPED.match(self.text, self.at)
            if match is None:
                raise self._damage(f"no {self.text[start : start + 2].strip('$')[0]} follows")
            self.at = match.end()
        elif end:
            self.at = end
        elif self._starts("$(", "<(", ">("):
            documents = self._documents
            self._documents = []
            self.at += 2
            self.block(")")
            self._documents = documents
        elif self._starts("${"):
            self.at += 2
            self._to_brace(quoted)
        else:
            name = self._matched(_VARIABLE)
            return Piece(name, quoted, expands=name != "$")
        return Piece(self.text[start : self.at], quoted, expands=True)

    def _to_brace(self, quoted: bool) -> None:
        """Go behind the brace that ends `${`."""
        while not self._starts("}"):
            if self.at >= len(self.text):
                raise self._damage("no } follows")
            if self._starts("\\"):
                self.at += 2
            elif self._starts("'") and not quoted:
                self.at += 1
                self._until("'")
            elif self._starts('"'):
                self.at += 1
                self.in_quotes('"')
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
