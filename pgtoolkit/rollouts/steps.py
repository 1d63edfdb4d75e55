"""The step loader: turns a stream of documents into optimizer steps with their totals.

Which documents make a step depends on `docs_per_step` and on where trajectories, groups and batches
of rollouts end, not on how the step is then cut into micro-batches. Only where `docs_per_step` is 0
a step is instead as many documents as fit into `micro_batches_per_step`. The loader's place in the
data is one integer, the position of the next document.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from pgtoolkit.batch import (
    Document,
    Step,
    StepTotals,
    cut,
    known_vectors,
    pack,
    trajectories_of,
    vectors_of_critic,
)
from pgtoolkit.config.schema_step import AccumulationConfig, LastStep
from pgtoolkit.errors import DataError
from pgtoolkit.ranks.agreement import check_same, failing_together
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout

_MAX_EMPTY_BATCHES = 10
"""Batches in a row without anything to train on, after which the run ends with an error."""

_NO_SIGNAL = (
    f"{_MAX_EMPTY_BATCHES} batches in a row have no prompt whose completions score "
    "differently, so rollout.uninformative=drop leaves nothing to train on. Is the task too hard "
    "or too easy, or are completions cut off before the answer? Use another task, another model to "
    "start from, or rollout.uninformative=train."
)
_ALL_SOLVED = (
    "the first batch has retired every prompt (rollout.retire_at), and none of its prompts has "
    "completions that score differently, so there is nothing to train on. The policy solves them "
    "all: use harder prompts, or rollout.retire_at=null."
)


@dataclass(frozen=True)
class Outline(Document):
    """A document that this rank has not read: all that a rank needs of the others' documents.

    Its vectors lie on torch's device meta: they have a length, but no numbers.
    checksum: the checksum of the document's contents.
    has_signal: True if an advantage is not 0.
    old_log_prob: the mean old log-prob of the trained tokens; NaN where it is not known.
    """

    checksum: int = 0
    has_signal: bool = True
    old_log_prob: float = math.nan

    def __post_init__(self):
        """Check nothing, unlike a document, since there are no numbers."""


class Source(Protocol):
    """A stream of documents, each at a position: 0, 1, 2 and so on.

    The documents of a group are next to each other, and within the group those of a trajectory. The
    stream comes in batches: rounds of rollouts, or passes over recorded files. Some methods do
    nothing here: a class that makes its documents overrides them, and one that reads its documents
    from files does not.

    num_documents: the length of the stream; None if it has no end, or if the end is not known yet.
    batch_size: the number of documents of a batch.
    has_groups: True if it is known which documents share a prompt.
    """

    num_documents: int | None = None
    batch_size: int = 0
    has_groups: bool = True

    def before_step(self, position: int) -> None:
        """Prepare for the step that begins at this position.

        It is called once, before the documents of the step are asked for.
        """

    def document(self, position: int) -> Document:
        """Return the document at this position; make or read it if that has not been done."""
        raise NotImplementedError

    def outline(self, position: int) -> Document:
        """Return the document, or an `Outline` if the document can be left unread."""
        return self.document(position)

    def batch_end(self, position: int) -> int:
        """Return the position after the batch in which this position lies."""
        return (position // self.batch_size + 1) * self.batch_size

    def state_dict(self) -> dict:
        """Return what a checkpoint keeps of the source, beside the position."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Go on from a state that `state_dict` returned. Raises ValueError for any other one."""

    def seconds(self) -> dict[str, float]:
        """Return the seconds since the last call that each stage of making documents took.

        It is empty if documents are only read.
        """
        return {}

    def close(self) -> None:
        """End the threads and processes that make documents."""


