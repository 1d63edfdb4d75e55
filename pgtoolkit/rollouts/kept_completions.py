"""Which completions of a step are kept to be looked at."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path

from pgtoolkit.batch import Document
from pgtoolkit.completion import Prompt
from pgtoolkit.rollouts.advantages import are_equal
from pgtoolkit.runs.completion_files import (
    FOLDER,
    CompletionRow,
    read_completions,
    redacted,
    write_redacted,
)

STEPS_PER_FILE = 100

_SECONDS_BETWEEN_WRITES = 15.0


class KeptCompletions:
    """A few completions of every step of training, in files of STEPS_PER_FILE steps.

    A file is written again, whole, as it grows: at each checkpoint, at the end, and meanwhile every
        few seconds, so
    that a run can be looked at while it goes on. Which completions are kept follows from the step's
    documents alone.

    count: of each step. prompt_of: the prompt of a document. step: the last step before, of a
        resumed run that of its
    checkpoint; the files hold no later one (`drop_completions_after`).
    """

    def __init__(
        self,
        run_dir: Path,
        count: int,
        prompt_of: Callable[[Document], Prompt],
        tokenizer,
        step: int,
    ):
        self._folder, self._count = run_dir / FOLDER, count
        self._prompt_of, self._tokenizer = prompt_of, tokenizer
        self._rows: list[CompletionRow] = []  # of the file that grows
        self._path = self._path_of(step + 1)
        self._last_write = time.monotonic()
        if self._path.exists():
            self._rows = read_completions(self._path)

    def add(self, step: int, documents: list[Document]) -> None:
        """Keep some of a step's documents. Raises StorageError, here or in `write`, if they cannot
        be written."""
        if (path := self._path_of(step)) != self._path:
            self.write()
            self._path, self._rows = path, []
        prompts = {document.group: self._prompt_of(document) for document in documents}
        kept = chosen(
            documents, {group: prompt.place for group, prompt in prompts.items()}, self._count
        )
        rows = [
            row_of(step, d, prompts[d.group], self._tokenizer, float(d.advantages[0])) for d in kept
        ]
        self._rows += redacted(rows)
        if time.monotonic() > self._last_write + _SECONDS_BETWEEN_WRITES:
            self.write()

    def write(self) -> None:
        """What is kept is on the disk."""
        if self._rows:
            write_redacted(self._path, self._rows)
        self._last_write = time.monotonic()

    def _path_of(self, step: int) -> Path:
        first = step - (step - 1) % STEPS_PER_FILE
        return self._folder / f"steps_{first:06d}-{first + STEPS_PER_FILE - 1:06d}.parquet"


def row_of(
    step: int, document: Document, prompt: Prompt, tokenizer, advantage: float | None = None
) -> CompletionRow:
    """A document as it is kept."""
    assert document.model_version is not None
    # of a conversation the completion is all that follows
    first = int(document.loss_mask.int().argmax())
    return CompletionRow(
        step=step,
        name=prompt.place,
        prompt=tokenizer.decode(document.tokens[:first]),
        completion=tokenizer.decode(document.tokens[first:]),
        reward=document.reward,
        rewards={
            k.removeprefix("reward/"): x
            for k, x in document.measures.items()
            if k.startswith("reward/")
        },
        advantage=advantage,
        tokens=document.num_trained,
        finish_reason="length" if document.truncated else "stop",
        version=document.model_version,
        answer=prompt.answer,
        logged=document.logged,
    )


def chosen(documents: list[Document], names: dict[int, str], count: int) -> list[Document]:
    """So many of a step's documents, in their order; names: of the prompt of each group.

    First come prompts whose completions score differently, from which something is learned; among
    those, and among the others, the prompts whose names have the lowest checksum, so that a prompt
    that comes again is kept again. Of a prompt that is not kept whole the best completion comes
    first, then the worst, the second best, and so on.
    """
    groups: dict[int, list[Document]] = {}
    for document in documents:
        groups.setdefault(document.group, []).append(document)

    def rank(group: int) -> tuple[bool, int]:
        rewards = [document.reward for document in groups[group] if document.reward is not None]
        return are_equal(rewards), zlib.crc32(names[group].encode())

    ranked = sorted(groups, key=rank)
    kept = [document for group in ranked for document in _best_and_worst(groups[group])][:count]
    places = {id(document) for document in kept}
    return [document for document in documents if id(document) in places]


def _best_and_worst(documents: list[Document]) -> list[Document]:
    """From both ends in turn, by reward; of equal ones the first comes first. Those without a
    reward are the last."""
    scored = [document for document in documents if document.reward is not None]
    falling = sorted(scored, key=lambda document: -(document.reward or 0.0))
    in_turn = [falling[i // 2 if i % 2 == 0 else -1 - i // 2] for i in range(len(falling))]
    return in_turn + [document for document in documents if document.reward is None]
