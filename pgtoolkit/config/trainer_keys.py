"""Reads from the tables trl.yaml and verl.yaml what the keys of TRL and verl are here."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.system.report import nearest, text

NONE = "–"  # noqa: RUF001
"""What stands in a table for a key without an equal."""

_OVERRIDE_WITH_VALUE = re.compile(r"[\w.]+=[^\s{]+(?= |$)")

OVERRIDE = re.compile(r"([\w.]+)(?:=((?:\{[^}]*\}|[^\s{])*))?")


@dataclass(frozen=True)
class Theirs:
    """A key of another trainer, as trl.yaml explains it.

    cases: (condition, what to type here, or that by their value), of which the first that fits
    counts. reasons: condition -> why there is no equal; all that fit are said. default: None, too,
    for a section whose keys have no row of their own. learns: whether what is learned depends on
    it although no key of ours is typed for it. differs: condition -> what is not quite the same.
    apart: condition -> a difference that changes what is learned. gone_in: the version of the
    table if that lacks the key, which earlier ones have. unread: why it matters that a value is not
    known before their program runs.
    """

    trainer: str
    name: str
    default: object
    cases: tuple[tuple[str, str | dict[str, str]], ...] = ()
    acts: str = ""
    see: str = ""
    reasons: dict[str, str] = field(default_factory=dict)
    learns: bool = False
    differs: dict[str, str] = field(default_factory=dict)
    apart: dict[str, str] = field(default_factory=dict)
    gone_in: str = ""
    unread: str = ""

    @property
    def kind(self) -> str:
        """The trainer that has the key, in words."""
        if self.gone_in:
            return f"a key of earlier versions of {self.trainer}, which {self.gone_in} lacks"
        return f"a key of {self.trainer}"

    @property
    def named(self) -> set[str]:
        """The values that the cases name, as texts."""
        return {value for _, here in self.cases if isinstance(here, dict) for value in here}

    @property
    def typed(self) -> list[str]:
        """The overrides of all cases, such as `aggregation=token_mean` and `loss.epsilon_low`."""
        values = [here.values() if isinstance(here, dict) else [here] for _, here in self.cases]
        return [match[0] for case in values for here in case for match in OVERRIDE.finditer(here)]

    @property
    def typed_keys(self) -> list[str]:
        """The keys of these overrides."""
        return [override.partition("=")[0] for override in self.typed]

    @property
    def keys(self) -> list[str]:
        """Our keys if they take the same value, else empty."""
        for _, here in self.cases:
            if isinstance(here, str) and here:
                return [key for key, value in OVERRIDE.findall(here) if not value]
        return []

    @property
    def here(self) -> str:
        """Return the meaning of the key here, in words and code."""
        if self.see:
            return f"see `{self.see}`"
        cases = []
        for condition, here in self.cases:
            values: dict[str, list[str]] = {}
            for value, typed in here.items() if isinstance(here, dict) else [("", here)]:
                # As code, since `token: x` would be hidden as a secret.
                value = f"`{value}`" if value else ""
                values.setdefault(f"`{typed}`" if typed else "nothing to type", []).append(value)
            cases.append(
                (f"where `{condition}` " if condition else "")
                + "; ".join(
                    f"{', '.join(of)}: {typed}".lstrip(": ") for typed, of in values.items()
                )
            )
        return "; else ".join(cases) or NONE

    @property
    def reason(self) -> str:
        """Why some or all values have no equal."""
        return "; ".join(self.reasons.values())

    @property
    def remark(self) -> str:
        """Why some or all values have no equal, and what differs."""
        condition = f"acts where `{self.acts}`" if self.acts else ""
        differs = [*self.apart.values(), *self.differs.values()]
        return "; ".join(part for part in (condition, self.reason, *differs) if part)

    def sentence(self, name: str) -> str:
        """Return a sentence on what a key of theirs is here."""
        gone = f", which {self.gone_in} lacks," if self.gone_in else ""
        named = f"{self.trainer}'s {name}{gone}"
        if self.see:
            return f"{named} is told here with `{self.see}`."
        if self.here == NONE:
            return f"{named} has no equal here: {self.remark}."
        remark = f" ({self.remark})" if self.remark else ""
        return f"{named} is here {self.here}{remark}."


@dataclass(frozen=True)
class Table:
    """The keys of a version of another trainer; see trl.yaml for what is in it."""

    content: JsonObject
    rows: dict[str, Theirs]

    def row(self, name: str) -> Theirs | None:
        """Return the row of a key by its full name, or of the section that it is in."""
        while name and name not in self.rows:
            name = name.rpartition(".")[0]
        return self.rows.get(name)

    def near(self, name: str) -> str | None:
        """Return the key that is probably meant by one that is not there: of the same section, or
        of the same last part."""
        section, _, leaf = name.rpartition(".")
        ends = {
            row.rpartition(".")[2]: row for row in self.rows if row.rpartition(".")[0] == section
        }
        near = nearest(leaf, ends, 0.75)
        if near is not None:
            return ends[near]
        same = [row for row in self.rows if row.rpartition(".")[2] == leaf]
        return nearest(name, same, 0.6)


@functools.cache
def tables() -> dict[str, Table]:
    """Return the table of each trainer by its name."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    files = [Path(__file__).with_name(name) for name in ("trl.yaml", "verl.yaml")]
    contents = [yaml.load(file.read_bytes(), Loader=loader) for file in files]
    return {content["trainer"]: Table(content, _rows(content)) for content in contents}


