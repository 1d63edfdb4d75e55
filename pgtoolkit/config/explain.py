"""`pgtk explain WORD`: what a key, a group, an option, a metric or an exit status means.

Every text is written elsewhere: in the schema, the families, the errors, and the tables of docs/.
"""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

from pgtoolkit.config.defaults import Computed
from pgtoolkit.config.elsewhere import NONE, keys_called, known_as
from pgtoolkit.config.files import docs_page, options, table_rows
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
from pgtoolkit.errors import ConfigError, ExitStatus
from pgtoolkit.runs.declared_metrics import OF_STEPS, OF_TRACKERS, metric_named
from pgtoolkit.runs.declared_metrics import TABLES as METRICS
from pgtoolkit.runs.metric import Metric, declared_as
from pgtoolkit.system.declared import REQUIRED, Key
from pgtoolkit.system.functions import kind_of
from pgtoolkit.system.report import nearest, refusal, text
from pgtoolkit.tracking.progress import shown_as


@dataclass
class Entry:
    """A key, with those options of its group for which everything about it is the same but the
    default.

    meaning: see `Key.help`. defaults: by option, in words.
    """

    key: Key
    meaning: str
    defaults: dict[str, str] = field(default_factory=dict)

    @property
    def options(self) -> str:
        """The options of its group that have it; empty if all do."""
        if set(self.defaults) >= {*options().get(self.key.group, [""])}:
            return ""
        return ", ".join(self.defaults)

    def description(self) -> dict[str, str]:
        """Return the type with its range, the default, and the meaning, as they are printed."""
        key = self.key
        if key.option:
            kind = f"one of {', '.join(options()[key.group])}"
            if key.group in OWN_CODE:
                kind += f", or the dotted path of a {kind_of(key.group)} of your own"
            default = default_options()[key.group]
        else:
            kind = values_in_words(key)
            default = self._default()
        meaning = " ".join([self.meaning, *self._conditions()])
        return {"type": kind, "default": default, "meaning": meaning}

    def _default(self) -> str:
        """Return the default, with the options that have it where they have different ones."""
        options_by_value: dict[str, list[str]] = {}
        for option, value in self.defaults.items():
            options_by_value.setdefault(value, []).append(option)
        if len(options_by_value) == 1:
            return next(iter(options_by_value))
        return ", ".join(
            f"{value} ({', '.join(names)})" for value, names in options_by_value.items()
        )

    def _conditions(self) -> Iterator[str]:
        """Yield sentences on what the key needs, and on what it decides besides its meaning."""
        key = self.key
        if key.only_if:
            needs = in_words(key.only_if)
            yield f"It needs {needs}; otherwise any value but the default is refused."
        if key.fixed:
            condition = f", if {in_words(key.fixed_if)}" if key.fixed_if else ""
            yield f"`pgtk resume` keeps it{condition}: {key.fixed}."
        if key.learns is not True:
            unless = "" if key.learns is False else f", unless {in_words(key.learns)}"
            yield (
                f"It does not change what is learned{unless}: a finished job of a sweep stays "
                "finished."
            )
        if key.code == "function":
            yield (
                "It may name code of your own, which is imported when a run starts: see "
                "docs/configuration.md."
            )
        if key.code == "command":
            yield (
                "It is run as a command: `pgtk resume` takes it only if it is typed on the command "
                "line."
            )
        if key.reads or key.writes:
            yield "A relative path is seen from the directory in which the run starts."


@functools.cache
def entries() -> list[Entry]:
    """Return every key in the order of the schema, once for each meaning."""
    by_meaning: dict[tuple, Entry] = {}
    for key in KEYS:
        option_of_key = key.schema.partition("/")[2]
        default = default_options().get(key.group)
        others = [name for name in options().get(key.group, ()) if name != default]
        for option in [option_of_key] if option_of_key else [default, *others]:
            meaning = group_help(key.group) if key.option else key.help
            alike = (key.name, key.type, key.range, meaning, key.only_if, key.fixed)
            entry = by_meaning.setdefault(alike, Entry(key, meaning))
            value = option_values(key.group, option).get(key.leaf)
            entry.defaults[option or ""] = _default_in_words(value)
    return list(by_meaning.values())


def _default_in_words(value: object) -> str:
    if value == REQUIRED:
        return "none"
    return str(value) if isinstance(value, dict | Computed) else text(value)


@dataclass(frozen=True)
class Page:
    """The page on one thing that a word stands for.

    kind: "key", "group", "option", "metric", "line" (of a step), "exit status", "word", "row" (of a
    table), or "mentions". parts: what is written about it, by name; "" for a part without one.
    text: the printed page.
    """

    kind: str
    title: str
    parts: dict[str, str]
    text: str


