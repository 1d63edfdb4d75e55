"""`pgtk explain WORD`: what a key, a group, an option, a metric or an exit status means. Every text
stands elsewhere: in the schema, in the families, in the errors, and in the tables of docs/.
"""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pgtoolkit.config.defaults import REQUIRED, Computed
from pgtoolkit.config.elsewhere import NONE, keys_called, known_as, table_rows
from pgtoolkit.config.files import docs_page, options
from pgtoolkit.config.key import Key
from pgtoolkit.config.keys import (
    KEYS,
    OWN_CODE,
    group_help,
    in_words,
    option_help,
    option_values,
    values_in_words,
)
from pgtoolkit.config.refusals import ALSO_CALLED
from pgtoolkit.config.schema import default_options
from pgtoolkit.errors import ConfigError, PgtoolkitError
from pgtoolkit.system.functions import kind_of
from pgtoolkit.system.report import nearest, refusal, text

_STATUSES = {
    0: "Done.",
    1: "An error of pgtoolkit's own, with a traceback; of a sweep, that a job has failed.",
    130: "Stopped by a keyboard interrupt.",
    141: "What read the output, such as head, had seen enough.",
}


_OF_WORD = ": a word of these pages"
"""How the title of the page on a word from docs/losses.md ends."""


@dataclass
class Entry:
    """A key with the options of its group in which all that is said of it is the same.

    meaning: see `Key.help`. defaults: by option, in words.
    """

    key: Key
    meaning: str
    defaults: dict[str, str] = field(default_factory=dict)

    @property
    def options(self) -> str:
        """The options of its group that have it; empty where all do."""
        return (
            ""
            if set(self.defaults) >= {*options().get(self.key.group, [""])}
            else ", ".join(self.defaults)
        )

    def told(self) -> dict[str, str]:
        """Type with range, default, and meaning, as they are printed."""
        key = self.key
        if key.option:
            shown = {
                "type": f"one of {', '.join(options()[key.group])}",
                "default": default_options()[key.group],
            }
            if key.group in OWN_CODE:
                shown["type"] += f", or the dotted path of a {kind_of(key.group)} of your own"
        else:
            shown = {"type": values_in_words(key), "default": self._default()}
        return shown | {"meaning": " ".join([self.meaning, *self._conditions()])}

    def _default(self) -> str:
        """Where options differ, of each."""
        by_value: dict[str, list[str]] = {}
        for option, value in self.defaults.items():
            by_value.setdefault(value, []).append(option)
        if len(by_value) == 1:
            return next(iter(by_value))
        return ", ".join(f"{value} ({', '.join(names)})" for value, names in by_value.items())

    def _conditions(self) -> Iterator[str]:
        """What it needs, and what it decides besides its own meaning; whole sentences."""
        key = self.key
        if key.only_if:
            yield (
                f"It needs {in_words(key.only_if)}; without that any value but the default is "
                "refused."
            )
        if key.fixed:
            yield (
                "`pgtk resume` keeps "
                f"it{f', where {in_words(key.fixed_if)}' if key.fixed_if else ''}: {key.fixed}."
            )
        if key.learns is not True:
            where = "" if key.learns is False else f", unless {in_words(key.learns)}"
            yield (
                f"It does not change what is learned{where}: a finished job of a sweep stays "
                "finished."
            )
        if key.code == "function":
            yield (
                "It may name code of your own, which is imported as a run starts: see "
                "docs/configuration.md."
            )
        if key.code == "command":
            yield (
                "It is run as a command: `pgtk resume` takes it only where it is typed on the "
                "command line."
            )
        if key.reads or key.writes:
            yield "A relative path is seen from the directory in which the run starts."


@functools.cache
def entries() -> list[Entry]:
    """Every key in the order of the schema, once for each meaning."""
    by_meaning: dict[tuple, Entry] = {}
    for key in KEYS:
        option = key.schema.partition("/")[2]
        usual = default_options().get(key.group)
        others = [name for name in options().get(key.group, ()) if name != usual]
        for name in [option] if option else [usual, *others]:
            meaning = group_help(key.group) if key.option else key.help
            same = (key.name, key.type, key.range, meaning, key.only_if, key.fixed)
            entry = by_meaning.setdefault(same, Entry(key, meaning))
            entry.defaults[name or ""] = _in_words(option_values(key.group, name).get(key.leaf))
    return list(by_meaning.values())