@functools.cache
def rloo_table() -> Table:
    """Return TRL's table as RLOO's configuration has it: without the keys that GRPO alone has."""
    table = tables()["TRL"]
    of_rloo = table.content["rloo"]
    rows = {
        name: replace(row, default=of_rloo["defaults"].get(name, row.default))
        for name, row in table.rows.items()
        if name not in table.content["grpo"]
    }
    words = of_rloo["words"] | {
        name: formula
        for name, formula in table.content["words"].items()
        if name not in of_rloo["words"]
    }
    return Table(table.content | {"words": words}, rows)


def _rows(content: JsonObject) -> dict[str, Theirs]:
    trainer = content["trainer"]
    rows = {}
    for name, row in content["keys"].items():
        here = row.get("here", [])
        cases = here if isinstance(here, list) else [{"here": here}]
        texts = {part: row.get(part, "") for part in ("acts", "see", "unread")}
        reason = row.get("reason", {})
        rows[name] = Theirs(
            trainer,
            name,
            row.get("default"),
            tuple((case.get("where", ""), _by_text(case["here"])) for case in cases),
            reasons=reason if isinstance(reason, dict) else {"": reason},
            learns=row.get("learns", False),
            differs=row.get("differs", {}),
            apart=row.get("apart", {}),
            **texts,
        )
    for block in content["none"]:
        keys = [*flat(block.get("keys", {})), *((name, None) for name in block.get("sections", []))]
        facts = {"reasons": {"": block["reason"]}, "learns": block.get("learns", False)}
        facts["acts"] = block.get("acts", "")
        rows |= {name: Theirs(trainer, name, value, **facts) for name, value in keys}
    gone = {
        name: replace(rows[name], gone_in=content["version"]) for name in content.get("earlier", [])
    }
    return rows | gone


def _by_text(here: str | dict[object, str]) -> str | dict[str, str]:
    """Return what is typed by the text of their values, where it depends on these."""
    if isinstance(here, dict):
        return {text(value): typed for value, typed in here.items()}
    return here


