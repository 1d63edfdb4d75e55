"""Recorded rollouts as a source of documents: checked in one pass, then read from the files as they are needed."""

from __future__ import annotations

import functools
import logging
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from pgtoolkit.batch import OPTIONAL_VECTORS, Document
from pgtoolkit.config.schema import AdvantageEstimator, Config, RecordedRolloutConfig
from pgtoolkit.errors import DataError
from pgtoolkit.losses.aggregation import AGGREGATIONS
from pgtoolkit.losses.objective import Loss
from pgtoolkit.rollouts.advantages import batch_divisor, group_advantages
from pgtoolkit.rollouts.rows import FIELDS, Row, Rules, parse_row
from pgtoolkit.rollouts.steps import Source
from pgtoolkit.tasks.row_files import Problems, RowFile, find_files, open_files
from pgtoolkit.tasks.shuffle import shuffled

log = logging.getLogger("pgtoolkit")


@dataclass(eq=False)
class RecordedRollouts(Source):
    """The documents of JSONL and Parquet files (docs/data.md), `epochs` times over.

    estimator: `given` reads the recorded advantages; any other computes them from all rewards of a group.
    reads_old_log_probs: as of the loss family. Where it is False no row needs any, and with `given` rows of which none
    has an advantage or a reward are examples to imitate: every advantage is 1.
    vocabulary_size: of the model; token ids are below it. max_tokens: the longest document that fits, if limited.
    needs: fields that matter although the estimator does not ask for them: group_id (prompt_mean), sampling_log_probs
    (a correction), ref_log_probs (a penalty).
    first: read so many rows of each file at most, only to see whether they would be refused.

    The constructor reads every row once and raises DataError for what cannot be trained on, the first ten problems as
    file:row:field. It keeps about 60 bytes per document, among them a checksum by which a row that was changed is
    noticed when it is read again (DataError). The documents of a group have consecutive positions wherever they stand
    in the files; groups come in the order of their first document or, with shuffle, in another one every epoch.
    A batch is an epoch. groups: (documents,) int64, of an epoch, in the order of the files.
    """

    config: RecordedRolloutConfig
    estimator: str
    vocabulary_size: int
    seed: int = 0
    needs: tuple[str, ...] = ()
    max_tokens: int | None = None
    reads_old_log_probs: bool = True
    first: int | None = None

    def __post_init__(self):
        self._given = self.estimator == AdvantageEstimator.given
        self._needs_groups = "group_id" in self.needs or not self._given
        required = _required(self.estimator, self.reads_old_log_probs, self.needs)
        self._rules = Rules(self.vocabulary_size, required, self.max_tokens, self.config.max_completion_length)
        self._files = open_files(find_files(self.config.path, "rollout.path"), FIELDS)
        # One entry per document, in the order of the files. Arrays of machine words: lists would take ten times more.
        self._file, self._number, self._place = array("l"), array("q"), array("q")
        self._checksum = array("I")
        self._reward = array("d")
        self.groups = array("q")
        self._first: dict[tuple[str, bool], int] = {}
        """(field, whether it is there) -> the first such row."""
        self._order = functools.lru_cache(maxsize=1)(self._order_of)
        self._problems = Problems("the recorded rollouts cannot be trained on")
        self._read_all()
        self.batch_size = len(self._file)
        self.num_documents = self.batch_size * self.config.epochs

    def document(self, position: int) -> Document:
        epoch, place = divmod(position, self.batch_size)
        index = int(self._order(epoch)[place])
        row = self._read(index)
        advantage = 1.0 if self._imitates else None if self._given else self._advantage[index]
        name = row.id or self._label(index)
        group = epoch * self._num_groups + int(self.groups[index])
        return row.document(advantage, group, name if epoch == 0 else f"{name} (epoch {epoch + 1})")

    def _order_of(self, epoch: int) -> np.ndarray:
        """Index of each document of an epoch, in the order of positions."""
        shuffles = self.config.shuffle
        ranks = shuffled(self._num_groups, self.seed, epoch) if shuffles else np.arange(self._num_groups)
        return np.argsort(ranks[self.groups], kind="stable")

    def _read(self, index: int) -> Row:
        file = self._files[self._file[index]]
        row = parse_row(file.row(self._place[index]), self._rules)
        if not isinstance(row, Row) or row.digest() != self._checksum[index]:
            raise file.changed()
        return row

    def _label(self, index: int) -> str:
        return f"{self._files[self._file[index]].label}:{self._number[index]}"

    def _read_all(self) -> None:
        """The first pass: check every row, number the groups, compute the advantages."""
        groups: dict[int | str, int] = {}
        ids: dict[str, int] = {}
        num_trained, self._is_mismatched, self._is_cut = 0, False, False
        for number in range(len(self._files)):
            num_trained += self._read_file(number, groups, ids)
        self._problems.raise_if_any()
        if not self._file:
            names = ", ".join(file.label for file in self._files)
            raise DataError(f"rollout.path={self.config.path} needs at least one row (got none in {names}).")
        if num_trained == 0 and not self._is_cut:
            raise DataError(
                f"rollout.path={self.config.path} needs a trained token (got {len(self._file)} documents whose "
                "loss_mask is false everywhere). Nothing would be learned. Mark the tokens of the completions as true."
            )
        if "sampling_log_probs" in self._rules.required and not (self._is_mismatched or self._is_cut):
            raise DataError(
                f"rollout.path={self.config.path} needs sampling_log_probs other than old_log_probs (got the same in "
                "every row). A correction would be 1 everywhere. Use old_log_probs that the trainer computed, or "
                "correction=none."
            )
        self._check_optional()
        self._number_groups(groups)
        self._compute_advantages()
        self._problems.raise_if_any()

    def _read_file(self, number: int, groups: dict, ids: dict) -> int:
        """Note each row's place, reward, group and id; returns the number of trained tokens."""
        num_trained, start = 0, len(self._file)
        for row_number, place, row in _rows(self._files[number], self._rules, self._problems):
            index = len(self._file)
            if self.first is not None and index - start == self.first:
                self._is_cut = True
                break
            num_trained += int(row.loss_mask.sum())
            self._is_mismatched |= not np.array_equal(row.old_log_probs, row.sampling_log_probs)
            self._checksum.append(row.digest())
            self._file.append(number)
            self._number.append(row_number)
            self._place.append(place)
            self._reward.append(np.nan if row.reward is None else row.reward)
            for field in ("old_log_probs", "advantage", "reward"):
                self._first.setdefault((field, getattr(row, field) is not None), index)
            self.groups.append(-1 if row.group_id is None else groups.setdefault(row.group_id, len(groups)))
            if row.id is not None and (first := ids.setdefault(row.id, index)) != index:
                self._refuse(index, "id", f"is {row.id!r} like that of {self._label(first)}")
        return num_trained

    def _check_optional(self) -> None:
        """What a row may lack is in all rows or in none."""
        for field in ("old_log_probs", "advantage") if self._given else ("old_log_probs",):
            if (field, True) in self._first and (field, False) in self._first:
                self._refuse(self._first[field, False], field, "is missing; other rows have one")
        self._imitates = self._given and ("advantage", True) not in self._first
        if self._imitates and ("reward", True) in self._first:
            reason = "is missing, and rows have a reward: advantage=dr_grpo makes advantages of rewards"
            self._refuse(self._first["reward", True], "advantage", reason)
        elif self._imitates:
            self._note("no row has an advantage or a reward: every advantage is 1 (supervised fine-tuning).")
        self._problems.raise_if_any()

    def _number_groups(self, groups: dict[int | str, int]) -> None:
        """Number every document's group, where the data says which it is or `group_size` does."""
        size, self.groups = self.config.group_size, np.asarray(self.groups)
        missing = np.flatnonzero(self.groups < 0)
        self.has_groups = len(missing) == 0 or size is not None
        if len(missing) == 0:
            self._check_groups(list(groups))
        elif groups or (self._needs_groups and size is None):
            others = "; other rows have one" if groups else ""
            reason = f"is missing{others}. Documents of one prompt share it. Without any, set rollout.group_size"
            for index in missing:
                self._refuse(index, "group_id", reason)
        else:  # each alone where nothing asks which documents share a prompt
            self.groups = np.arange(len(self.groups)) // (size or 1)
            for file, count in zip(self._files, np.bincount(self._file, minlength=len(self._files)), strict=True):
                if count % (size or 1) and not self._is_cut:
                    reason = f"has no group_id and {count} rows, which is no multiple of rollout.group_size={size}"
                    self._problems.add(file.label, reason)
        self._problems.raise_if_any()
        self._num_groups = int(self.groups.max()) + 1
        if self.has_groups and self._num_groups == len(self.groups) and not self._given:
            self._note("every group has one document, so every advantage is 0. Is group_id that of the prompt?")

    def _check_groups(self, ids: list[int | str]) -> None:
        """Groups that the rows name: all of `group_size`, if that is given, and each in one file."""
        size = self.config.group_size
        _, first, counts = np.unique(self.groups, return_index=True, return_counts=True)
        for number in np.flatnonzero(counts != size) if size is not None and not self._is_cut else ():
            reason = f"is {ids[number]!r}, a group of {counts[number]} documents; rollout.group_size={size}"
            self._refuse(first[number], "group_id", reason)
        spread = np.unique(self.groups * len(self._files) + np.asarray(self._file)).size - len(counts)
        if spread:
            self._note(
                f"{spread} groups have documents in several files. A group_id means the same prompt in all of them; "
                "if the files count anew, read them one by one or make the ids differ."
            )

    def _compute_advantages(self) -> None:
        if self._given:
            return
        rewards, self._advantage = np.asarray(self._reward), np.empty(len(self._reward))
        order = np.argsort(self.groups, kind="stable")
        for members in np.split(order, np.flatnonzero(np.diff(self.groups[order])) + 1):
            if self._is_cut and len(members) == 1:
                continue  # the others of its group may follow
            try:
                self._advantage[members] = group_advantages(self.estimator, rewards[members].tolist())
            except DataError as error:
                self._refuse(members[0], "group_id", str(error))
        self._advantage /= batch_divisor(self.estimator, rewards.tolist())

    def _note(self, sentence: str) -> None:
        if self.first is None:
            log.warning("note: %s", sentence)

    def _refuse(self, index: int, field: str, reason: str) -> None:
        self._problems.add(f"{self._label(index)}:{field}", reason)


