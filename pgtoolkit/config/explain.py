"""`pgtk explain WORD`: what a key, an option, a metric, a command or any other word of pgtoolkit's
means."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec

from pgtoolkit.config.explained import Page, explanations, page_on_metric
from pgtoolkit.config.field_words import FIELD_WORDS
from pgtoolkit.config.keys import KEYS, OWN_CODE, is_inside
from pgtoolkit.config.meant_keys import OPTIONS_ALSO_CALLED
from pgtoolkit.config.own_code import PARAMETERS
from pgtoolkit.config.trainer_keys import (
    NONE,
    Theirs,
    keys_called,
    keys_in_section,
    known_as,
    rows_with_value,
    tables,
    words_used,
)
from pgtoolkit.errors import ConfigError
from pgtoolkit.losses.family import Family
from pgtoolkit.losses.function import NEW, FunctionLoss
from pgtoolkit.runs.declared_metrics import OF_EVALUATIONS, OF_TRACKERS, metric_named
from pgtoolkit.runs.metric import declared_as
from pgtoolkit.system.functions import import_function, is_dotted_path, lacked
from pgtoolkit.system.report import nearest, refusal, text
from pgtoolkit.tasks.signatures import OF_A_BATCH, OF_VERL, SINGLE

Known = Mapping[str, list[Page]]
"""Every word that can be explained -> its pages."""

_MOST_PAGES = 6
"""A word that stands for more things is answered by a list of them."""

_MOST_MENTIONS = 20
"""Of the pages that only mention a word, at most this number is named."""


def explain(words: str, commands: Known | None = None) -> str:
    """Return the pages on a word, as text; on a sentence, such as a note or a refusal, those on the
    words in it that are known.

    commands: pages on the commands and their flags, which are declared above this room.
    Raises ConfigError for a word about which nothing is written; it names the nearest one.
    """
    pages = pages_on(words, commands)
    if len(pages) <= _MOST_PAGES or " " in words:
        return "\n\n".join(page.text for page in pages)
    lines = [f"{words} may be", *(f"  {_in_a_line(page)}" for page in pages)]
    names = [re.split(": | is ", page.title)[0] for page in pages]
    other = next((name for name in names if name != words), words)
    return "\n".join([*lines, f"pgtk explain {other} says more of one."])


def explain_as_json(words: str, commands: Known | None = None) -> str:
    """Return the same pages as JSON: the title of each, and its parts by their names."""
    pages = []
    for page in pages_on(words, commands):
        parts = {name or "meaning": content for name, content in page.parts.items() if content}
        pages.append({"title": page.title} | parts)
    return json.dumps({"words": words, "pages": pages}, indent=1, ensure_ascii=False)


def pages_on(words: str, commands: Known | None = None) -> list[Page]:
    """Return the pages that `explain` prints: those of the first way to look the words up that
    finds any."""
    known = {word: list(pages) for word, pages in explanations().items()}
    for word, pages in (commands or {}).items():
        known.setdefault(word, []).extend(pages)
    for look_up in (
        _chosen_code,
        _metric_of_trl,
        _set_value,
        _known,
        _of_trainers,
        _in_sentence,
        _own_code,
        _mentioned,
    ):
        pages = look_up(words, known)
        if pages:
            by_title = {page.title: page for page in pages}
            # The critic's keys repeat those of others, which are likelier meant.
            return sorted(by_title.values(), key=lambda page: page.title.startswith("critic."))
    near = nearest(words, known, 0.85)
    first = words.partition("_")[0]
    if near is None and first != words and first in known:
        near = first  # clip_fraction is nearer to top_fraction than to what it means
    apart = " ".join(re.findall(r"[^\s_-]+", words))
    mentioned = _mentioned(apart, known) if near is None and apart not in ("", words) else []
    if mentioned:
        return mentioned
    near = near or nearest(words, known, 0.75)
    raise ConfigError(
        refusal(
            setting=f"pgtk explain {words}",
            needs="a word that is known",
            got=words,
            reason="It is no key, group, option, metric, command or exit status of pgtoolkit's; "
            "a metric or a parameter of your own code stands in that code: pgtk explain "
            "MODULE.FUNCTION, of your loss, has its names.",
            use=f"pgtk explain {near}" if near else "pgtk --help, or docs/keys.md",
        )
    )


def _known(words: str, known: Known) -> list[Page]:
    """Return the pages on a word in the first of its spellings that is known, and what other
    trainers call so."""
    for word in dict.fromkeys(_spellings(words)):
        pages = [*known.get(OPTIONS_ALSO_CALLED.get(word, ""), ()), *known.get(word, ())]
        pages = pages or _varied(word, known)
        is_ours = any(page.kind != "row" for page in pages)
        # Other trainers may call the same keys so, or no longer have one of this name.
        is_another = not all(key.endswith(f".{word}") for key in keys_called(word))
        if not is_ours or is_another or any(row.gone_in for _, row in known_as(word)):
            pages += _rows_of_trainers(word)
        pages += _meant(word, known)
        if pages:
            return pages
    return []


def _in_a_line(page: Page) -> str:
    """Return the title of a page, with its text where that is a short one."""
    content = page.parts.get("", "")
    is_short = page.kind == "row" and set(page.parts) == {""} and len(content) <= 100
    return f"{page.title}: {content}" if is_short else page.title


def _metric_of_trl(words: str, known: Known) -> list[Page]:
    """Return a page on a metric that TRL logs, and those on ours that it names."""
    metrics = tables()["TRL"].content["metrics"]
    name = words.strip().removeprefix("train/")
    here = metrics.get(name) or metrics.get(f"completions/{name}")
    if here is None:
        return []
    ours = [page for word in re.findall("`(\\w+)`", here) for page in known.get(word, ())]
    page = Page("row", f"{name}: a metric of TRL", {"here": here})
    return [page, *(page for page in ours if page.kind == "metric")]


def _set_value(words: str, _known: Known) -> list[Page]:
    """Return the pages on a value that is typed with the name of another trainer's key."""
    name, _, value = words.strip().partition("=")
    return _on_value(value, name)