@dataclass(eq=False)
class StepLoader:
    """Iterates over the steps of a run, from the current position on.

    A step ends only where a trajectory ends.
    accumulation: how many documents a step has.
    close_on_groups: True if a step ends only where a group ends, which prompt_mean needs.
    max_steps: the steps of the whole run, with those before a resume.
    layout: the ranks, among which the documents of every step are divided.

    The loader has a length, because Lightning then fetches no step ahead. A step must not be
    fetched ahead: its rollouts are generated by the policy that the previous step left, and a
    checkpoint after a step keeps the loader's state after that step.
    """

    source: Source
    accumulation: AccumulationConfig
    close_on_groups: bool
    max_steps: int
    layout: Layout = ONE_PROCESS
    _position: int = 0
    _num_steps: int = 0
    _num_left_out_in_a_row: int = 0

    def __post_init__(self) -> None:
        # Of several ranks each reads its own share alone, and looks at outlines of all documents.
        is_alone = self.layout.size("data_parallel") == 1
        self._document_or_outline = self.source.document if is_alone else self.source.outline

    def __len__(self) -> int:
        # With a length of 0 Lightning would not start, and so would not evaluate either.
        return max(1, self.max_steps - self._num_steps)

    def __iter__(self) -> Iterator[Step]:
        rank = self.layout.rank_in("data_parallel")
        size = self.layout.size("data_parallel")
        while self._num_steps < self.max_steps:
            with failing_together(self.layout):
                documents = self._next_documents()
            if self.layout.world_size > 1:
                name = f"the documents of step {self._num_steps + 1}"
                check_same(self.layout, name, _digest(documents))
            if not documents:
                return
            self._num_steps += 1
            share = divide_among_ranks(documents, size)[rank]
            if isinstance(documents[0], Outline):
                # Such a source leaves out no document, so that the positions are consecutive.
                start = self._position - len(documents)
                with failing_together(self.layout):
                    for place in share:
                        documents[place] = self.source.document(start + place)
            step = make_step(documents, self.accumulation.max_tokens, self._state(), rank, size)
            yield replace(step, seconds=self.source.seconds())

    def state_dict(self) -> dict:
        return loadable(self._state())

    def _state(self) -> dict:
        """Return the state for `loadable`, with a function that returns the source's state.

        The source may be sampling the next batch, and its state waits for that. A checkpoint should
        wait, but not each step.
        """
        return {
            "position": self._position,
            "num_steps": self._num_steps,
            "source": self.source.state_dict,
        }

    def load_state_dict(self, state: dict) -> None:
        self._position = state["position"]
        self._num_steps = state["num_steps"]
        self.source.load_state_dict(state["source"])

    def _next_documents(self) -> list[Document]:
        """Return the documents of the next step, and advance the position; none at the data's end.

        Raises DataError if there is nothing to train on.
        """
        self.source.before_step(self._position)
        num_dropped = 0
        attempts = 2  # the rest of a batch, then a complete batch
        while attempts > 0:
            start = self._position
            documents, self._position = self._collect(start)
            if not documents and self._position > start:
                continue  # Every document in the rest of the batch is left out.
            attempts -= 1
            drops = self.accumulation.last_step == LastStep.drop
            if documents and drops and not self._is_full(documents):
                num_dropped = len(documents)  # The end of the batch has cut this step short.
            elif documents or self._num_steps > 0:
                return documents
        raise DataError(nothing_to_train(num_dropped) if num_dropped else _ALL_SOLVED)

    def _collect(self, start: int) -> tuple[list[Document], int]:
        """Return (the documents of a step that begins at `start`, the position after them).

        They end where the step is full, or where it must end. Documents that are left out are
        passed over, and may be all there is.
        """
        documents: list[Document] = []
        position = start
        while not self._must_end(position, start):
            if documents and self._closes_before(position, documents):
                break
            document = self._document_or_outline(position)
            position += 1
            if not document.left_out:
                self._num_left_out_in_a_row = 0
                documents.append(document)
                continue
            self._num_left_out_in_a_row += 1
            if self._num_left_out_in_a_row >= _MAX_EMPTY_BATCHES * self.source.batch_size:
                raise DataError(_NO_SIGNAL)
        return documents, position

    def _must_end(self, position: int, start: int) -> bool:
        """Return True if a step that begins at `start` must end before `position`.

        It must where the data end, and where its batch ends unless last_step is carry.
        """
        # Ask again each time: a source may know its end only once the last prompt is retired.
        end = self.source.num_documents
        if self.accumulation.last_step != LastStep.carry and (end is None or start < end):
            end = self.source.batch_end(start)
        return end is not None and position >= end

    def _closes_before(self, position: int, documents: list[Document]) -> bool:
        """Return True if the step of `documents` is full and may end before `position`.

        The document at `position` is asked for only where it must be: that may start the next round
        of rollouts, which should wait for this step's update.
        """
        if len(documents) < self.accumulation.docs_per_step:
            return False
        at_batch_end = position == self.source.batch_end(position - 1)
        last = documents[-1]
        for name in ("trajectory", "group") if self.close_on_groups else ("trajectory",):
            # Neither a trajectory nor a group goes on in another batch.
            number = None if at_batch_end else getattr(last, name)
            if number is not None and getattr(self._document_or_outline(position), name) == number:
                return False
        if self.accumulation.docs_per_step > 0:
            return True
        if self._document_or_outline(position).left_out:
            return False
        with_next = cut(
            [*documents, self._document_or_outline(position)], self.accumulation.max_tokens
        )
        assert self.accumulation.micro_batches_per_step is not None
        return len(with_next) > self.accumulation.micro_batches_per_step

    def _is_full(self, documents: list[Document]) -> bool:
        """Return True if the documents are at least as many as a step has."""
        if self.accumulation.docs_per_step > 0:
            return len(documents) >= self.accumulation.docs_per_step
        assert self.accumulation.micro_batches_per_step is not None
        micro_batches = cut(documents, self.accumulation.max_tokens)
        return len(micro_batches) >= self.accumulation.micro_batches_per_step


