"""`pgtk explain WORD`: what a key, a group, an option, a metric or an exit status means. Every text stands elsewhere:
in the schema, above the keys in conf/, in the families, in the errors, and in the tables of docs/."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterator

from pgtoolkit.config import key_reference
from pgtoolkit.config.files import config_directory, default_options, docs_page, options
from pgtoolkit.config.override_problems import ALSO_CALLED, nearest
from pgtoolkit.config.plan import ADVANTAGES
from pgtoolkit.errors import ConfigError, PgtoolkitError
from pgtoolkit.losses.aggregation import AGGREGATIONS
from pgtoolkit.losses.corrections import CORRECTIONS
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.losses.kl import KINDS, KL
from pgtoolkit.system.report import refusal

_STATUSES = {
    0: "Done.",
    1: "An error of pgtoolkit's own, with a traceback; of a sweep, that a job has failed.",
    130: "Stopped by a keyboard interrupt.",
    141: "What read the output, such as head, had seen enough.",
}


def explain(text: str) -> str:
    """The page for a word; for a sentence, such as a note or a refusal, of the words in it that are known.

    Raises ConfigError for a word that nothing is known of, with the nearest.
    """
    known = explanations()
    word = ALSO_CALLED.get(text.lower(), text).removeprefix("pgtk ")
    if found := known.get(word) or known.get(word.partition("=")[0] if "." in word else ""):
        return "\n\n".join(found)
    inside = [one.strip(".") for one in re.findall(r"[\w./@=]+", text)] if " " in text.strip() else []
    words = dict.fromkeys(name for one in inside for name in (one, one.partition("=")[0]) if _is_a_name(name, known))
    if words:
        return "\n\n".join(page for name in words for page in known[name])
    if rows := list(_rows_with(text)):
        return "\n\n".join(rows)
    near = nearest(text, known)
    reason = "It is no key, group, option, metric or exit status."
    use = f"pgtk explain {near}" if near else "pgtk --help, or docs/keys.md"
    raise ConfigError(refusal(f"pgtk explain {text}", "a word that is known", text, reason, use))


def _is_a_name(word: str, known: dict[str, list[str]]) -> bool:
    """Whether a word within a sentence stands for something: `loss=gspo`, `rollout.lag`, `kl_ref`, and not `none`."""
    return word in known and re.search("[=._]", word) is not None


@functools.cache
def explanations() -> dict[str, list[str]]:
    """Every word that can be explained -> its pages, one for each thing that it stands for."""
    pages: dict[str, list[str]] = {}
    for entry in key_reference.entries():
        names = (entry.key.name,) if entry.key.option else (entry.key.name, entry.key.leaf)
        for name in dict.fromkeys(names):
            pages.setdefault(name, []).append(_key(entry))
    for group, names in options().items():
        pages.setdefault(group, []).insert(0, _group(group, names))
        for name in names:
            for word in (f"{group}={name}", name):
                pages.setdefault(word, []).append(_option(group, name))
    for heads, row in [*_table("metrics.md"), *_table("evaluation.md")]:
        for name in re.findall(r"`([^`]+)`", row[0]) if heads[0] in ("name", "number") else ():
            pages.setdefault(name, []).append(_page(f"{name}: a metric", dict(zip(heads[1:], row[1:], strict=False))))
    for status, says in _statuses():
        pages[str(status)] = [_page(f"exit status {status}", {"": says})]
    return pages


def _key(entry: key_reference.Entry) -> str:
    of = f" of {entry.key.group}={', '.join(entry.options)}" if entry.options else ""
    shown = {"": entry.says, "type": entry.type, "default": entry.default, "rules": " ".join(entry.conditions)}
    return _page(f"{entry.name}: a key{of}", shown)


def _group(group: str, names: list[str]) -> str:
    """Its options with the beginning of what each is, and its keys."""
    usual = default_options().get(group)
    shown = {f"{group}={name}{' (default)' if name == usual else ''}": _head(group, name) for name in names}
    keys = [entry.name for entry in key_reference.entries() if entry.key.group == group and not entry.key.option]
    return _page(f"{group}: a group of options", shown | {"keys": ", ".join(dict.fromkeys(keys))})


def _option(group: str, name: str) -> str:
    shown = {"": _head(group, name)}
    if group == "loss" and name in FAMILIES:
        family = FAMILIES[name]()
        shown |= {"loss": f"l_t = {family.equation}"}
    elif group == "aggregation":
        shown |= {"weight": f"w_t = {AGGREGATIONS[name].equation}"}
    elif group == "correction" and name in CORRECTIONS:
        shown |= {"factor": f"rho_t = {CORRECTIONS[name]().equation}"}
    elif group == "kl" and name in KINDS:
        shown |= {"penalty": KL(name, 1.0).equation}
    elif group == "advantage":
        shown |= {"advantage": ADVANTAGES[name]}
    for heads, row in _table("losses.md"):
        if row[0] == f"`{name}`" and group == _group_of_table(heads):
            cells = zip(heads, row, strict=False)
            shown |= {head: cell for head, cell in cells if head in _ELSEWHERE and len(cell) > 1}
    paper = re.search(rf"pgtk {group}={name}\n.*?\n```\n(.*?)(?=\n#|\Z)", docs_page("papers.md"), re.DOTALL)
    for line in re.findall(r"^\* (.*?)(?=\n\*|\Z)", paper[1].strip() if paper else "", re.DOTALL | re.MULTILINE):
        shown[line.partition(": ")[0]] = line.partition(": ")[2]
    having = [one for one in key_reference.entries() if one.key.group == group and name in [*one.defaults]]
    shown["keys"] = ", ".join(dict.fromkeys(one.name for one in having if not one.key.option))
    return _page(f"{group}={name}: an option", shown)


_ELSEWHERE = ("paper", "source", "the same as", "TRL", "TRL `loss_type`", "verl `loss_agg_mode`", "verl `loss_mode`")
_ELSEWHERE += ("the others", "where")
"""Columns of docs/losses.md that say where an option comes from and what others call it."""


def _group_of_table(heads: list[str]) -> str:
    """The group whose options a table of docs/losses.md has in its first column."""
    return heads[0].strip("`=") or ("loss" if "paper" in heads else "advantage")


def _head(group: str, name: str) -> str:
    """The comment at the top of an option's file, without the command that it may begin with."""
    lines = (config_directory() / group / f"{name}.yaml").read_text().splitlines()
    lines = lines[: next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))]
    said = [line.lstrip("# ") for line in lines]
    return " ".join(line for line in said if not line.startswith(("@package", "pgtk ")))


