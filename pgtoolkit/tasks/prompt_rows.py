"""Prompts with their answers, read from files and from folders of Hugging Face data sets."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.completion import Message, Prompt
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.system.plain_files import json_object
from pgtoolkit.system.report import nearest, refusal, text
from pgtoolkit.tasks.hub_data import hub_files
from pgtoolkit.tasks.settings import is_data_set_name

if TYPE_CHECKING:  # `pgtk check` does without pyarrow
    from pgtoolkit.tasks.row_files import Problems, RawRow

_VERL = "reward_model"
"""The column in which verl keeps the answer, as `ground_truth`."""

TOOLS = "tools"
"""The column in which others keep tools that a chat template is to describe."""

UNUSED_TOOLS = (
    "has tools, which are not handed to the chat template: the model would not see them. "
    "Describe them in a system message, and remove the column"
)

_COLUMNS_OF_PROMPTS = (
    "prompt",
    "messages",
    "question",
    "problem",
    "query",
    "instruction",
    "input",
    "text",
)
_COLUMNS_OF_ANSWERS = ("answer", "solution", "target", "label", "output", "response", "completion")
"""Names of columns in others' files, those that are likelier first."""

_CHAT_AS_TEXT = re.compile(r"""\s*\[?\s*\{\s*["'](role|content)["']\s*:""")
"""Begins a chat that is written as a text, in JSON or as Python prints it."""

_OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Roles in files of others -> those of chat templates."""

_ROLES = ("system", "user", "assistant", "tool", "developer")

_SPLITS = ("train", "test", "validation", "valid", "dev", "eval")
"""Common names of splits; nobody means all files of a folder that has several of them."""


def prompt_files(path: str, split: str | None, config: str | None = None) -> list[Path]:
    """Return the files of task.path, task.config and task.split, ordered by name, or as the data
    set lists them.

    A folder is a data set that `save_to_disk` has written, with or without splits; or, with a
    split, one of the hub: files named `train.jsonl` or `train-00000-of-00002.parquet`, or in a
    folder `train`, at any depth. Anything else is a file, a folder of files, a glob, or the name of
    a data set on the hub. Raises ConfigError where the split does not fit, DataError without files.
    """
    from pgtoolkit.tasks.row_files import find_files

    if is_data_set_name(path):
        return list(hub_files(path, config, split))
    folder = Path(path).expanduser()
    if (folder / "dataset_dict.json").is_file():
        splits = [str(name) for name in _json(folder / "dataset_dict.json")["splits"]]
        if split in splits:
            return _saved(folder / split)
    elif (folder / "state.json").is_file():
        splits = [_json(folder / "state.json").get("_split")]
        if split in (None, *splits):
            return _saved(folder)
    else:
        files = _files_below(folder)
        here = [file for file in files if file.parent == folder]
        splits = _splits_of(here or files)
        if split is None and (splits == [None] or (here and len(splits) == 1)):
            return find_files(path, "task.path")
        of_split = [file for file in files if split is not None and _is_of(file, split)]
        if split is not None and of_split:
            return _of_one_data_set(path, split, folder, of_split)
    raise ConfigError(_split_refusal(path, split, splits))


def _files_below(folder: Path) -> list[Path]:
    """Return the files of rows in a folder, at any depth, without hidden ones."""
    from pgtoolkit.tasks.row_files import SUFFIXES

    files = [file for file in sorted(folder.rglob("*")) if file.suffix in SUFFIXES]
    return [
        file
        for file in files
        if file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]


def _splits_of(files: Sequence[Path]) -> list[str] | list[None]:
    """Return the common names of splits that files have; [None] if they have none."""
    names = {name for file in files for name in _SPLITS if _is_of(file, name)}
    return sorted(names) or [None]


def _split_refusal(path: str, split: str | None, splits: Sequence[str | None]) -> str:
    names = ", ".join(map(text, splits))
    return refusal(
        setting=f"task.split={text(split)} with task.path={path}",
        needs=f"one of {names}" if len(splits) > 1 else names,
        got=split,
        reason="These are the splits that it has." if names != "null" else "It has no splits.",
        use=" or ".join(f"task.split={text(name)}" for name in splits),
    )


def _saved(folder: Path) -> list[Path]:
    """Return the Arrow files of one data set that `save_to_disk` has written."""
    state = _json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder} needs rows in the order of its files. An old version of datasets kept an "
            "order beside the rows. Save it again with a newer one."
        )
    files = [folder / Path(file["filename"]).name for file in state["_data_files"]]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DataError(
            f"{folder} lacks {', '.join(missing)}, which its state.json names. Copy or save it "
            "again."
        )
    return files


def _of_one_data_set(path: str, split: str, folder: Path, files: list[Path]) -> list[Path]:
    """Return the files of a split. ConfigError if they belong to several data sets."""
    homes = sorted(
        {file.parent.parent if file.parent.name == split else file.parent for file in files}
    )
    if len(homes) > 1:
        shown = ", ".join(str(home.relative_to(folder)) for home in homes[:4])
        raise ConfigError(
            refusal(
                setting=f"task.path={path}",
                needs="one data set",
                got=len(homes),
                reason=f"The split is in {shown}.",
                use=f"task.path={homes[0]}",
            )
        )
    return files


def _is_of(file: Path, split: str) -> bool:
    name = re.fullmatch(rf"{re.escape(split)}(-\d+-of-\d+(-\w+)?)?", file.stem)
    return bool(name) or file.parent.name == split


def _json(file: Path) -> dict:
    try:
        return json_object(file)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file} cannot be read: {error}. Copy or save the data set again."
        ) from error


def read_prompts(
    path: str,
    split: str | None,
    prompt_field: str,
    answer_field: str,
    config: str | None = None,
    answer_pattern: str | None = None,
    keep_rows: bool = False,
) -> list[Prompt]:
    """Return the prompts of all files, by their numbers.

    answer_field: of a chat in prompt_field it is what is asked last, for verifiers without answers.
    answer_pattern: the answer is what its one group captures last in the field; None: the answer is
        the field.
    keep_rows: each prompt keeps all columns of its row, and with answer_pattern the answer as the
        column `answer`.
    Raises DataError that lists the problems of all rows.
    """
    from pgtoolkit.tasks.row_files import Problems, open_files

    lacking = _Lacking(prompt_field, answer_field)
    problems = Problems(f"the prompts of task.path={path} cannot be used", lacking.advice)
    reader = _PromptReader(prompt_field, answer_field, answer_pattern, keep_rows, lacking, problems)
    prompts = []
    columns = None if keep_rows else (prompt_field, answer_field, _VERL, TOOLS)
    for file in open_files(prompt_files(path, split, config), columns):
        for number, _, row in file.rows():
            place = f"{file.label}:{number}"
            if isinstance(row, str):
                problems.add(place, row)
                continue
            prompt = reader.prompt(row, file.names or list(row), len(prompts), place)
            if prompt is not None:
                prompts.append(prompt)
    problems.raise_if_any()
    if not prompts:
        raise DataError(f"task.path={path} needs at least one prompt (got none).")
    return prompts


@dataclass
class _Lacking:
    """Counts the rows of a file that lack a prompt or an answer, for advice that fits the others.

    rows: how many were read. names: in how many of them each column is. prompts, answers: how many
    lack one.
    """

    prompt_field: str
    answer_field: str
    rows: int = 0
    names: Counter[str] = field(default_factory=Counter)
    prompts: int = 0
    answers: int = 0

    def advice(self) -> list[str]:
        """Return what to do about rows without a prompt, and about those without an answer.

        Another column is only named where most rows lack the configured one and have that; the
        column of prompts is none of answers, but for verifiers that read no answer.
        """
        frequent = [name for name, count in self.names.items() if 2 * count > self.rows]
        asked = self.prompt_field
        lines = []
        if self.prompts:
            names = [name for name in frequent if name != self.answer_field]
            column = _likely(self.prompt_field, _COLUMNS_OF_PROMPTS, names)
            asked = asked if asked in frequent else column
            use = f"task.prompt_field={column}"
            lines.append(self._line(self.prompts, self.prompt_field, "prompt", use))
        if self.answers:
            names = [name for name in frequent if name != asked]
            column = _likely(self.answer_field, _COLUMNS_OF_ANSWERS, names)
            if column == "COLUMN" and self.prompt_field in frequent:
                column = f"{self.prompt_field} where the verifier reads no answer"
            use = f"task.answer_field={column}"
            lines.append(self._line(self.answers, self.answer_field, "answer", use))
        return lines

    def _line(self, count: int, column: str, noun: str, use: str) -> str:
        """Return what to do about this many rows that lack a column."""
        read = "the 1 row" if self.rows == 1 else f"the {self.rows} rows"
        lack = f"{count} of {read} read {'lacks' if count == 1 else 'lack'} {column}"
        if 2 * count > self.rows:
            return f"{lack}. Use {use}."
        if count == 1:
            return f"{lack}. Write its {noun} there, or remove the row."
        return f"{lack}. Write their {noun}s there, or remove the rows."


@dataclass(frozen=True)
class _PromptReader:
    """Makes a prompt of each row. See `read_prompts` for the fields."""

    prompt_field: str
    answer_field: str
    answer_pattern: str | None
    keep_rows: bool
    lacking: _Lacking
    problems: Problems

    def prompt(self, row: RawRow, names: Sequence[str], index: int, place: str) -> Prompt | None:
        """Return the prompt of a row; None if there are problems with it, which are collected.

        names: of all columns. index: of the prompt.
        """
        if _is_of_verl(row, self.answer_field):
            row[self.answer_field] = row[_VERL]["ground_truth"]
        if has_tools(row):
            self.problems.add(f"{place}:{TOOLS}", UNUSED_TOOLS)
        there = f"the row has {', '.join(names) or 'no fields'}"
        self.lacking.rows += 1
        self.lacking.names.update(names)
        self.lacking.prompts += self.prompt_field not in names
        self.lacking.answers += self.answer_field not in {*names, *row}
        question = answer = None
        try:
            question = _prompt(_value(row, self.prompt_field))
        except ValueError as error:
            self.problems.add(f"{place}:{self.prompt_field}", f"{error}; {there}")
        try:
            value = _value(row, self.answer_field)
            if question is not None and self.answer_field == self.prompt_field:
                value = question[0]
            answer = _answer(value, self.answer_pattern)
        except ValueError as error:
            self.problems.add(f"{place}:{self.answer_field}", f"{error}; {there}")
        if question is None or answer is None:
            return None
        kept = None
        if self.keep_rows:
            kept = {name: _plain(value) for name, value in row.items()}
            if self.answer_pattern is not None:
                kept["answer"] = answer
        asked, messages = question
        return Prompt(asked, answer, index, place, messages, row=kept)


def notes_on_columns(
    path: str, split: str | None, config: str | None, answer_field: str
) -> list[str]:
    """Return a note if the first row shows that prompts and answers are in verl's columns."""
    from pgtoolkit.tasks.row_files import open_files

    (file,) = open_files(prompt_files(path, split, config)[:1], (answer_field, _VERL))
    _, _, row = next(file.rows())
    if isinstance(row, str) or not _is_of_verl(row, answer_field):
        return []
    return [
        f"{file.label} has prompts as verl writes them: the answer is {_VERL}.ground_truth. "
        "data_source, by which verl chooses how to score, ability and extra_info are not read: "
        "task.verifier decides how to score."
    ]


