"""The words that `pgtk explain` knows, each with its pages: every one is declared elsewhere."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pgtoolkit.config.entries import Entry, entries
from pgtoolkit.config.files import (
    config_directory,
    leading_comment,
    option_file,
    options,
    own_folder,
    read_options,
    sweep_files,
)
from pgtoolkit.config.hydra_keys import INSTEAD
from pgtoolkit.config.keys import OWN_CODE, option_help
from pgtoolkit.config.option_tables import option_tables, rows_on
from pgtoolkit.config.schema import OPTIONS, default_options
from pgtoolkit.config.trainer_keys import NONE
from pgtoolkit.config.words import KINDS
from pgtoolkit.errors import ExitStatus
from pgtoolkit.runs.declared_metrics import OF_STEPS
from pgtoolkit.runs.declared_metrics import TABLES as METRICS
from pgtoolkit.runs.loss_metrics import OVER_ALL_DOCUMENTS
from pgtoolkit.runs.metric import Metric, declared_as
from pgtoolkit.runs.records import leaves
from pgtoolkit.system.functions import kind_of
from pgtoolkit.system.report import text
from pgtoolkit.tracking.progress import shown_as


@dataclass(frozen=True)
class Page:
    """The page on one thing that a word stands for.

    kind: "key", "group", "option", "metric", "line" (of a step), "exit status", "word", "command",
        "flag", "sweep", "code" (of the user's), "row" (of a table), or "mentions".
    parts: what is written about it, by name; "" for a part without one.
    """

    kind: str
    title: str
    parts: dict[str, str]

    @functools.cached_property
    def text(self) -> str:
        """The printed page."""
        lines = [self.title]
        for name, content in self.parts.items():
            if content:
                start = f"  {name.replace('`', '')}: " if name else "  "
                line = " ".join(content.split())
                lines += textwrap.wrap(line, 116, initial_indent=start, subsequent_indent="    ")
        return "\n".join(lines)


Explained = Iterator[tuple[list[str], Page]]
"""Pages, each with the words that it explains."""


def explanations() -> dict[str, list[Page]]:
    """Return every word that can be explained -> its pages, one for each thing it stands for."""
    return _explanations(own_folder())


@functools.cache
def _explanations(_folder: Path | None) -> dict[str, list[Page]]:
    pages: dict[str, list[Page]] = {}
    for source in (
        _words,
        _groups_and_options,
        _keys,
        _metrics,
        _line_of_step,
        _exit_statuses,
        _sweeps,
        _settings_of_hydra,
        _names_elsewhere,
    ):
        for words, page in source():
            for word in dict.fromkeys(words):
                pages.setdefault(word, []).append(page)
    return pages


def _words() -> Explained:
    for kind, words in KINDS.items():
        for word in words:
            parts = {
                "": word.help,
                "type": word.type,
                "see": f"docs/{word.see}" if word.see else "",
            }
            yield (
                [word.name, f"{word.name}s", word.name.lower(), *word.symbols],
                Page("word", f"{word.name}, {kind}", parts),
            )


def _page_of_docs(see: str) -> str:
    return f"docs/{see}" if see else ""


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
        yield [group], Page("group", f"{group}: a group of options", parts)
        for name in names:
            keys_of_option = [entry for entry in keys if name in entry.defaults]
            parts = {"": option_help(group, name), **dict(rows_on(group, name))}
            parts["keys"] = _names(keys_of_option)
            parts["sets"] = (
                "" if name in OPTIONS.get(group, {}) else _set_by(option_file(group, name))
            )
            title = f"{group}={name}: an option"
            yield [f"{group}={name}", name], Page("option", title, parts)


def _names(keys: list[Entry]) -> str:
    return ", ".join(dict.fromkeys(entry.key.name for entry in keys))


def _set_by(file: Path) -> str:
    """Return what an experiment, or an option of the user's own, sets."""
    content = read_options(file)
    if not isinstance(content, dict):
        return ""
    settings = []
    for entry in content.pop("defaults", None) or []:
        if isinstance(entry, dict):
            settings += [f"{re.sub('.*/', '', group)}={name}" for group, name in entry.items()]
    settings += [f"{key}={text(value)}" for key, value in leaves(content)]
    return " ".join(settings)


def _keys() -> Explained:
    for entry in entries():
        key = entry.key
        words = [] if key.option else [key.name, key.leaf, *map(str, key.names)]
        of_options = f" of {key.group}={entry.options}" if entry.options else ""
        yield words, Page("key", f"{key.name}: a key{of_options}", entry.description())


def _metrics() -> Explained:
    for metrics in METRICS.values():
        for metric in metrics:
            yield [metric.name], page_on_metric(metric.name, metric)


def page_on_metric(name: str, metric: Metric) -> Page:
    """Return the page on a metric. name: the written one, where a part of it varies."""
    over = metric.over
    if metric.name in OVER_ALL_DOCUMENTS:
        over += (
            "; one without a trained token counts as 0. With num_empty_documents > 0 the mean over "
            "the others is the number times num_documents / (num_documents - num_empty_documents)"
        )
    parts = {
        "": metric.help,
        "formula": metric.formula,
        "over": over,
        "measured": metric.measured(),
        "healthy": metric.healthy_in_words(),
        "see": _page_of_docs(metric.see),
    }
    return Page("metric", f"{name}: a metric", parts)


def _line_of_step() -> Explained:
    """Yield the words on a step's printed line, and the metrics that they show."""
    for word, name, meaning in shown_as():
        metric = declared_as(name, OF_STEPS)
        title = f"{word}: on the line that a run prints for each step"
        yield [word], Page("line", title, {"": name or meaning})
        if metric is not None and name != word:
            yield [word], page_on_metric(name, metric)


def _exit_statuses() -> Explained:
    for status in ExitStatus:
        title = f"exit status {status}: {status.name.replace('_', ' ')}"
        parts = {"": status.meaning, "in a script": status.in_a_script}
        yield [str(status), f"exit status {status}"], Page("exit status", title, parts)


def _sweeps() -> Explained:
    for name, file in sweep_files().items():
        yield [name], Page("sweep", f"{name}: a sweep", {"": leading_comment(file)})


def _settings_of_hydra() -> Explained:
    """Yield the options of Hydra's groups with their keys, and what other keys of Hydra's say."""
    for file in sorted(config_directory().glob("hydra/*/*.yaml")):
        group = f"hydra/{file.parent.name}"
        option = f"{group}={file.stem}"
        page = Page("option", f"{option}: an option of Hydra's", {"": leading_comment(file)})
        yield [option, file.stem, group], page
        for name, meaning in _commented_keys(file):
            key = f"hydra.{file.parent.name}.{name}"
            yield [key, name], Page("key", f"{key}: a key of {option}", {"": meaning})
    for key, (reason, use) in INSTEAD.items():
        parts = {"": f"It does nothing here. {reason}", "use": use}
        yield [key], Page("key", f"{key}: a key of Hydra's", parts)


def _commented_keys(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, the comment above it) of an option's file."""
    sections: list[str] = []
    comment = ""
    for line in file.read_text(encoding="utf-8").partition("\n\n")[2].splitlines():
        content = line.lstrip()
        if content.startswith("#"):
            comment = " ".join([comment, content.lstrip("# ")]).strip()
        name, colon, _ = content.partition(":")
        if colon and name.isidentifier():
            del sections[(len(line) - len(content)) // 2 :]
            sections.append(name)
            if comment and name != "defaults":
                yield ".".join(sections), comment
            comment = ""


def _names_elsewhere() -> Explained:
    """Yield the words of other trainers that the tables on options have in code."""
    ours = {name for group, names in options().items() if group != "experiment" for name in names}
    for table in option_tables().values():
        for settings, cells in table.rows:
            for head, cell in zip(table.heads, cells, strict=True):
                codes = re.findall(r"`([^`]+)`", f"{head} {cell}")
                words = {part for code in codes for part in (code, code.partition("=")[0])}
                title = f"{table.group}={' '.join(settings)}: {head.replace('`', '')}"
                if cell and cell != NONE:
                    yield sorted(words - ours), Page("row", title, {"": cell})
