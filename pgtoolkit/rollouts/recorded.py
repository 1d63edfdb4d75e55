"""Recorded rollouts as a source of documents: indexed once, then read from the files as they are
needed."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pgtoolkit.document import OPTIONAL_VECTORS, TOP_VECTORS, Document
from pgtoolkit.ranks.agreement import failing_together, of_rank_0
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.rollouts.conversations import Conversations, LoadTokenizer
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.indexing import Indexing, notes_on_weights
from pgtoolkit.rollouts.parsed_rows import parse_row
from pgtoolkit.rollouts.recorded_index import RecordedIndex, first_parts
from pgtoolkit.rollouts.rows import COLUMNS, RecordedRow, Rules
from pgtoolkit.rollouts.rules_in_python import misfit
from pgtoolkit.rollouts.settings import AdvantageEstimator, RecordedRolloutSettings
from pgtoolkit.rollouts.source import Outline, Source
from pgtoolkit.tasks.row_files import find_files, open_files
from pgtoolkit.tasks.shuffle import shuffled

log = logging.getLogger("pgtoolkit")


@dataclass(eq=False)
class RecordedRollouts(Source):
    """The documents of JSONL and Parquet files (docs/data.md), `epochs` times over.

    estimator: `given` reads the recorded advantages, `none` nothing; any other computes them from
        the rewards of each group.
    reads_old_log_probs: as in the loss family. Where it is False no row needs any, and with `given`
        rows of which none has an advantage or a reward are examples to imitate: every advantage is
        1.
    vocabulary_size: of the model; token ids are below it. None: unknown. max_tokens: the longest
        document that fits, if limited.
    needs: fields that are needed for other reasons than the estimator: group_id (prompt_mean),
        sampling_log_probs (a correction), ref_log_probs (a penalty), truncated
        (rollout.truncated=mask), TOP_VECTORS (score centering).
    first: the number of rows of each file to read at most, only to see whether they would be
        refused; None: all.
    layout: the ranks. The first one reads the files for the index and gives it to the others.
    run_dir: the index is kept there; None: nowhere.
    tokenizer: gives the model's tokenizer and its end-of-sequence tokens, for rows of texts.
    one_advantage: with `given`, whether all tokens of a row need the same advantage.
    instead_of_parts, without_old_log_probs: see `Rules`.

    The constructor has every row read once, unless the run has an index of these files, and raises
    DataError for what cannot be trained on. The index has about 90 bytes per document, among them a
    checksum: a row that was changed is noticed when it is read again (DataError).

    The documents of a group, and those of a trajectory, have consecutive positions wherever they
    are in the files; groups come in the order of their first document or, with shuffle, in another
    order every epoch. A batch is an epoch. groups: (documents,) int64, the group of each document
    of an epoch, in the order of the files.
    """

    config: RecordedRolloutSettings
    estimator: Estimator
    vocabulary_size: int | None
    seed: int = 0
    needs: tuple[str, ...] = ()
    max_tokens: int | None = None
    reads_old_log_probs: bool = True
    first: int | None = None
    layout: Layout = ONE_PROCESS
    run_dir: Path | None = None
    tokenizer: LoadTokenizer | None = None
    one_advantage: bool = False
    instead_of_parts: str | None = None
    without_old_log_probs: str | None = (
        "reads_old_log_probs=False with a loss that reads none, such as Loss(Reinforce(), ...)"
    )

    def __post_init__(self) -> None:
        problem = misfit(self.values_by_key)
        if problem is not None:
            raise ValueError(problem)
        self._rules = self._rules_for_rows()
        with failing_together(self.layout):
            indexed = self._indexed() if self.layout.rank == 0 else None
        self.index, paths = of_rank_0(indexed, self.layout)
        self._files = open_files(paths, self._columns)
        self._rows = self.index.rows
        self.groups = self._rows["group"]
        self.has_groups = self.index.has_groups
        self._num_groups = int(self.groups.max()) + 1
        self._order = functools.lru_cache(maxsize=1)(self._order_of)
        self.batch_size = len(self._rows)
        self.num_documents = self.batch_size * self.config.epochs

    @property
    def values_by_key(self) -> dict[str, object]:
        values = {f"rollout.{name}": value for name, value in vars(self.config).items()}
        return values | {"rollout": self.config.name} | self.estimator.values_by_key

    def document(self, position: int) -> Document:
        epoch, index = self._place(position)
        row = self._read(index)
        advantage = self._rows["advantage"][index]  # NaN where each token has its own
        return row.document(
            None if np.isnan(advantage) else float(advantage),
            self._group(index, epoch),
            self._name(index, epoch, row.id),
            self._trajectory(index, epoch),
        )

    @property
    def longest(self) -> int:
        """Return the tokens of the longest document."""
        return int(self._rows["tokens"].max())

    def notes(self) -> list[str]:
        """Return what may surprise in how texts became tokens, and in how rows are weighted."""
        texts = self._rules.texts
        on_texts = texts.notes() if texts is not None and texts.read else []
        return on_texts + notes_on_weights(self._rows, self.estimator, self._rules)

    def outline(self, position: int) -> Outline:
        """Return what the index knows of a document; nothing is read."""
        epoch, index = self._place(position)
        row = self._rows[index]
        numbers = torch.empty(row["trained"], device="meta")
        return Outline(
            tokens=torch.empty(row["tokens"], dtype=torch.int64, device="meta"),
            loss_mask=torch.empty(row["tokens"], dtype=torch.bool, device="meta"),
            advantages=numbers,
            group=self._group(index, epoch),
            name=self._name(index, epoch),
            trajectory=self._trajectory(index, epoch),
            reward=None if np.isnan(row["reward"]) else float(row["reward"]),
            model_version=None if np.isnan(row["model_version"]) else int(row["model_version"]),
            truncated=None if row["truncated"] < 0 else bool(row["truncated"]),
            exact_match=None if row["exact_match"] < 0 else bool(row["exact_match"]),
            old_log_probs=numbers if row["old_log_probs"] else None,
            sampling_log_probs=numbers if row["sampling_log_probs"] else None,
            ref_log_probs=numbers if row["ref_log_probs"] else None,
            sampling_top_ids=numbers if "sampling_top_ids" in self.needs else None,
            sampling_top_log_probs=numbers if "sampling_top_log_probs" in self.needs else None,
            sampling_kept_ids=numbers if row["sampling_kept_ids"] else None,
            overflows=bool(row["kept_set_overflows"]),
            checksum=int(row["checksum"]),
            has_signal=bool(row["has_signal"]),
            score_failed=bool(row["score_failed"]),
            old_log_prob=float(row["old_log_prob"]),
        )

    def _rules_for_rows(self) -> Rules:
        """Return the rules that rows are checked by."""
        texts = None
        if self.tokenizer is not None:
            texts = Conversations(self.tokenizer, self.config.chat, self.config.trained_turns)
        return Rules(
            vocabulary_size=self.vocabulary_size,
            required=self._required_fields(),
            max_tokens=self.max_tokens,
            max_completion_length=self.config.max_completion_length,
            too_long=self.config.too_long,
            texts=texts,
            one_advantage=self.one_advantage and self.estimator.name == AdvantageEstimator.given,
            instead_of_parts=self.instead_of_parts,
            without_old_log_probs=self.without_old_log_probs,
        )

    def _required_fields(self) -> list[str]:
        """Return the fields that every row needs besides token_ids and loss_mask."""
        reads_advantages = self.estimator.name == AdvantageEstimator.given
        is_required = {
            "reward": self._reads_rewards,
            "advantage": reads_advantages and self.reads_old_log_probs,
            **{name: name in self.needs for name in (*OPTIONAL_VECTORS, *TOP_VECTORS)},
            "truncated": "truncated" in self.needs,
            "old_log_probs": self.reads_old_log_probs,
        }
        return [name for name, required in is_required.items() if required]

    @property
    def _columns(self) -> list[str]:
        """Return the columns that are read from the files."""
        return [name for name in COLUMNS if name not in TOP_VECTORS or name in self.needs]

    @property
    def _reads_rewards(self) -> bool:
        """Return whether advantages are made of rewards."""
        return self.estimator.name not in (AdvantageEstimator.given, AdvantageEstimator.none)

    @property
    def _needs_groups(self) -> bool:
        """Return whether it matters which documents share a prompt."""
        compares = (
            self._reads_rewards and self.estimator.name != AdvantageEstimator.reinforce_plus_plus
        )
        return compares or "group_id" in self.needs

    def _indexed(self) -> tuple[RecordedIndex, list[Path]]:
        """Return the index, which is kept in the run directory, and the files; log its notes."""
        paths = find_files(self.config.path, "rollout.path")
        files = open_files(paths, self._columns)
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
        """Return the epoch of a position, and the index of its row in the order of the files."""
        epoch, place = divmod(position, self.batch_size)
        return epoch, int(self._order(epoch)[place])

    def _order_of(self, epoch: int) -> np.ndarray:
        """Return the (documents,) index of each document of an epoch, in the order of positions."""
        if self.config.shuffle:
            ranks = shuffled(self._num_groups, self.seed, epoch)
        else:
            ranks = np.arange(self._num_groups)
        return np.lexsort((first_parts(self._rows), ranks[self.groups]))

    def _read(self, index: int) -> RecordedRow:
        entry = self._rows[index]
        file = self._files[entry["file"]]
        row = parse_row(file.row(int(entry["place"])), self._rules)
        if not isinstance(row, RecordedRow) or row.digest() != entry["checksum"]:
            raise file.changed()
        return row

    def _group(self, index: int, epoch: int) -> int:
        """Return the number of a row's group, unique over the epochs."""
        return epoch * self._num_groups + int(self.groups[index])

    def _trajectory(self, index: int, epoch: int) -> int | None:
        """Return the number of a row's trajectory, unique over the epochs; None without one."""
        trajectory = int(self._rows["trajectory"][index])
        return None if trajectory < 0 else epoch * self.batch_size + trajectory

    def _name(self, index: int, epoch: int, row_id: str | None = None) -> str:
        label = self._files[self._rows["file"][index]].label
        name = row_id or f"{label}:{self._rows['number'][index]}"
        return name if epoch == 0 else f"{name} (epoch {epoch + 1})"
