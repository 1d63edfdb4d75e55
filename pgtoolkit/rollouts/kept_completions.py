"""The few completions of every step that are kept for people to look at."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pgtoolkit.completion import Prompt
from pgtoolkit.document import Document, SampledDocument
from pgtoolkit.rollouts.advantages import are_equal
from pgtoolkit.runs.completion_files import (
    FOLDER,
    CompletionRow,
    read_completions,
    redacted,
    write_redacted,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEPS_PER_FILE = 100

_SECONDS_BETWEEN_WRITES = 15.0


class KeptCompletions:
    """A few completions of every step of training, in files of STEPS_PER_FILE steps.

    A file is written anew as it grows: at each checkpoint, at the end, and every few seconds in
    between, so that one can look at a run that is still going. Which completions are kept follows
    from the step's documents alone.

    count: completions of each step.
    prompt_of: returns the prompt of a document.
    step: the last step before; in a resumed run, that of its checkpoint. The files hold no later
        one (`drop_completions_after`).
    """

    def __init__(
        self,
        run_dir: Path,
        count: int,
        prompt_of: Callable[[Document], Prompt],
        tokenizer: PreTrainedTokenizerBase,
        step: int,
    ):
        self._folder = run_dir / FOLDER
        self._count = count
        self._prompt_of = prompt_of
        self._tokenizer = tokenizer
        self._path = self._path_of(step + 1)
        # The rows of the file that grows.
        self._rows: list[CompletionRow] = []
        self._last_write = time.monotonic()
        if self._path.exists():
            self._rows = read_completions(self._path)

    def add(self, step: int, documents: list[Document]) -> None:
        """Keep some of a step's documents. Raises StorageError, here or in `write`, if they cannot
        be written."""
        path = self._path_of(step)
        if path != self._path:
            self.write()
            self._path = path
            self._rows = []
        first_of_group = {document.group: document for document in reversed(documents)}
        prompts = {group: self._prompt_of(first) for group, first in first_of_group.items()}
        names = {group: prompt.place for group, prompt in prompts.items()}
        rows = []
        for document in chosen(documents, names, self._count):
            advantage = float(document.advantages[0])
            prompt = prompts[document.group]
            rows.append(row_of(step, document, prompt, self._tokenizer, advantage))
        self._rows += redacted(rows)
        if time.monotonic() > self._last_write + _SECONDS_BETWEEN_WRITES:
            self.write()

    def write(self) -> None:
        """Write the rows that are kept to the disk."""
        if self._rows:
            write_redacted(self._path, self._rows)
        self._last_write = time.monotonic()

    def _path_of(self, step: int) -> Path:
        first = step - (step - 1) % STEPS_PER_FILE
        return self._folder / f"steps_{first:06d}-{first + STEPS_PER_FILE - 1:06d}.parquet"


def row_of(
    step: int,
    document: SampledDocument,
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    advantage: float | None = None,
) -> CompletionRow:
    """Return a document as the row that is kept of it."""
    assert document.model_version is not None
    # The completion of a conversation is all that follows its prompt.
    first = int(document.loss_mask.int().argmax())
    # A score that failed counts as not right; whether the completion is wrong nobody knows.
    is_unknown = document.score_failed and not document.exact_match
    return CompletionRow(
        step=step,
        name=prompt.place,
        prompt=str(tokenizer.decode(document.tokens[:first])),
        completion=str(tokenizer.decode(document.tokens[first:])),
        reward=document.reward,
        exact_match=None if is_unknown else document.exact_match,
        score_failed=document.score_failed,
        rewards={
            name.removeprefix("reward/"): score
            for name, score in document.measures.items()
            if name.startswith("reward/")
        },
        advantage=advantage,
        tokens=document.num_trained,
        finish_reason="length" if document.truncated else "stop",
        version=document.model_version,
        answer=prompt.answer,
        logged=document.logged,
    )


def chosen(documents: list[Document], names: Mapping[int, str], count: int) -> list[Document]:
    """Return `count` of a step's documents, in their order.

    names: of the prompt of each group.

    First come prompts whose completions score differently, from which something is learned. Within
    these, and within the others, prompts with the lowest checksum of their name come first, so that
    a prompt that is asked again is kept again. If not all completions of a prompt are kept, the
    best comes first, then the worst, the second best, and so on.
    """
    groups: dict[int, list[Document]] = {}
    for document in documents:
        groups.setdefault(document.group, []).append(document)

    def rank(group: int) -> tuple[bool, int]:
        rewards = [document.reward for document in groups[group] if document.reward is not None]
        return are_equal(rewards), zlib.crc32(names[group].encode())

    ranked = sorted(groups, key=rank)
    kept = [document for group in ranked for document in _best_and_worst(groups[group])][:count]
    kept_ids = {id(document) for document in kept}
    return [document for document in documents if id(document) in kept_ids]


def _best_and_worst(documents: list[Document]) -> list[Document]:
    """Return documents by reward, from both ends in turn; those without a reward come last.

    Of documents with equal rewards the first comes first.
    """
    scored = [document for document in documents if document.reward is not None]
    falling = sorted(scored, key=lambda document: -(document.reward or 0.0))
    in_turn = [falling[i // 2 if i % 2 == 0 else -1 - i // 2] for i in range(len(falling))]
    return in_turn + [document for document in documents if document.reward is None]
