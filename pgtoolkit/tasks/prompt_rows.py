"""Prompts with their reference answers, read from files and checked: a text, or the messages of a chat."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pgtoolkit.errors import DataError

Message = dict[str, Any]
"""{"role": ..., "content": ...}, and whatever else a chat template reads."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, its reference answer, the index it was asked for by, and where it comes from, such as `a.jsonl:12`.

    messages: of a chat, whose last content is the text; None where the prompt is a text.
    """

    text: str
    answer: str
    index: int
    place: str
    messages: tuple[Message, ...] | None = None


def read_prompts(path: str, split: str | None, prompt_field: str, answer_field: str) -> list[Prompt]:
    """The rows of all files, by their numbers. Raises DataError with all that is wrong with them."""
    from pgtoolkit.tasks.datasets import prompt_files
    from pgtoolkit.tasks.row_files import Problems, open_files

    problems = Problems(f"the prompts of task.path={path} cannot be used")
    prompts = []
    for file in open_files(prompt_files(path, split), (prompt_field, answer_field)):
        for number, _, row in file.rows():
            place = f"{file.label}:{number}"
            if isinstance(row, str):
                problems.add(place, row)
                continue
            there = ", ".join(file.names or row) or "no fields"
            values = []
            for field, read in ((prompt_field, _prompt), (answer_field, _answer)):
                try:
                    if row.get(field) is None:
                        raise ValueError("is missing")
                    values.append(read(row[field]))
                except ValueError as reason:
                    use = ". Use task.prompt_field=messages" if field == prompt_field and "messages" in row else ""
                    problems.add(f"{place}:{field}", f"{reason}; the row has {there}{use}")
            if len(values) == 2:
                (text, messages), answer = values
                prompts.append(Prompt(text, answer, len(prompts), place, messages))
    problems.raise_if_any()
    if not prompts:
        raise DataError(f"task.path={path} needs at least one prompt (got none).")
    return prompts


def _prompt(value: Any) -> tuple[str, tuple[Message, ...] | None]:
    """The prompt's text, and the messages if it is a chat. ValueError says what is wrong."""
    if isinstance(value, str) and value:
        return value, None
    messages = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise ValueError(f"needs a text or a list of chat messages (got {messages!r:.40})")
    for one in messages:
        if not all(isinstance(one.get(key), str) for key in ("role", "content")):
            raise ValueError(f"needs chat messages whose role and content are texts (got {one!r:.60})")
    last = messages[-1]
    if last["role"] == "assistant":
        raise ValueError("needs a last message that the model is to answer (got one of the role assistant)")
    if not last["content"]:
        raise ValueError("needs a last message with a text (got '')")
    # Columnar files give each message all keys that any of them has.
    return last["content"], tuple({key: item for key, item in one.items() if item is not None} for one in messages)


def _answer(value: Any) -> str:
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return str(value)
    if isinstance(value, str) and value:
        return value
    raise ValueError(f"needs a text (got {value!r:.40})")
