"""Completions that a run keeps, in Parquet files that are written whole or not at all."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

from pgtoolkit.errors import StorageError, first_line
from pgtoolkit.runs.records import reading_file
from pgtoolkit.system.plain_files import JsonObject, replacing
from pgtoolkit.system.redaction import redact

FOLDER = "completions"
"""Their folder in a run directory."""

TRAINING = "training"
"""The set of the completions that were trained on. Other sets are those of evaluations."""

_REWARD_PREFIX = "reward/"
"""The name of a column with one verifier's scores begins so, as its metric does."""

_LOGGED_PREFIX = "logged/"
"""The name of a column that a reward function has logged begins so."""

_NAME = re.compile(
    r"steps_(?P<first>\d+)-(?P<last>\d+)\.parquet|evaluation_(?P<set>.+)_(?P<step>\d+)\.parquet"
)


@dataclass(frozen=True)
class CompletionRow:
    """One completion.

    step: the optimizer step that trained on it; in an evaluation, the steps made before it.
    name: of the prompt, the same whenever it is asked: `Prompt.place`.
    prompt, completion: their tokens as the tokenizer decodes them, special tokens included.
    reward: after weights and penalties; None where it could not be scored.
    rewards: the score of each verifier by its name; {} where none has a name.
    advantage: None in an evaluation.
    tokens: number of tokens of the completion.
    finish_reason: "stop" or "length".
    version: of the weights that wrote it, in updates.
    answer: the prompt's reference answer, if it has one.
    logged: texts that reward functions have logged about it, by name.
    exact_match: whether it is right, whatever its reward; None where the scores do not say.
    score_failed: whether scoring failed, also where `task.failure_score` is the score then.
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
    exact_match: bool | None = None
    score_failed: bool = False


COLUMNS = {
    column.name: column.type
    for column in fields(CompletionRow)
    if column.name not in ("rewards", "logged")
}
"""The columns of a file, but for `rewards` and `logged`, with their types as written above."""

_ARROW_TYPES = {"int": "int64", "str": "string", "float": "double", "bool": "bool"}
"""Arrow's names of these types."""


class CompletionFile(NamedTuple):
    """A file of completions: its set, its first and last step, and its path.

    In an evaluation both steps are the same.
    """

    set: str
    first: int
    last: int
    path: Path


def write_completions(path: Path, rows: Sequence[CompletionRow]) -> None:
    """Write a file of completions, or replace it, whole or not at all.

    Its folder is made. Texts that look like secrets are hidden. The columns are the fields of
    `CompletionRow`, with columns reward/NAME and logged/NAME in the place of `rewards` and
    `logged`.

    path: RUN/completions/evaluation_SET_STEP.parquet for an evaluation, where no set is called
        `training`. Training writes RUN/completions/steps_FIRST-LAST.parquet, one file for a hundred
        steps (`rollouts/kept_completions.py`).
    """
    write_redacted(path, redacted(rows))


def redacted(rows: Sequence[CompletionRow]) -> list[CompletionRow]:
    """Return the rows with secrets hidden; what is no Unicode becomes a question mark."""
    hidden = functools.cache(lambda text: redact(text).encode(errors="replace").decode())
    result = []
    for row in rows:
        texts = {name: hidden(value) for name, value in vars(row).items() if isinstance(value, str)}
        # With its name, since some texts are secrets by their names only.
        logged = {
            name: hidden(f"{name}={text}").removeprefix(f"{name}=")
            for name, text in row.logged.items()
        }
        result.append(replace(row, **texts, logged=logged))
    return result