def loadable(state_after: dict) -> dict:
    """Return a step's `state_after` in the form that `StepLoader.load_state_dict` takes.

    This waits for the batch that is being sampled. Every rank must call it.
    """
    return state_after | {"source": state_after["source"]()}


def _digest(documents: list[Document]) -> int:
    """Return a checksum of all that the loss reads of the documents."""
    digest = len(documents)
    for document in documents:
        if isinstance(document, Outline):
            facts = (document.group, document.trajectory, document.checksum)
            digest = zlib.crc32(repr(facts).encode(), digest)
            continue
        known = *known_vectors(document), *vectors_of_critic([document])
        for name in ("tokens", "loss_mask", "advantages", *known):
            digest = zlib.crc32(getattr(document, name).numpy().tobytes(), digest)
        digest = zlib.crc32(repr((document.group, document.trajectory, known)).encode(), digest)
    return digest


def make_step(
    documents: list[Document],
    max_tokens: int,
    state_after: dict | None = None,
    data_rank: int = 0,
    data_size: int = 1,
) -> Step:
    """Return the step of these documents, in micro-batches of at most `max_tokens`.

    documents: those of all `data_size` ranks. The totals count all of them.
    state_after: see `Step`.
    data_rank: the rank whose share is packed into the micro-batches.

    All ranks have the same number of micro-batches, so that none waits for another in vain: where
    the documents of a rank run out, its further micro-batches are empty. Groups and trajectories
    are numbered within the step.
    """
    trained = [document.num_trained for document in documents]
    groups, tokens_per_group = _numbered([document.group for document in documents], trained)
    trajectories = tokens_per_trajectory = None
    if any(document.trajectory is not None for document in documents):
        trajectories, tokens_per_trajectory = _numbered(trajectories_of(documents), trained)
    totals = StepTotals(
        num_documents=len(documents),
        num_tokens=sum(trained),
        num_empty_documents=trained.count(0),
        num_groups=len(tokens_per_group),
        tokens_per_group=tokens_per_group,
        tokens_per_trajectory=tokens_per_trajectory,
    )
    shares = divide_among_ranks(documents, data_size)
    num_parts = max(len(cut([documents[i] for i in share], max_tokens)) for share in shares)
    numbered = []
    for i in shares[data_rank]:
        trajectory = None if trajectories is None else trajectories[i]
        numbered.append(replace(documents[i], group=groups[i], trajectory=trajectory))
    parts = cut(numbered, max_tokens)
    parts += [[]] * (num_parts - len(parts))
    known = known_vectors(*documents)
    micro_batches = [pack(part, known, has_trajectories=trajectories is not None) for part in parts]
    return Step(micro_batches, totals, documents, state_after or {})


def _numbered(names: Sequence[Hashable], trained: list[int]) -> tuple[list[int], torch.Tensor]:
    """Number the groups of documents, or their trajectories, from 0 in the order of the documents.

    names: the name of each document's group; equal names are one group.
    trained: the trained tokens of each document.
    Return (the number of each document's group, the trained tokens of each group). The second is
    (groups,) int64.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    index = [numbers[name] for name in names]
    tokens = [0] * len(numbers)
    for number, count in zip(index, trained, strict=True):
        tokens[number] += count
    return index, torch.tensor(tokens, dtype=torch.int64)


def divide_among_ranks(documents: list[Document], num_ranks: int) -> list[list[int]]:
    """Return for each rank the indices of its documents, in increasing order.

    All ranks get about the same number of tokens: the longest document is dealt first, and each one
    goes to the rank that has the fewest tokens so far.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for place in sorted(range(len(documents)), key=lambda i: -documents[i].num_tokens):
        rank = tokens.index(min(tokens))
        shares[rank].append(place)
        tokens[rank] += documents[place].num_tokens
    return [sorted(share) for share in shares]


def nothing_to_train(documents: int) -> str:
    """Return the message for batches of this many documents, which are fewer than a step has."""
    return (
        f"accumulation.last_step=drop leaves nothing to train on (got {documents} documents in a "
        "batch). A batch has fewer documents than a step. Use a smaller "
        "accumulation.docs_per_step or last_step=short."
    )
