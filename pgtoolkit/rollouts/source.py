"""A source of documents: the stream from which steps are made, and outlines of its documents."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from pgtoolkit.document import Document
from pgtoolkit.rollouts.passes import ONE_PASS, Passes


@dataclass(frozen=True, kw_only=True)
class Outline(Document):
    """A document that this rank has not read: all that a rank needs of the others' documents.

    Its vectors lie on torch's device meta: they have a length, but no numbers.
    checksum: the checksum of the document's contents.
    has_signal: True if an advantage is not 0.
    overflows: the answer of `kept_set_overflows`.
    old_log_prob: the mean old log-prob of the trained tokens; NaN if it is unknown.
    """

    checksum: int = 0
    has_signal: bool = True
    overflows: bool = False
    old_log_prob: float = math.nan

    def __post_init__(self):
        """Check nothing, unlike a document, since there are no numbers."""

    @property
    def num_trained(self) -> int:
        return len(self.advantages)  # The mask has no numbers.

    @property
    def kept_set_overflows(self) -> bool:
        return self.overflows


class Source(Protocol):
    """A stream of documents, each at a position: 0, 1, 2 and so on.

    The documents of a group are next to each other, and within the group those of a trajectory. The
    stream comes in batches: rounds of rollouts, or passes over recorded files. Some methods do
    nothing here: a class that makes its documents overrides them, and one that reads its documents
    from files does not.

    num_documents: the length of the stream; None if it has no end, or if the end is not known yet.
    batch_size: the number of documents of a batch.
    has_groups: True if it is known which documents share a prompt.
    passes: how often each batch is trained, and in which order.
    """

    num_documents: int | None = None
    batch_size: int = 0
    has_groups: bool = True
    passes: Passes = ONE_PASS

    @property
    def values_by_key(self) -> dict[str, object]:
        """Return what the rules between parts compare, by the names of keys."""
        return {}

    def before_step(self, position: int, number: int = 0) -> None:
        """Prepare for the step that begins at this position, in pass `number` over its batch.

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
