"""Completions kept to be looked at: rows in Parquet files of a run directory, each written whole or
not at all."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

from pgtoolkit.runs.records import reading
from pgtoolkit.system.plain_files import replacing
from pgtoolkit.system.redaction import redact

FOLDER = "completions"
"""Where they lie in a run directory."""

TRAINING = "training"
"""The set of the completions that were trained on; other sets are those of evaluations."""

_REWARD_OF = "reward/"
"""What a column of one verifier's scores begins with, as its metric does."""

_LOGGED_OF = "logged/"
"""What a column that a reward function has logged begins with."""

_NAME = re.compile(
    r"steps_(?P<first>\d+)-(?P<last>\d+)\.parquet|evaluation_(?P<set>.+)_(?P<step>\d+)\.parquet"
)


@dataclass(frozen=True)
class CompletionRow:
    """One completion.

    step: the optimizer step that trained on it; in an evaluation, the steps made before it.
    name: of the prompt, the same whenever it is asked: `Prompt.place`.
    prompt, completion: their tokens as the tokenizer decodes them, special tokens included.
    reward: after weights and penalties; None where nobody could score it. rewards: score of each
        verifier by its name; {} where none has a name.
    advantage: None in an evaluation. tokens: of the completion. finish_reason: "stop" or "length".
    version: of the weights that wrote it, in updates. answer: the prompt's reference answer, if it
        has one.
    logged: what reward functions have logged of it, by name.
    """

    step: int
    name: str
    prompt: str = ""
    completion: str = ""
    reward: float | None = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    advantage: float | None = None
    tokens: int = 0
    finish_reason: str = "stop"
    version: int = 0
    answer: str | None = None
    logged: dict[str, str] = field(default_factory=dict)


COLUMNS = {
    column.name: column.type
    for column in fields(CompletionRow)
    if column.name not in ("rewards", "logged")
}
"""The columns of a file but for `rewards` and `logged`: their types as they stand above."""

_KINDS = {"int": "int64", "str": "string", "float": "double"}
"""The same as Arrow names them."""


class CompletionFile(NamedTuple):
    """One file: its set, its first and its last step, which are one in an evaluation, and where it
    lies."""

    set: str
    first: int
    last: int
    path: Path


def write_completions(path: Path, rows: Sequence[CompletionRow]) -> None:
    """Write the file, or replace it, all of it or nothing; its folder is made. What looks like a
    secret is hidden.

    path: RUN/completions/evaluation_SET_STEP.parquet for an evaluation, where no set is called
        `training`. Training
    writes RUN/completions/steps_FIRST-LAST.parquet, one file for a hundred steps
    (`rollouts/kept_completions.py`). The columns are the fields of `CompletionRow`, but for
    `rewards` and `logged`: a column reward/NAME or logged/NAME for each of them.
    """
    write_redacted(path, redacted(rows))


def redacted(rows: Sequence[CompletionRow]) -> list[CompletionRow]:
    """The rows without what looks like a secret; what is no Unicode becomes a question mark."""
    hidden = functools.cache(lambda text: redact(text).encode(errors="replace").decode())
    return [
        replace(
            row,
            **{name: hidden(value) for name, value in vars(row).items() if isinstance(value, str)},
            logged={
                name: hidden(f"{name}={text}").removeprefix(f"{name}=")
                for name, text in row.logged.items()
            },
        )
        for row in rows
    ]


def write_redacted(path: Path, rows: Sequence[CompletionRow]) -> None:
    """The same as `write_completions` for rows that `redacted` has given, once where a file is
    written again."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {name: _KINDS[kind.split()[0]] for name, kind in COLUMNS.items()}
    columns = {
        name: pa.array([getattr(row, name) for row in rows], kind) for name, kind in kinds.items()
    }
    for name in dict.fromkeys(name for row in rows for name in row.rewards):
        columns[_REWARD_OF + name] = pa.array([row.rewards.get(name) for row in rows], "double")
    for name in dict.fromkeys(name for row in rows for name in row.logged):
        columns[_LOGGED_OF + name] = pa.array([row.logged.get(name) for row in rows], "string")
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        pq.write_table(pa.table(columns), file, compression="zstd", write_page_checksum=True)


def read_completions(path: Path, columns: Sequence[str] | None = None) -> list[CompletionRow]:
    """The rows of one file, as they were written; columns: of these fields alone, the others have
    their defaults.

    Raises StorageError for a file that is damaged.
    """
    import pyarrow.parquet as pq

    with path.open("rb") as file, reading(path):
        # Without threads, which a process that ends at once, such as before `head`, leaves behind.
        table = pq.read_table(
            file,
            columns=columns and list(columns),
            use_threads=False,
            pre_buffer=False,
            page_checksum_verification=True,
        )
        scores = [name for name in table.column_names if name.startswith(_REWARD_OF)]
        logged = [name for name in table.column_names if name.startswith(_LOGGED_OF)]
        return [
            CompletionRow(
                **{name: row[name] for name in columns or COLUMNS},
                rewards={
                    name.removeprefix(_REWARD_OF): row[name]
                    for name in scores
                    if row[name] is not None
                },
                logged={
                    name.removeprefix(_LOGGED_OF): row[name]
                    for name in logged
                    if row[name] is not None
                },
            )
            for row in table.to_pylist()
        ]


def some_prompts(rows: Sequence[CompletionRow], most: int) -> set[str]:
    """Names of prompts that together have at most so many completions: all of them, or some, spread
    evenly.

    The last is among them; where its completions alone are more, it stays.
    """
    counts = Counter(row.name for row in rows)
    for apart in range(max(1, -(-len(rows) // most)), len(counts)):
        chosen = [*counts][::-apart]
        if sum(counts[name] for name in chosen) <= most:
            return set(chosen)
    return set([*counts][-1:])


def some_completions(
    files: Sequence[CompletionFile], most: int, step: int | None = None
) -> tuple[list[tuple[str, CompletionRow]], int]:
    """The completions of these files, each with its set, and their number; of more than `most`,
    which the sets share alike, those of `some_prompts`.

    step: of this one alone.
    """
    chosen, total = [], 0
    for name in (sets := dict.fromkeys(file.set for file in files)):
        paths = [file.path for file in files if file.set == name]
        keys = [row for path in paths for row in read_completions(path, ("step", "name"))]
        keys = [row for row in keys if step in (None, row.step)]
        total, names = total + len(keys), some_prompts(keys, most // len(sets))
        rows = (row for path in paths for row in read_completions(path))
        chosen += [(name, row) for row in rows if row.name in names and step in (None, row.step)]
    return chosen, total


def completion_files(run_dir: Path) -> list[CompletionFile]:
    """The files of a run directory, by set and step; none where there are none. Other files are
    passed over."""
    files = []
    for path in (run_dir / FOLDER).glob("*.parquet"):
        if named := _NAME.fullmatch(path.name):
            first = int(named["step"] or named["first"])
            last = int(named["step"] or named["last"])
            files.append(CompletionFile(named["set"] or TRAINING, first, last, path))
    return sorted(files)


def drop_completions_after(run_dir: Path, step: int) -> None:
    """Take away the rows of later steps, of every set: a resumed run writes them anew."""
    for file in completion_files(run_dir):
        if file.first > step:
            file.path.unlink()
        elif file.last > step:
            write_redacted(
                file.path, [row for row in read_completions(file.path) if row.step <= step]
            )
