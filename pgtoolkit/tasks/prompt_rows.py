"""Prompts with their answers, read from files and from folders of Hugging Face data sets."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

from pgtoolkit.completion import Message, Prompt
from pgtoolkit.config.schema_tasks import is_data_set_name
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.system.plain_files import json_object
from pgtoolkit.system.report import refusal, text
from pgtoolkit.tasks.hub_data import hub_files

_VERL = "reward_model"
"""The column in which verl keeps the answer, as `ground_truth`."""

TOOLS = "tools"
"""The column in which others keep tools that a chat template is to describe."""

UNUSED_TOOLS = (
    "has tools, which are not handed to the chat template: the model would not see them. "
    "Describe them in a system message, and remove the column"
)

_USUAL = ("train", "test", "validation", "valid", "dev", "eval")
"""Names of splits; a folder with files of several is not meant as a whole."""


def prompt_files(path: str, split: str | None, config: str | None = None) -> list[Path]:
    """Return the files of task.path, task.config and task.split, ordered by name, or as the data
    set lists them.

    A folder is a data set that `save_to_disk` has written, with or without splits; or, with a
    split, one of the hub: files named `train.jsonl` or `train-00000-of-00002.parquet`, or in a
    folder `train`, at any depth. Anything else is a file, a folder of files, a glob, or the name of
    a data set on the hub. Raises ConfigError where the split does not fit, DataError without files.
    """
    from pgtoolkit.tasks.row_files import SUFFIXES, find_files

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
        files = [
            file for file in sorted(folder.rglob("*")) if file.suffix in SUFFIXES and file.is_file()
        ]
        files = [
            file
            for file in files
            if not any(part.startswith(".") for part in file.relative_to(folder).parts)
        ]
        here = [file for file in files if file.parent == folder]
        splits = sorted(
            {name for file in here or files for name in _USUAL if _is_of(file, name)}
        ) or [None]
        if split is None and (splits == [None] or (here and len(splits) == 1)):
            return find_files(path, "task.path")
        if split is not None and (files := [file for file in files if _is_of(file, split)]):
            return _of_one_data_set(path, split, folder, files)
    known = ", ".join(map(text, splits))
    raise ConfigError(
        refusal(
            setting=f"task.split={text(split)} with task.path={path}",
            needs=f"one of {known}" if len(splits) > 1 else known,
            got=split,
            reason="These are the splits that it has.",
            use=" or ".join(f"task.split={text(name)}" for name in splits),
        )
    )


def _saved(folder: Path) -> list[Path]:
    """The Arrow files of one data set."""
    state = _json(folder / "state.json")
    if state.get("_indices_data_files"):
        reason = "An old version of datasets kept an order beside the rows"
        raise DataError(
            f"{folder} needs rows in the order of its files. {reason}. Save it again with a newer "
            "one."
        )
    files = [folder / Path(one["filename"]).name for one in state["_data_files"]]
    if missing := [file.name for file in files if not file.is_file()]:
        raise DataError(
            f"{folder} lacks {', '.join(missing)}, which its state.json names. Copy or save it "
            "again."
        )
    return files


def _of_one_data_set(path: str, split: str, folder: Path, files: list[Path]) -> list[Path]:
    """The files of a split; ConfigError where they are of several data sets."""
    homes = sorted(
        {file.parent.parent if file.parent.name == split else file.parent for file in files}
    )
    if len(homes) > 1:
        raise ConfigError(
            refusal(
                setting=f"task.path={path}",
                needs="one data set",
                got=len(homes),
                reason="The split is in "
                f"{', '.join(str(home.relative_to(folder)) for home in homes[:4])}.",
                use=f"task.path={homes[0]}",
            )
        )
    return files


def _is_of(file: Path, split: str) -> bool:
    name = re.fullmatch(rf"{re.escape(split)}(-\d+-of-\d+(-\w+)?)?", file.stem)
    return bool(name) or file.parent.name == split


def _json(file: Path) -> dict[str, Any]:
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
    """Return the rows of all files, by their numbers.

    answer_pattern: its one group is the answer, where it matches last; None: the whole field is.
        keep_rows: with all
    their columns, of which `answer` is then the answer.
    Raises DataError with all that is wrong with them.
    """
    from pgtoolkit.tasks.row_files import Problems, open_files

    problems = Problems(f"the prompts of task.path={path} cannot be used")
    prompts = []
    columns = None if keep_rows else (prompt_field, answer_field, _VERL, TOOLS)
    for file in open_files(prompt_files(path, split, config), columns):
        for number, _, row in file.rows():
            place = f"{file.label}:{number}"
            if isinstance(row, str):
                problems.add(place, row)
                continue
            there = ", ".join(file.names or row) or "no fields"
            if _is_of_verl(row, answer_field):
                row[answer_field] = row[_VERL]["ground_truth"]
            if has_tools(row):
                problems.add(f"{place}:{TOOLS}", UNUSED_TOOLS)
            values = []
            readers = {
                "prompt": _prompt,
                "answer": functools.partial(_answer, pattern=answer_pattern),
            }
            for key, column in (("prompt", prompt_field), ("answer", answer_field)):
                try:
                    if row.get(column) is None:
                        raise ValueError("is missing")
                    values.append(readers[key](row[column]))
                except ValueError as reason:
                    other = "messages" if key == "prompt" and "messages" in row else "COLUMN"
                    use = "" if column in row else f". Use task.{key}_field={other}"
                    problems.add(f"{place}:{column}", f"{reason}; the row has {there}{use}")
            if len(values) == 2:
                (asked, messages), answer = values
                kept = {name: _plain(value) for name, value in row.items()} if keep_rows else None
                if kept is not None and answer_pattern is not None:
                    kept["answer"] = answer
                prompts.append(Prompt(asked, answer, len(prompts), place, messages, row=kept))
    problems.raise_if_any()
    if not prompts:
        raise DataError(f"task.path={path} needs at least one prompt (got none).")
    return prompts


def notes_on_columns(
    path: str, split: str | None, config: str | None, answer_field: str
) -> list[str]:
    """Return what may surprise of the columns that are read, by the first row."""
    from pgtoolkit.tasks.row_files import open_files

    (file,) = open_files(prompt_files(path, split, config)[:1], (answer_field, _VERL))
    _, _, row = next(file.rows())
    if isinstance(row, str) or not _is_of_verl(row, answer_field):
        return []
    return [
        f"{file.label} has prompts as verl writes them: the answer is {_VERL}.ground_truth. "
        "data_source, by which verl chooses how to score, ability and extra_info are not read: "
        "task.verifier scores."
    ]


def has_tools(row: dict[str, Any]) -> bool:
    """Return whether a row has tools; some files keep them as JSON."""
    tools = row.get(TOOLS)
    if tools is None or isinstance(tools, str):
        return tools not in (None, "", "[]", "null")
    return not hasattr(tools, "__len__") or len(tools) > 0


def _is_of_verl(row: dict[str, Any], answer_field: str) -> bool:
    """Return whether a row has its answer where verl keeps it, and no other was asked for."""
    verl = row.get(_VERL)
    return (
        answer_field == "answer"
        and row.get("answer") is None
        and isinstance(verl, dict)
        and "ground_truth" in verl
    )


def _prompt(value: Any) -> tuple[str, tuple[Message, ...] | None]:
    """The prompt's text, and the messages if it is a chat. ValueError says what is wrong."""
    if isinstance(value, str) and value:
        return value, None
    messages = messages_of(value, "a text or a list of chat messages")
    last = messages[-1]
    if last["role"] == "assistant" or not last["content"]:
        raise ValueError(f"needs a last message that the model is to answer (got {last!r:.60})")
    return last["content"], tuple(messages)