def recorded_rollouts(
    config: Config, loss: Loss, vocabulary_size: int, max_tokens: int | None, first: int | None = None
) -> RecordedRollouts:
    """The recorded rollouts of a configuration, with what its loss needs of them; DataError where they lack that."""
    options = config.seed, _needed_fields(config, loss), max_tokens, loss.reads_old_log_probs, first
    return RecordedRollouts(config.rollout, config.advantage.estimator, vocabulary_size, *options)


def _needed_fields(config: Config, loss: Loss) -> tuple[str, ...]:
    """Fields of a row that a configuration reads whatever its advantage: for groups, a correction, a penalty."""
    needs = ("group_id",) if AGGREGATIONS[config.aggregation.mode].needs_groups else ()
    needs += ("sampling_log_probs",) if loss.needs_sampling_log_probs else ()
    return needs + (("ref_log_probs",) if config.kl.reference == "recorded" else ())


def _required(estimator: str, reads_old_log_probs: bool, needs: Collection[str]) -> list[str]:
    """Fields that every row needs besides its tokens and their mask."""
    is_given = estimator == AdvantageEstimator.given
    asked = {"reward": not is_given, "advantage": is_given and reads_old_log_probs}
    asked |= {name: name in needs for name in OPTIONAL_VECTORS} | {"old_log_probs": reads_old_log_probs}
    return [name for name, is_asked in asked.items() if is_asked]


def _rows(file: RowFile, rules: Rules, problems: Problems) -> Iterator[tuple[int, int, Row]]:
    """Number from 1, place and contents of each row that is right; what is wrong is added to the problems."""
    for name in ("token_ids", "loss_mask", *rules.required):
        if file.names is not None and name not in file.names:
            problems.add(file.label, f"has no column {name}; its columns are {', '.join(file.names)}")
    problems.raise_if_any()
    for number, place, raw in file.rows():
        row = parse_row(raw, rules)
        if isinstance(row, Row):
            yield number, place, row
            continue
        for field, reason in row:
            problems.add(f"{file.label}:{number}" + (f":{field}" if field else ""), reason)