def _on_value(value: str, name: str) -> list[Page]:
    """Return a page for each key of other trainers that has this value. name: the key's end."""
    return [
        Page("row", f"{value}: a value of {row.trainer}'s {row.name}", {"here": here})
        for row, here in rows_with_value(value)
        if not name or f".{row.name}".endswith(f".{name}")
    ]


def _of_trainers(words: str, _known: Known) -> list[Page]:
    """Return a page for each key of other trainers that has this value, and for sections of their
    keys."""
    pages = _on_value(words.strip(), "")
    for trainer, names in keys_in_section(words.strip()).items():
        parts = {"keys": ", ".join(names), "": "`pgtk explain KEY` says what one of them is here"}
        pages.append(Page("row", f"{words.strip()}: a section of keys of {trainer}", parts))
    return pages


def _meant(word: str, known: Known) -> list[Page]:
    """Return the pages on the keys and groups that the field calls so."""
    pages = []
    for name in FIELD_WORDS.get(word, ()):
        meant = [page for page in known[name] if page.kind in ("key", "group", "word")]
        pages += sorted(meant, key=lambda page: page.kind == "word")[:1]
    return pages


def _spellings(words: str) -> Iterator[str]:
    """Yield the ways in which a word may be written here, the likeliest first."""
    word = words.strip().removeprefix("pgtk ")
    for spelling in (word, word.replace(" ", "-"), word.replace("-", "_"), word.replace(" ", "_")):
        for form in (spelling, spelling.partition("=")[0]):
            yield form
            yield form.lower()


