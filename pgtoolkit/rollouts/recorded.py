"""Recorded rollouts as a source of documents: indexed once, then read from the files as they are
needed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pgtoolkit.batch import OPTIONAL_VECTORS, Document
from pgtoolkit.config.schema import Config
from pgtoolkit.config.schema_loss import AdvantageEstimator
from pgtoolkit.config.schema_rollouts import RecordedRolloutConfig
from pgtoolkit.losses.aggregation import AGGREGATIONS
from pgtoolkit.losses.objective import Loss
from pgtoolkit.ranks.agreement import failing_together, of_rank_0
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.rollouts.advantages import Estimator
from pgtoolkit.rollouts.conversations import Conversations
from pgtoolkit.rollouts.indexing import Indexing
from pgtoolkit.rollouts.recorded_index import RecordedIndex, first_parts
from pgtoolkit.rollouts.rows import COLUMNS, Row, Rules, parse_row
from pgtoolkit.rollouts.steps import Outline, Source
from pgtoolkit.tasks.row_files import find_files, open_files
from pgtoolkit.tasks.shuffle import shuffled

log = logging.getLogger("pgtoolkit")


@dataclass(eq=False)
class RecordedRollouts(Source):
    """The documents of JSONL and Parquet files (docs/data.md), `epochs` times over.

    estimator: `given` reads the recorded advantages, `none` nothing; any other computes them from
        all rewards of a
    group.
    reads_old_log_probs: as of the loss family. Where it is False no row needs any, and with `given`
        rows of which none
    has an advantage or a reward are examples to imitate: every advantage is 1.
    vocabulary_size: of the model; token ids are below it. max_tokens: the longest document that
        fits, if limited.
    needs: fields that matter although the estimator does not ask for them: group_id (prompt_mean),
        sampling_log_probs
    (a correction), ref_log_probs (a penalty), truncated (rollout.truncated=mask).
    first: read so many rows of each file at most, only to see whether they would be refused.
    layout: the ranks, of which the first reads the files for the index and gives it to the others.
        run_dir: where the
    index is kept; None: nowhere. tokenizer: gives the model's, and its end-of-sequence tokens, for
    rows of texts.

    The constructor has every row read once, unless the run has an index of these files, and raises
    DataError for what cannot be trained on. The index has about 90 bytes per document, among them a
    checksum by which a row that was changed is noticed when it is read again (DataError). The
    documents of a group, and those of a trajectory, have consecutive positions wherever they stand
    in the files; groups come in the order of their first document or, with shuffle, in another one
    every epoch. A batch is an epoch. groups: (documents,) int64, of an epoch, in the order of the
    files.
    """

    config: RecordedRolloutConfig
    estimator: Estimator
    vocabulary_size: int
    seed: int = 0
    needs: tuple[str, ...] = ()
    max_tokens: int | None = None
    reads_old_log_probs: bool = True
    first: int | None = None
    layout: Layout = ONE_PROCESS
    run_dir: Path | None = None
    tokenizer: Callable[[], tuple[Any, Sequence[int]]] | None = None

    def __post_init__(self):
        config, estimator, has_old = self.config, self.estimator.name, self.reads_old_log_probs
        reads_rewards = estimator not in (AdvantageEstimator.given, AdvantageEstimator.none)
        self._needs_groups = "group_id" in self.needs
        self._needs_groups |= reads_rewards and estimator != AdvantageEstimator.reinforce_plus_plus
        asked = {
            "reward": reads_rewards,
            "advantage": estimator == AdvantageEstimator.given and has_old,
        }
        asked |= {name: name in self.needs for name in (*OPTIONAL_VECTORS, "truncated")} | {
            "old_log_probs": has_old
        }
        required = [name for name, is_asked in asked.items() if is_asked]
        texts = self.tokenizer and Conversations(self.tokenizer, config.chat, config.trained_turns)
        limits = self.max_tokens, config.max_completion_length, config.too_long
        self._rules = Rules(self.vocabulary_size, required, *limits, texts)
        with failing_together(self.layout):
            made = self._indexed() if self.layout.rank == 0 else None
        self.index, paths = of_rank_0(made, self.layout)
        self._files = open_files(paths, COLUMNS)
        self._rows, self.groups, self.has_groups = (
            self.index.rows,
            self.index.rows["group"],
            self.index.has_groups,
        )
        self._num_groups = int(self.groups.max()) + 1
        self._order = functools.lru_cache(maxsize=1)(self._order_of)
        self.batch_size = len(self._rows)
        self.num_documents = self.batch_size * self.config.epochs

    def document(self, position: int) -> Document:
        epoch, index = self._place(position)
        row = self._read(index)
        advantage = self._rows["advantage"][index]  # NaN where each token has its own
        name, (group, trajectory) = self._name(index, epoch, row.id), self._numbers(index, epoch)
        return row.document(
            None if np.isnan(advantage) else float(advantage), group, name, trajectory
        )

    def notes_on_texts(self) -> list[str]:
        """Return what may surprise of how rows of texts become tokens; nothing where rows have
        tokens."""
        texts = self._rules.texts
        return texts.notes() if texts is not None and texts.read else []

    def outline(self, position: int) -> Outline:
        """What the index knows of a document; nothing is read."""
        epoch, index = self._place(position)
        row = self._rows[index]
        numbers, (group, trajectory) = (
            torch.empty(row["trained"], device="meta"),
            self._numbers(index, epoch),
        )
        return Outline(
            tokens=torch.empty(row["tokens"], dtype=torch.int64, device="meta"),
            loss_mask=torch.empty(row["tokens"], dtype=torch.bool, device="meta"),
            advantages=numbers,
            group=group,
            name=self._name(index, epoch),
            trajectory=trajectory,
            reward=None if np.isnan(row["reward"]) else float(row["reward"]),
            model_version=None if np.isnan(row["model_version"]) else int(row["model_version"]),
            truncated=None if row["truncated"] < 0 else bool(row["truncated"]),
            exact_match=None if row["exact_match"] < 0 else bool(row["exact_match"]),
            old_log_probs=numbers if row["old_log_probs"] else None,
            sampling_log_probs=numbers if row["sampling_log_probs"] else None,
            ref_log_probs=numbers if row["ref_log_probs"] else None,
            checksum=int(row["checksum"]),
            has_signal=bool(row["has_signal"]),
            score_failed=bool(row["score_failed"]),
            old_log_prob=float(row["old_log_prob"]),
        )

    def _indexed(self) -> tuple[RecordedIndex, list[Path]]:
        paths = find_files(self.config.path, "rollout.path")
        files = open_files(paths, COLUMNS)
        indexing = Indexing(
            files, self.config, self.estimator, self._rules, self._needs_groups, self.first
        )
        index = None if self.run_dir is None else indexing.kept(self.run_dir)
        if index is None:
            index = indexing.make()
            if self.run_dir is not None:
                index.write(self.run_dir)
        if self.first is None:
            for note in index.notes:
                log.warning("note: %s", note)
        return index, paths

    def _place(self, position: int) -> tuple[int, int]:
        """Of a position the epoch, and the row by its number in the order of the files."""
        epoch, place = divmod(position, self.batch_size)
        return epoch, int(self._order(epoch)[place])

    def _order_of(self, epoch: int) -> np.ndarray:
        """Index of each document of an epoch, in the order of positions."""
        shuffles = self.config.shuffle
        ranks = (
            shuffled(self._num_groups, self.seed, epoch)
            if shuffles
            else np.arange(self._num_groups)
        )
        return np.lexsort((first_parts(self._rows), ranks[self.groups]))

    def _read(self, index: int) -> Row:
        file, place, checksum = (self._rows[name][index] for name in ("file", "place", "checksum"))
        row = parse_row(self._files[file].row(int(place)), self._rules)
        if not isinstance(row, Row) or row.digest() != checksum:
            raise self._files[file].changed()
        return row

    def _numbers(self, index: int, epoch: int) -> tuple[int, int | None]:
        """Of the group and of the trajectory, each unique over the epochs."""
        trajectory = int(self._rows["trajectory"][index])
        own = None if trajectory < 0 else epoch * self.batch_size + trajectory
        return epoch * self._num_groups + int(self.groups[index]), own

    def _name(self, index: int, epoch: int, row_id: str | None = None) -> str:
        name = (
            row_id
            or f"{self._files[self._rows['file'][index]].label}:{self._rows['number'][index]}"
        )
        return name if epoch == 0 else f"{name} (epoch {epoch + 1})"


def recorded_rollouts(
    config: Config,
    loss: Loss,
    vocabulary_size: int,
    max_tokens: int | None,
    first: int | None = None,
    layout: Layout = ONE_PROCESS,
    run_dir: Path | None = None,
    tokenizer: Callable[[], tuple[Any, Sequence[int]]] | None = None,
) -> RecordedRollouts:
    """The recorded rollouts of a configuration, with what its loss needs of them; DataError where
    they lack that."""
    asked = {
        "group_id": AGGREGATIONS[config.aggregation.mode].needs_groups,
        "sampling_log_probs": loss.needs_sampling_log_probs,
        "ref_log_probs": config.kl.reference == "recorded",
        "truncated": loss.masks_truncated,
    }
    assert isinstance(config.rollout, RecordedRolloutConfig)
    needs = tuple(name for name, is_asked in asked.items() if is_asked)
    options = (
        config.seed,
        needs,
        max_tokens,
        loss.reads_old_log_probs,
        first,
        layout,
        run_dir,
        tokenizer,
    )
    return RecordedRollouts(config.rollout, Estimator.of(config), vocabulary_size, *options)