def _likely(typed: str, known: Sequence[str], names: Sequence[str]) -> str:
    """Return the name that a file has and that is similar to the typed one, else the first of the
    known names that it has, or a word in its place."""
    near = nearest(typed, names, 0.6)
    return near or next((name for name in known if name in names), "COLUMN")


def _value(row: RawRow, column: str) -> object:
    """Return the value of a column. ValueError says if the row has none."""
    value = row.get(column)
    if value is None:
        raise ValueError("is null" if column in row else "is missing")
    return value


def has_tools(row: RawRow) -> bool:
    """Return whether a row has tools; some files keep them as JSON."""
    tools = row.get(TOOLS)
    if tools is None or isinstance(tools, str):
        return tools not in (None, "", "[]", "null")
    return not hasattr(tools, "__len__") or len(tools) > 0


def _is_of_verl(row: RawRow, answer_field: str) -> bool:
    """Return whether a row has its answer where verl keeps it, and no other field is configured."""
    verl = row.get(_VERL)
    return (
        answer_field == "answer"
        and row.get("answer") is None
        and isinstance(verl, dict)
        and "ground_truth" in verl
    )


def _prompt(value: object) -> tuple[str, tuple[Message, ...] | None]:
    """Return the prompt's text, and the messages if it is a chat. ValueError says what is wrong."""
    if isinstance(value, str) and value.strip():
        if _CHAT_AS_TEXT.match(value):
            raise ValueError(
                f"needs a list of chat messages (got a text that spells one, {value!r:.60}). Use a "
                "list in this column: json.loads makes one of JSON"
            )
        return value, None
    messages = messages_of(value, "a text or a list of chat messages")
    last = messages[-1]
    if last["role"] == "assistant" or not last["content"].strip():
        raise ValueError(f"needs a last message that the model is to answer (got {last!r:.60})")
    return last["content"], tuple(messages)