Explained = Iterator[tuple[list[str], Page]]
"""Pages, each with the words that it explains."""


def _page(kind: str, title: str, parts: dict[str, str]) -> Page:
    lines = [title]
    for name, content in parts.items():
        if content:
            start = f"  {name.replace('`', '')}: " if name else "  "
            line = " ".join(content.replace("\\|", "|").split())
            lines += textwrap.wrap(line, 116, initial_indent=start, subsequent_indent="    ")
    return Page(kind, title, parts, "\n".join(lines))


def explain(words: str) -> str:
    """Return the pages on a word, as text; on a sentence, such as a note or a refusal, those on the
    words in it that are known.

    Raises ConfigError for a word about which nothing is written; it names the nearest one.
    """
    return "\n\n".join(page.text for page in pages_on(words))


def explain_as_json(words: str) -> str:
    """Return the same pages as JSON: the title of each, and its parts by their names."""
    pages = []
    for page in pages_on(words):
        parts = {name or "meaning": content for name, content in page.parts.items() if content}
        pages.append({"title": page.title} | parts)
    return json.dumps({"words": words, "pages": pages}, indent=1, ensure_ascii=False)


def pages_on(words: str) -> list[Page]:
    """Return the pages that `explain` prints: those of the first way to look the words up that
    finds any."""
    for look_up in (_known, _in_sentence, _in_other_trainers, _in_tables, _in_other_pages):
        pages = look_up(words)
        if pages:
            return pages
    near = nearest(words, explanations(), 0.65)
    raise ConfigError(
        refusal(
            setting=f"pgtk explain {words}",
            needs="a word that is known",
            got=words,
            reason="It is no key, group, option, metric or exit status.",
            use=f"pgtk explain {near}" if near else "pgtk --help, or docs/keys.md",
        )
    )


def _known(words: str) -> list[Page]:
    """Return the pages on a word that can be explained, and what other trainers call so."""
    word = ALSO_CALLED.get(words.lower(), words).removeprefix("pgtk ").removeprefix("exit status ")
    known = explanations()
    pages = known.get(word) or _of_metric(word)
    if not pages and "." in word:
        pages = known.get(word.partition("=")[0])
    if not pages:
        return []
    if all(page.kind == "word" for page in pages):
        return [*pages, *_rows_of_trainers(word), *_rows_with(word)]
    if all(key.endswith(f".{word}") for key in keys_called(word)):
        return pages  # other trainers call the same keys so
    return [*pages, *_rows_of_trainers(word)]


def _of_metric(word: str) -> list[Page]:
    """Return the page on a metric whose name has a part that varies, such as pass@8."""
    metric = metric_named(word) or declared_as(
        word, (*OF_TRACKERS, *METRICS["metrics of evaluations"])
    )
    return [] if metric is None else [_page("metric", f"{word}: a metric", _parts_of(metric))]


def _in_sentence(words: str) -> list[Page]:
    """Return the pages on the keys, options and metrics that a sentence names."""
    if " " not in words.strip():
        return []
    names: list[str] = []
    for part in re.findall(r"[\w./@=]+", words):
        part = part.strip(".")
        names += [part, part.partition("=")[0]]
    # Only what has the form of a name, as `loss=gspo` and `kl_ref` do, and `none` does not.
    names = [name for name in dict.fromkeys(names) if re.search("[=._]", name)]
    return [page for name in names for page in explanations().get(name, ())]


def _in_other_trainers(words: str) -> list[Page]:
    rows = _rows_of_trainers(words)
    return [*rows, *_rows_with(words)] if rows else []


def _in_tables(words: str) -> list[Page]:
    """Return the rows of tables with the words, first those with a cell that holds nothing else."""
    return sorted(_rows_with(words), key=lambda page: f": `{words}`\n" not in page.text)


def _in_other_pages(words: str) -> list[Page]:
    """Return a page with the titles of the pages in which the words are mentioned."""
    pattern = re.compile(rf"\b{re.escape(words)}", re.I)
    titles = {
        page.title: None
        for pages in explanations().values()
        for page in pages
        if page.kind != "group" and pattern.search(page.text)
    }
    if not titles:
        return []
    title = f"{words}: a word in what is said of others"
    lines = [f"{words}: a word in what `pgtk explain` says of", *titles]
    return [Page("mentions", title, {"others": ", ".join(titles)}, "\n  ".join(lines))]


@functools.cache
def explanations() -> dict[str, list[Page]]:
    """Return every word that can be explained -> its pages, one for each thing it stands for."""
    pages: dict[str, list[Page]] = {}
    for source in (_words, _groups_and_options, _keys, _metrics, _line_of_step, _exit_statuses):
        for words, page in source():
            for word in dict.fromkeys(words):
                pages.setdefault(word, []).append(page)
    return pages