def _varied(word: str, known: Known) -> list[Page]:
    """Return the pages on a name with a part that varies: a metric such as pass@8, an entry of a
    dictionary, or a parameter of own code."""
    if f"--{word}" in known:
        return known[f"--{word}"]
    here = re.sub(r"\bpass_at_(?=\d)", "pass@", word)  # as MLflow, which takes no @, has it
    metric = metric_named(here) or declared_as(here, (*OF_EVALUATIONS, *OF_TRACKERS))
    if metric is not None:
        return [page_on_metric(word, metric)]
    for key in KEYS:
        if key.free and is_inside(word, key.name):
            inner = word.removeprefix(f"{key.name}.").partition(".")[2]
            return [*known[key.name], *(known.get(f"task.{inner}", []) if inner else [])]
    file = re.fullmatch(r"(?:conf/)?(\w+)/([\w.-]+)\.yaml", word)
    if file is not None:
        return known.get(f"{file[1]}={file[2]}") or known.get(file[2]) or known.get(file[1]) or []
    if known.get(word.partition("/")[0], [])[:1] and "/" in word:
        return [page for page in known[word.partition("/")[0]] if "file" in page.title]
    for settings in ("hydra.launcher", "hydra.sweeper"):
        if is_inside(word, settings):
            return known[settings]
    group, _, leaf = word.partition(".")
    is_like_ours = nearest(word, [key.name for key in KEYS if key.group == group], 0.8)
    is_name = all(part.isidentifier() for part in leaf.split("."))
    if group in PARAMETERS and is_name and not is_like_ours:
        title = f"{word}: a parameter of code of your own, if that has one of this name"
        here = {"": f"`pgtk explain MODULE.NAME`, of your {group}, says what it means"}
        return [Page("row", title, here), *known[PARAMETERS[group]]]
    return []


def _in_sentence(words: str, known: Known) -> list[Page]:
    """Return the pages on the commands, flags, keys, options and metrics that a sentence names."""
    if " " not in words.strip():
        return []
    names: list[str] = re.findall(r"^pgtk (\w+)", words)
    for part in re.findall(r"[\w./@=-]+", words):
        part = part.strip(".")
        # Only what has the form of a name, as `loss=gspo` and `kl_ref` do, and `none` does not.
        names += [name for name in (part, part.partition("=")[0]) if re.search("^-|[=._]", name)]
    return [page for name in dict.fromkeys(names) for page in known.get(name, ())]


def _rows_of_trainers(word: str) -> list[Page]:
    """Return a page for each row on keys of other trainers that have this name, and for each row
    that they refer to."""
    pages = []
    for _, row in known_as(word):
        rows = [row, *(other for _, other in known_as(row.see, row.trainer) if row.see)]
        pages += map(_page_on_theirs, rows)
    return pages


def _page_on_theirs(row: Theirs) -> Page:
    here = "there is none" if row.here == NONE else row.here
    parts = {"default there": text(row.default), "here": here, "": row.remark}
    parts["where"] = words_used(row)
    # No colon behind the name: what follows `hub_token:` would be hidden as a secret.
    return Page("row", f"{row.name} is {row.kind}; see docs/trl_and_verl_keys.md", parts)


def _chosen_code(words: str, known: Known) -> list[Page]:
    """Return the page on code of the user's that an override chooses, and that on its key."""
    name, _, path = words.partition("=")
    names_code = name in OWN_CODE or any(
        key.name == name and key.code == "function" for key in KEYS
    )
    pages = _own_code(path, known) if names_code else []
    return [*pages, *known[name]] if pages else []


def _own_code(words: str, _known: Known) -> list[Page]:
    """Return the page on a class or a function by its dotted path: of the user's, or of
    pgtoolkit's, whose public names may stand alone."""
    if words in import_module("pgtoolkit").__all__:
        words = f"pgtoolkit.{words}"
    if not is_dotted_path(words):
        return []
    top = words.partition(".")[0]
    if top in sys.stdlib_module_names:
        return []
    if find_spec(top) is None and PathFinder.find_spec(top, [os.getcwd()]) is None:
        return []
    try:
        code = import_function("pgtk explain", words, None)
    except ConfigError as error:
        pages = _setting_of(words)
        if pages:
            return pages
        raise ConfigError(str(error).replace("pgtk explain=", "pgtk explain ")) from error
    parts = {
        "": (inspect.getdoc(code) or "").partition("\n\n")[0],
        "parameters": "; ".join(_parameters(code)),
        "metrics": "; ".join(_own_metrics(code)),
        "use": _use(code, words),
    }
    kind = "class" if isinstance(code, type) else "function"
    return [Page("code", f"{words}: a {kind}", parts)]