def messages_of(value: object, needs: str = "a list of chat messages") -> list[Message]:
    """Return the messages of a chat. ValueError says what is wrong; needs: the words for it."""
    messages = _without_arrays(value)
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) for message in messages)
    ):
        raise ValueError(f"needs {needs} (got {messages!r:.40})")
    for message in messages:
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(
                f"needs chat messages whose role and content are texts (got {message!r:.60})"
            )
        role = message["role"]
        known = _OTHER_ROLES.get(role.lower(), role.lower())
        if role not in _ROLES and known in _ROLES:
            raise ValueError(f"needs the role {known!r} of chat templates (got {role!r})")
    # Columnar files give each message all keys that any of them has.
    return [
        {key: item for key, item in message.items() if item is not None} for message in messages
    ]


def _without_arrays(value: object) -> object:
    """Return an array of NumPy, which is a list of a columnar file, as a list."""
    to_list = getattr(value, "tolist", None)
    return value if to_list is None else to_list()


def _plain(value: object) -> object:
    """Return a value of a row, and all in it, without arrays of NumPy."""
    value = _without_arrays(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _answer(value: object, pattern: str | None = None) -> str:
    """Return the text of an answer, or the part that the group of a pattern captures last in it."""
    answer = _text_of_answer(value)
    if pattern is None:
        return answer
    captured = [match.group(1) for match in re.finditer(pattern, answer)]
    if not captured or not (captured[-1] or "").strip():
        raise ValueError(
            f"needs a text in which task.answer_pattern={pattern} captures something (got "
            f"{answer!r:.60})"
        )
    return captured[-1].strip()


def _text_of_answer(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return _number(value)
    if isinstance(value, str) and value.strip():
        return value
    value = _plain(value)
    if isinstance(value, list | dict):
        raise ValueError(
            f"needs one text or number (got {value!r:.40}). Write it as a text: its one right "
            "answer, or json.dumps of it for a verifier of your own"
        )
    raise ValueError(f"needs a text (got {value!r:.40})")


def _number(value: float) -> str:
    """Return a number as a model would write it: a whole number without a point, and one of a
    float32 column with the digits of float32."""
    import numpy as np

    if value.is_integer() and abs(value) < 1e16:
        return str(int(value))
    with np.errstate(over="ignore"):
        narrow = np.float32(value)
    return str(narrow) if float(narrow) == value else str(value)