def write_redacted(path: Path, rows: Sequence[CompletionRow]) -> None:
    """Write rows from `redacted`, as `write_completions` does.

    A file that is written again and again does not have to redact its earlier rows each time.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrow_types = {name: _ARROW_TYPES[kind.split()[0]] for name, kind in COLUMNS.items()}
    columns = {
        name: pa.array([getattr(row, name) for row in rows], arrow_type)
        for name, arrow_type in arrow_types.items()
    }
    for name in dict.fromkeys(name for row in rows for name in row.rewards):
        columns[_REWARD_PREFIX + name] = pa.array([row.rewards.get(name) for row in rows], "double")
    for name in dict.fromkeys(name for row in rows for name in row.logged):
        columns[_LOGGED_PREFIX + name] = pa.array([row.logged.get(name) for row in rows], "string")
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        pq.write_table(pa.table(columns), file, compression="zstd", write_page_checksum=True)


def read_completions(path: Path, columns: Sequence[str] | None = None) -> list[CompletionRow]:
    """Return the rows of a file.

    columns: the fields to read, while others have their defaults; None: all.
    Raises StorageError for a damaged file.
    """
    import pyarrow.parquet as pq

    with path.open("rb") as file, reading_file(path):
        # Without threads: a process that ends at once, as in a pipe to `head`, would leave them.
        table = pq.read_table(
            file,
            columns=columns and list(columns),
            use_threads=False,
            pre_buffer=False,
            page_checksum_verification=True,
        )
        # Files of earlier versions have none of these.
        lacking = {"exact_match", "score_failed"} - {*table.column_names}
        names = [name for name in columns or COLUMNS if name not in lacking]
        return [
            CompletionRow(
                **{name: row[name] for name in names},
                rewards=_values_with_prefix(row, _REWARD_PREFIX),
                logged=_values_with_prefix(row, _LOGGED_PREFIX),
            )
            for row in table.to_pylist()
        ]


def _values_with_prefix(row: JsonObject, prefix: str) -> JsonObject:
    """Return the values of a row's columns that begin with a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): value
        for name, value in row.items()
        if name.startswith(prefix) and value is not None
    }


def some_prompts(rows: Sequence[CompletionRow], limit: int) -> set[str]:
    """Return names of prompts, evenly spread, that together have at most `limit` completions.

    These are all prompts if they have no more. The last one is always among them, even if its
    completions alone are more.
    """
    counts = Counter(row.name for row in rows)
    for stride in range(max(1, -(-len(rows) // limit)), len(counts)):
        names = [*counts][::-stride]
        if sum(counts[name] for name in names) <= limit:
            return set(names)
    return set([*counts][-1:])


def some_completions(
    files: Sequence[CompletionFile], limit: int, step: int | None = None
) -> tuple[list[tuple[str, CompletionRow]], int]:
    """Return completions of these files, each with its set, and the number that the files have.

    Of each set these are the completions of `some_prompts`, for an equal share of `limit`.
    step: only completions of this step are taken and counted; None: of all.
    """
    sets = dict.fromkeys(file.set for file in files)
    result = []
    total = 0
    for set_name in sets:
        paths = [file.path for file in files if file.set == set_name]
        keys = [
            row
            for path in paths
            for row in read_completions(path, ("step", "name"))
            if step in (None, row.step)
        ]
        total += len(keys)
        prompts = some_prompts(keys, limit // len(sets))
        result += [
            (set_name, row)
            for path in paths
            for row in read_completions(path)
            if row.name in prompts and step in (None, row.step)
        ]
    return result, total


def completion_files(run_dir: Path) -> list[CompletionFile]:
    """Return the files of completions in a run directory, by set and step. Others are ignored."""
    files = []
    for path in (run_dir / FOLDER).glob("*.parquet"):
        match = _NAME.fullmatch(path.name)
        if match:
            first = int(match["step"] or match["first"])
            last = int(match["step"] or match["last"])
            files.append(CompletionFile(match["set"] or TRAINING, first, last, path))
    return sorted(files)


def drop_completions_after(run_dir: Path, step: int) -> list[str]:
    """Delete the rows of later steps, which a resumed run writes again, from every set.

    Returns a note for each damaged file, which is set aside: the completions of its earlier steps
    are not made again. Raises StorageError for a file that cannot be read at all.
    """
    notes = []
    for file in completion_files(run_dir):
        if file.first > step:
            file.path.unlink()
            continue
        try:
            rows = read_completions(file.path)
        except StorageError as error:
            if isinstance(error.__cause__, PermissionError):
                raise
            aside = file.path.with_suffix(".damaged")
            file.path.replace(aside)
            notes.append(
                f"{first_line(error)}. Its completions, up to step {min(step, file.last)}, are not "
                f"made again. The file is now {aside.name}."
            )
            continue
        if file.last > step:
            write_redacted(file.path, [row for row in rows if row.step <= step])
    return notes