def _setting_of(words: str) -> list[Page]:
    """Return the page on `module.Class.setting`, a parameter of a class or of a function; [] for
    anything else."""
    path, _, name = words.rpartition(".")
    if not is_dotted_path(path):
        return []
    try:
        code = import_function("pgtk explain", path, None)
    except ConfigError:
        return []
    if name not in _signature(code):
        return []
    kind = "class" if isinstance(code, type) else "function"
    (meaning,) = [each for each in _parameters(code) if re.match(rf"{name}\b", each)]
    return [Page("code", f"{words}: a parameter of the {kind} {path}", {"": meaning})]


def _parameters(code: Callable) -> Iterator[str]:
    """Yield each parameter with its default, and its meaning where it is declared, or in a line
    `NAME: meaning` of the docstring."""
    parameters = _signature(code)
    meanings = {name: _meaning(code, name) for name in parameters}
    if is_dataclass(code):
        helps = {field.name: field.metadata.get("help") for field in fields(code)}
        meanings |= {name: help for name, help in helps.items() if help}
    for name, parameter in parameters.items():
        has_default = parameter.default is not parameter.empty
        default = f"={text(parameter.default)}" if has_default else ""
        meaning = f" ({meanings[name]})" if meanings.get(name) else ""
        yield f"{name}{default}{meaning}"


def _own_metrics(code: Callable) -> Iterator[str]:
    """Yield the metrics that a loss function returns for made-up tokens.

    A line `NAME: meaning` of the function's docstring is added in brackets.
    """
    if isinstance(code, type) or not {*NEW} & _signature(code).keys():
        return

    from pgtoolkit.losses.trial import measured_by  # which loads torch, as a loss does

    try:
        _, names = measured_by(FunctionLoss(code))
    except Exception:  # raised by the user's code; a check of the loss reports it
        return
    for name in names:
        meaning = _meaning(code, name)
        yield f"{name} ({meaning})" if meaning else name


def _meaning(code: Callable, name: str) -> str:
    """Return what a line `NAME: meaning` of the code's docstring says; empty without one."""
    meaning = re.search(rf"^\s*{re.escape(name)}: *(.+)$", inspect.getdoc(code) or "", re.M)
    return meaning[1].rstrip(".") if meaning else ""


def _signature(code: Callable) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(code).parameters
    except ValueError:  # some functions written in C have no signature
        return {}


def _use(code: Callable, path: str) -> str:
    """Return what to type for code of one's own, by its kind; empty if that cannot be told."""
    names = _signature(code)
    if isinstance(code, type):
        if issubclass(code, Family):
            return " ".join([f"loss={path}", *(f"loss.{name}=X" for name in lacked(code))])
        if hasattr(code, "reply") and hasattr(code, "score"):
            return f"task=conversation task.environment={path}"
        if hasattr(code, "on_train_batch_end") or hasattr(code, "log_metrics"):
            return f"callbacks.NAME.path={path}"
        return ""
    if {"log_ratio", "log_probs"} & names.keys():
        return f"loss={path}"
    if {"totals", "tokens_per_document"} <= names.keys():
        return f"aggregation={path}"
    if "rewards" in names:
        return f"advantage={path}"
    is_verifier = {*SINGLE, *OF_A_BATCH, *OF_VERL} & names.keys()
    return f"task.verifier={path}" if is_verifier else ""


def _mentioned(words: str, known: Known) -> list[Page]:
    """Return the pages in which the words are mentioned, or a list of them if they are many."""
    pattern = re.compile(rf"(?<!\w){re.escape(words)}", re.I)
    pages = {
        page.title: page
        for pages in known.values()
        for page in pages
        if page.kind != "group" and pattern.search(page.text)
    }
    if len(pages) <= 2:
        return [*pages.values()]
    title = f"{words}: a word in what `pgtk explain` says of"
    listed = "; ".join([*pages][:_MOST_MENTIONS])
    more = f"; and {len(pages) - _MOST_MENTIONS} more" if len(pages) > _MOST_MENTIONS else ""
    return [Page("mentions", title, {"": listed + more})]