def _words() -> Explained:
    """Yield the words in italics of docs/losses.md, each with the sentence that defines it."""
    section = docs_page("losses.md").partition("\n## Words\n")[2].partition("\n## ")[0]
    for sentence in re.split(r"(?<=[.:]) ", " ".join(section.split())):
        for word in re.findall(r"(?<!\*)\*([\w -]+)\*", sentence):
            title = f"{word}: a word of these pages"
            yield [word, f"{word}s"], _page("word", title, {"": sentence.replace("*", "")})


def _groups_and_options() -> Explained:
    for group, names in options().items():
        default = default_options().get(group)
        keys = [entry for entry in entries() if entry.key.group == group and not entry.key.option]
        parts = {}
        for name in names:
            setting = f"{group}={name} (default)" if name == default else f"{group}={name}"
            parts[setting] = option_help(group, name)
        if group in OWN_CODE:
            kind = kind_of(group)
            parts[f"{group}=package.module.{kind}"] = f"A {kind} of your own, see docs/losses.md."
        parts["keys"] = _names(keys)
        yield [group], _page("group", f"{group}: a group of options", parts)
        for name in names:
            keys_of_option = [entry for entry in keys if name in entry.defaults]
            parts = {"": option_help(group, name), **_row_of_option(group, name)}
            parts["keys"] = _names(keys_of_option)
            title = f"{group}={name}: an option"
            yield [f"{group}={name}", name], _page("option", title, parts)


def _names(keys: list[Entry]) -> str:
    return ", ".join(dict.fromkeys(entry.key.name for entry in keys))


def _row_of_option(group: str, name: str) -> dict[str, str]:
    """Return the row of an option in docs/losses.md, whose tables name the group in their first
    head: its formula, and what others call it."""
    cells = {}
    for heads, row in table_rows("losses.md"):
        if (heads[0], row[0]) == (f"`{group}=`", f"`{name}`"):
            cells |= {
                head: cell for head, cell in zip(heads[1:], row[1:], strict=False) if len(cell) > 1
            }
    return cells


def _keys() -> Explained:
    for entry in entries():
        key = entry.key
        words = [] if key.option else [key.name, key.leaf, *map(str, key.names)]
        of_options = f" of {key.group}={entry.options}" if entry.options else ""
        yield words, _page("key", f"{key.name}: a key{of_options}", entry.description())


def _metrics() -> Explained:
    for metrics in METRICS.values():
        for metric in metrics:
            yield [metric.name], _page("metric", f"{metric.name}: a metric", _parts_of(metric))


def _parts_of(metric: Metric) -> dict[str, str]:
    return {
        "": metric.help,
        "formula": metric.formula,
        "over": metric.over,
        "measured": metric.measured(),
        "healthy": metric.healthy_in_words(),
        "see": f"docs/{metric.see}" if metric.see else "",
    }


def _line_of_step() -> Explained:
    """Yield the words on a step's printed line, and the metrics that they show."""
    for word, name, meaning in shown_as():
        metric = declared_as(name, OF_STEPS)
        title = f"{word}: on the line that a run prints for each step"
        yield [word], _page("line", title, {"": name or meaning})
        if metric is not None and name != word:
            yield [word], _page("metric", f"{name}: a metric", _parts_of(metric))


def _exit_statuses() -> Explained:
    for status in ExitStatus:
        title = f"exit status {status}: {status.name.replace('_', ' ')}"
        parts = {"": status.meaning, "in a script": status.in_a_script}
        yield [str(status)], _page("exit status", title, parts)


def _rows_with(word: str) -> Iterator[Page]:
    """Yield the rows that have a word in code in a cell or a head: a key of another trainer, such
    as beta, or a column of a file."""
    pattern = re.compile(rf"\b{re.escape(word)}\b")
    for page in ("losses.md", "adapters.md", "data.md"):
        for heads, row in table_rows(page):
            if any(pattern.search(code) for code in _code(" ".join(heads + row))):
                cells = zip(heads, row, strict=False)
                parts = {head or "here": cell for head, cell in cells if cell}
                yield _page("row", f"{word}: see docs/{page}", parts)


def _rows_of_trainers(word: str) -> list[Page]:
    """Return a page for each row on keys of other trainers that have this name."""
    pages = []
    for name, row in known_as(word):
        here = "there is none" if row.here == NONE else row.here
        parts = {"default there": text(row.default), "here": here, "": row.remark}
        title = f"{name}: a key of {row.trainer}, see docs/trl_and_verl.md"
        pages.append(_page("row", title, parts))
    return pages


def _code(cell: str) -> list[str]:
    """Return the texts between backticks."""
    return re.findall(r"`([^`]+)`", cell)