def flat(
    values: Mapping[str, object], stops: Sequence[str] = (), prefix: str = ""
) -> Iterator[tuple[str, object]]:
    """Yield (dotted name, value) of each key in nested dictionaries. stops: names whose value is a
    dictionary."""
    for name, value in values.items():
        if isinstance(value, dict) and value and f"{prefix}{name}" not in stops:
            yield from flat(value, stops, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def known_as(name: str, trainer: str | None = None) -> list[tuple[str, Theirs]]:
    """Return (their name, row) for another trainer's key, with or without its sections, for words
    that a user types; a section stands for its keys. A key in a section that no table has is looked
    up by its end alone.

    Where several keys end so, those with an equal here are returned, else one of each trainer.
    """
    typed = name
    is_whole = True
    while name:
        rows = [row for row in _rows_by_end().get(name, ()) if trainer in (None, row.trainer)]
        matching = [row for row in rows if row.name == name] or rows
        if not is_whole and "." not in name:  # model.seed is no part of TRL's model
            by_end = _named_as_the_end_of(typed, trainer)
            matching = [row for row in matching if not row.cases] or by_end or matching
        if matching:
            return _likeliest(matching)
        name = name.rpartition(".")[0]
        is_whole = False
    return []


@functools.cache
def _rows_by_end() -> dict[str, list[Theirs]]:
    """Return the rows of all tables by their names and by each end of these after a dot."""
    rows: dict[str, list[Theirs]] = {}
    for table in tables().values():
        for row in table.rows.values():
            end = row.name
            while end:
                rows.setdefault(end, []).append(row)
                end = end.partition(".")[2]
    return rows


def _named_as_the_end_of(name: str, trainer: str | None) -> list[Theirs]:
    """Return the rows whose names are what is left of a name after one of its dots."""
    return [
        row
        for table in tables().values()
        for row in table.rows.values()
        if trainer in (None, row.trainer) and name.endswith(f".{row.name}")
    ]


def _likeliest(rows: list[Theirs]) -> list[tuple[str, Theirs]]:
    """Return those with an equal here, else one of each trainer, with their names."""
    with_equal = [row for row in rows if row.typed]
    of_each = with_equal or [*{row.trainer: row for row in reversed(rows)}.values()]
    return [(row.name, row) for row in of_each]


def rows_with_value(value: str) -> list[tuple[Theirs, str]]:
    """Return the rows that know a value, such as bnpo, each with a sentence.

    It says what is typed for the value, or why it has no equal.
    """
    if re.fullmatch(r"true|false|null|none|auto|[\W\d.]*", value):
        return []
    rows_of_value = []
    for row in (row for table in tables().values() for row in table.rows.values()):
        cases = [
            (f"where `{condition}` " if condition else "")
            + (f"`{here[value]}`" if here[value] else "nothing to type")
            for condition, here in row.cases
            if isinstance(here, dict) and value in here
        ]
        if not cases and re.search(rf"`{re.escape(value)}`.* ha(ve|s) no equal", row.reason):
            cases = [row.reason]
        if cases:
            rows_of_value.append((row, "; else ".join(cases)))
    return rows_of_value


def keys_in_section(name: str) -> dict[str, list[str]]:
    """Return the keys of each trainer in sections of this name, such as filter_groups."""
    of_trainers = {
        trainer: [key for key in table.rows if f".{name}." in f".{key}"]
        for trainer, table in tables().items()
    }
    return {trainer: names for trainer, names in of_trainers.items() if names}


def words_used(row: Theirs) -> str:
    """Return what the words are that the conditions of a row use."""
    conditions = [*row.reasons, *row.apart, *row.differs, *(case[0] for case in row.cases)]
    formulas = [row.acts, *row.typed, *conditions]
    written = " ".join([*formulas, *re.findall(r"\{.*?\}", row.reason)])
    used = []
    for word, formula in reversed(tables()[row.trainer].content["words"].items()):
        if re.search(rf'(?<![\w."]){word}(?![\w."])', written):  # each is made of earlier ones
            written = f"{written} {formula}"
            used.append(f"{word} is {formula}")
    return "; ".join(used)


def keys_called(name: str) -> list[str]:
    """Return our keys for another trainer's key, if they take the same value.

    name: with or without the sections of that trainer: `beta`, `actor_rollout_ref.rollout.n`.
    """
    keys = list(dict.fromkeys(key for row in _rows_called(name) for key in row.keys))
    if "." not in name:  # `lr` alone is the policy's, not the critic's
        keys = [key for key in keys if not key.startswith("critic.")] or keys
    # clip_ratio_low is one of two keys, and epsilon is both.
    ending = name.rpartition(".")[2].rpartition("_")[2]
    return [key for key in keys if key.endswith(f"_{ending}")] or keys


def option_called(group: str, word: str) -> str:
    """Return the overrides for another trainer's name of an option of our group; "" for none.

    word: with underscores, such as `seq_mean_token_mean`. What depends on further keys of theirs is
    left out.
    """
    for table in tables().values():
        for row in table.rows.values():
            for _, here in row.cases:
                for value, typed in here.items() if isinstance(here, dict) else ():
                    if value.replace("-", "_") == word and typed.startswith(f"{group}="):
                        return " ".join(_OVERRIDE_WITH_VALUE.findall(typed))
    return ""


def keys_mentioned(name: str, group: str) -> list[str]:
    """Return our keys of a group that the rows on another trainer's key mention."""
    mentioned = [key for row in _rows_called(name) for key in row.typed_keys]
    return [key for key in dict.fromkeys(mentioned) if key.startswith(f"{group}.")]


def _rows_called(name: str) -> list[Theirs]:
    """Return the rows of another trainer's key, without those of a section that it is in, whose
    values are of another kind: model.vocab_size has none of those of model."""
    leaf = name.rpartition(".")[2]
    return [row for their_name, row in known_as(name) if their_name.rpartition(".")[2] == leaf]