def _in_words(value: Any) -> str:
    """Return a default in words."""
    if value == REQUIRED:
        return "none"
    return str(value) if isinstance(value, dict | Computed) else text(value)


def explain(words: str) -> str:
    """The page for a word; for a sentence, such as a note or a refusal, of the words in it that are
    known.

    Raises ConfigError for a word that nothing is known of, with the nearest.
    """
    return "\n\n".join(pages_on(words))


def explain_as_json(words: str) -> str:
    """Return the same as JSON: of each page its title, and what is said by name."""
    pages = [
        {"title": page.title}
        | {name or "meaning": cell for name, cell in page.said.items() if cell}
        for page in pages_on(words)
    ]
    return json.dumps({"words": words, "pages": pages}, indent=1, ensure_ascii=False)


def pages_on(words: str) -> list[Page]:
    """Return what `explain` prints, page by page."""
    known = explanations()
    word = ALSO_CALLED.get(words.lower(), words).removeprefix("pgtk ").removeprefix("exit status ")
    general = re.sub(r"@\d+", "@k", re.sub(r"^(reward|environment)/.*", r"\1/NAME", word))
    keys = keys_called(word)
    names_ours = all(key.endswith(f".{word}") for key in keys)
    elsewhere = [] if names_ours else _of_trainers(word)
    if pages := known.get(general) or known.get(word.partition("=")[0] if "." in word else ""):
        if all(f"{_OF_WORD}\n" in page for page in pages):
            elsewhere = [*_of_trainers(word), *_rows_with(word)]
        return [*pages, *elsewhere]
    inside = (
        [part.strip(".") for part in re.findall(r"[\w./@=]+", words)]
        if " " in words.strip()
        else []
    )
    # Of a sentence what stands for something: `loss=gspo`, `rollout.lag`, `kl_ref`, and not `none`.
    names = [
        name
        for part in inside
        for name in (part, part.partition("=")[0])
        if re.search("[=._]", name)
    ]
    if pages := [page for name in dict.fromkeys(names) for page in known.get(name, ())]:
        return list(pages)
    if rows := _of_trainers(words):
        return [*rows, *_rows_with(words)]
    # first where it stands alone
    if rows := sorted(_rows_with(words), key=lambda row: f": `{words}`\n" not in row):
        return rows
    saying = [
        page
        for pages in known.values()
        for page in pages
        if re.search(rf"\b{re.escape(words)}", page, re.I)
    ]
    if titles := dict.fromkeys(
        page.partition("\n")[0] for page in saying if "a group of options" not in page
    ):
        text_of_titles = "\n  ".join([f"{words}: a word in what `pgtk explain` says of", *titles])
        return [
            Page(
                text_of_titles,
                f"{words}: a word in what is said of others",
                {"others": ", ".join(titles)},
            )
        ]
    near = nearest(words, known, 0.65)
    raise ConfigError(
        refusal(
            setting=f"pgtk explain {words}",
            needs="a word that is known",
            got=words,
            reason="It is no key, group, option, metric or exit status.",
            use=f"pgtk explain {near}" if near else "pgtk --help, or docs/keys.md",
        )
    )