def _statuses() -> Iterator[tuple[int, str]]:
    """Each exit status with what it means."""
    said = dict(_STATUSES)
    for kind in PgtoolkitError.__subclasses__():
        text = " ".join(kind.__doc__.split("\n\n")[0].split())
        said[kind.exit_status] = f"{said[kind.exit_status]} {text}" if kind.exit_status in said else text
    yield from sorted(said.items())


def _table(page: str) -> Iterator[tuple[list[str], list[str]]]:
    """(heads, cells) of every row of the tables in a page of docs/."""
    heads, before = None, ""
    for line in docs_page(page).splitlines():
        if re.fullmatch(r"\|[-|]+\|", line):
            heads = _cells(before)
        elif line.startswith("|") and heads is not None:
            yield heads, _cells(line)
        elif not line.startswith("|"):
            heads = None
        before = line


def _cells(line: str) -> list[str]:
    return [re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", cell).strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _rows_with(word: str) -> Iterator[str]:
    """The rows in which a word of another trainer stands, such as verl's clip_ratio_high."""
    for page in ("losses.md", "adapters.md"):
        for heads, row in _table(page):
            if any(re.search(rf"`[^`]*\b{re.escape(word)}\b[^`]*`", cell) for cell in row):
                shown = {head or "here": cell for head, cell in zip(heads, row, strict=False) if cell}
                yield _page(f"{word}: of another trainer, see docs/{page}", shown)


def _page(title: str, shown: dict[str, str]) -> str:
    lines = [title]
    for head, says in shown.items():
        if says:
            start = f"  {head.replace('`', '')}: " if head else "  "
            says = " ".join(says.replace("\\|", "|").split())
            lines += textwrap.wrap(says, 116, initial_indent=start, subsequent_indent="    ")
    return "\n".join(lines)