def messages_of(value: Any, needs: str = "a list of chat messages") -> list[Message]:
    """The messages of a chat. ValueError says what is wrong."""
    messages = value.tolist() if hasattr(value, "tolist") else value
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(one, dict) for one in messages)
    ):
        raise ValueError(f"needs {needs} (got {messages!r:.40})")
    for one in messages:
        if not all(isinstance(one.get(key), str) for key in ("role", "content")):
            raise ValueError(
                f"needs chat messages whose role and content are texts (got {one!r:.60})"
            )
    # Columnar files give each message all keys that any of them has.
    return [{key: item for key, item in one.items() if item is not None} for one in messages]


def _plain(value: Any) -> Any:
    """Return a value of a row without arrays of NumPy, as which columnar files give lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _answer(value: Any, pattern: str | None = None) -> str:
    """Return the text of an answer, or the part of it that the group of a pattern has matched
    last."""
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


def _text_of_answer(value: Any) -> str:
    if type(value) is int:
        return str(value)
    if type(value) is float and math.isfinite(value):
        return _number(value)
    if isinstance(value, str) and value:
        return value
    raise ValueError(f"needs a text (got {value!r:.40})")


def _number(value: float) -> str:
    """Write a number as a model would: whole ones without a point, those of a float32 column in its
    own digits."""
    import numpy as np

    if value.is_integer() and abs(value) < 1e16:
        return str(int(value))
    with np.errstate(over="ignore"):
        narrow = np.float32(value)
    return str(narrow) if float(narrow) == value else str(value)