@functools.cache
def explanations() -> dict[str, list[Page]]:
    """Every word that can be explained -> its pages, one for each thing that it stands for."""
    pages: dict[str, list[Page]] = {}

    def explained(words: Iterable[str], title: str, shown: dict[str, str]) -> None:
        for word in dict.fromkeys(words):
            pages.setdefault(word, []).append(_page(title, shown))

    for word, meaning in _defined_words():
        explained([word, f"{word}s"], f"{word}{_OF_WORD}", {"": meaning})
    for group, names in options().items():
        usual, keys = (
            default_options().get(group),
            [e for e in entries() if e.key.group == group and not e.key.option],
        )
        heads = {
            f"{group}={name}{' (default)' if name == usual else ''}": option_help(group, name)
            for name in names
        }
        if group in OWN_CODE:
            heads[f"{group}=package.module.{kind_of(group)}"] = (
                f"A {kind_of(group)} of your own, see docs/losses.md."
            )
        told = heads | {"keys": ", ".join(dict.fromkeys(entry.key.name for entry in keys))}
        explained([group], f"{group}: a group of options", told)
        for name in names:
            having = [entry.key.name for entry in keys if name in entry.defaults]
            told = (
                {"": option_help(group, name)}
                | _in_docs(group, name)
                | {"keys": ", ".join(dict.fromkeys(having))}
            )
            explained([f"{group}={name}", name], f"{group}={name}: an option", told)
    for entry in entries():
        of = f" of {entry.key.group}={entry.options}" if entry.options else ""
        words = (
            [] if entry.key.option else [entry.key.name, entry.key.leaf, *map(str, entry.key.names)]
        )
        explained(words, f"{entry.key.name}: a key{of}", entry.told())
    for heads, row in [*table_rows("metrics.md"), *table_rows("evaluation.md")]:
        for name in re.findall(r"`([^`]+)`", row[0]) if heads[0] in ("name", "number") else ():
            explained([name], f"{name}: a metric", dict(zip(heads[1:], row[1:], strict=False)))
    for heads, row in table_rows("metrics.md"):
        if heads[0] == "on the line":
            metric = re.findall("`([^`]+)`", row[1])[0]
            for word in re.findall("`([^`]+)`", row[0]):
                explained(
                    [word], f"{word}: on the line that a run prints for each step", {"": row[1]}
                )
                if metric != word:
                    pages[word] += [
                        page for page in pages[metric] if page.startswith(f"{metric}: a metric")
                    ]
    statuses = dict(_STATUSES)
    for kind in PgtoolkitError.__subclasses__():
        described = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
        statuses[kind.exit_status] = f"{statuses.get(kind.exit_status, '')} {described}"
    for status, meaning in statuses.items():
        explained([str(status)], f"exit status {status}", {"": meaning})
    return pages


def _defined_words() -> Iterator[tuple[str, str]]:
    """Yield (word, the sentence that defines it) for the words in italics in docs/losses.md."""
    section = docs_page("losses.md").partition("\n## Words\n")[2].partition("\n## ")[0]
    for sentence in re.split(r"(?<=[.:]) ", " ".join(section.split())):
        for word in re.findall(r"(?<!\*)\*([\w -]+)\*", sentence):
            yield word, sentence.replace("*", "")


def _in_docs(group: str, name: str) -> dict[str, str]:
    """What the table of a group in docs/losses.md says of an option: its formula, and what others
    call it."""
    shown = {}
    for heads, row in table_rows("losses.md"):  # whose tables name the group in their first head
        if (heads[0], row[0]) == (f"`{group}=`", f"`{name}`"):
            shown |= {
                head: cell for head, cell in zip(heads[1:], row[1:], strict=False) if len(cell) > 1
            }
    return shown


def _rows_with(word: str) -> Iterator[Page]:
    """The rows with a word, or with heads that have it: of another trainer, such as beta, or of a
    file's schema."""
    for page in ("losses.md", "adapters.md", "data.md"):
        for heads, row in table_rows(page):
            codes = re.findall("`[^`]+`", " ".join(heads + row))
            if any(re.search(rf"\b{re.escape(word)}\b", code) for code in codes):
                shown = {
                    head or "here": cell for head, cell in zip(heads, row, strict=False) if cell
                }
                yield _page(f"{word}: see docs/{page}", shown)


def _of_trainers(word: str) -> list[Page]:
    """Return a page for each row on keys of other trainers that have this name."""
    pages = []
    for name, row in known_as(word):
        here = "there is none" if row.here == NONE else row.here
        shown = {"default there": ", ".join(row.defaults), "here": here, "": row.remark}
        pages.append(_page(f"{name}: a key of {row.trainer}, see docs/trl_and_verl.md", shown))
    return pages


class Page(str):
    """What is said of one thing: the text as it is printed, its title, and what is said by name."""

    title: str
    said: dict[str, str]

    def __new__(cls, text: str, title: str, said: dict[str, str]) -> Page:
        page = super().__new__(cls, text)
        page.title = title
        page.said = said
        return page


def _page(title: str, shown: dict[str, str]) -> Page:
    lines = [title]
    for head, cell in shown.items():
        if cell:
            start = f"  {head.replace('`', '')}: " if head else "  "
            line = " ".join(cell.replace("\\|", "|").split())
            lines += textwrap.wrap(line, 116, initial_indent=start, subsequent_indent="    ")
    return Page("\n".join(lines), title, shown)
