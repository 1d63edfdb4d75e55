"""Recorded rollouts as a source of documents: checked in one pass, then read from the files as they are needed."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from pgtoolkit.batch import OPTIONAL_VECTORS, Document
from pgtoolkit.config.schema import AdvantageEstimator, RecordedRolloutConfig
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.losses.aggregation import AGGREGATIONS
from pgtoolkit.losses.corrections import Correction
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
    (a correction), ref_log_probs (a penalty). accept_changed: whether a saved state of other data is taken over.

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
    accept_changed: bool = False

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
        self._fingerprint = hashlib.sha256()
        self._order = functools.lru_cache(maxsize=1)(self._order_of)
        self._problems = Problems("the recorded rollouts cannot be trained on")
        self._read_all()
        self.batch_size = len(self._file)
        self.num_documents = self.batch_size * self.config.epochs

    def document(self, position: int) -> Document:
        if not 0 <= position < self.num_documents:
            raise IndexError(f"position {position} is outside of the {self.num_documents} recorded documents")
        epoch, place = divmod(position, self.batch_size)
        index = int(self._order(epoch)[place])
        row = self._read(index)
        advantage = 1.0 if self._imitates else None if self._given else self._advantage[index]
        name = row.id or self._label(index)
        group = epoch * self._num_groups + int(self.groups[index])
        return row.document(advantage, group, name if epoch == 0 else f"{name} (epoch {epoch + 1})")

    def state_dict(self) -> dict:
        return {
            "fingerprint": self._fingerprint.hexdigest(),
            "contents": f"{len(self._files)} files with {len(self._file)} documents",
            "order": {"seed": self.seed, "rollout.shuffle": self.config.shuffle},
        }

    def load_state_dict(self, state: dict) -> None:
        """Raises DataError if the files are not those of the saved state, ConfigError if their order would differ."""
        now = self.state_dict()
        if state["fingerprint"] != now["fingerprint"] and not self.accept_changed:
            raise DataError(
                f"rollout.path={self.config.path} needs the data of the checkpoint, {state['contents']} "
                f"(got {now['contents']} and other contents). The position in the data would mean other documents. "
                "Restore the files, or use trainer.accept_changed_data=true."
            )
        for key, value in state["order"].items():
            if value != now["order"][key]:
                raise ConfigError(
                    f"{key}={now['order'][key]} needs the value of the checkpoint (got {value} there). "
                    f"The position in the data would mean other documents. Use {key}={value}, or start a new run."
                )

    def _order_of(self, epoch: int) -> np.ndarray:
        """Index of each document of an epoch, in the order of positions."""
        shuffles = self.config.shuffle
        ranks = shuffled(self._num_groups, self.seed, epoch) if shuffles else np.arange(self._num_groups)
        return np.argsort(ranks[self.groups], kind="stable")

    def _read(self, index: int) -> Row:
        file = self._files[self._file[index]]
        raw = file.row(self._place[index])
        row = parse_row(raw, self._rules) if isinstance(raw, dict) else raw
        if not isinstance(row, Row) or row.digest(0) != self._checksum[index]:
            raise file.changed()
        return row

    def _label(self, index: int) -> str:
        return f"{self._files[self._file[index]].label}:{self._number[index]}"

    def _read_all(self) -> None:
        """The first pass: check every row, number the groups, compute the advantages."""
        groups: dict[int | str, int] = {}
        ids: dict[str, int] = {}
        num_trained, self._is_mismatched = 0, False
        for number, file in enumerate(self._files):
            _check_columns(file, self._rules, self._problems)
            num_trained += self._read_file(number, file, groups, ids)
        self._problems.raise_if_any()
        if not self._file:
            names = ", ".join(file.label for file in self._files)
            raise DataError(f"rollout.path={self.config.path} needs at least one row (got none in {names}).")
        if num_trained == 0:
            raise DataError(
                f"rollout.path={self.config.path} needs a trained token (got {len(self._file)} documents whose "
                "loss_mask is false everywhere). Nothing would be learned. Mark the tokens of the completions as true."
            )
        if "sampling_log_probs" in self._rules.required and not self._is_mismatched:
            raise DataError(
                f"rollout.path={self.config.path} needs sampling_log_probs other than old_log_probs (got the same in "
                "every row). A correction would be 1 everywhere. Use old_log_probs that the trainer computed, or "
                "correction=none."
            )
        self._check_optional()
        self._number_groups(groups)
        self._compute_advantages()
        self._problems.raise_if_any()

    def _read_file(self, number: int, file: RowFile, groups: dict, ids: dict) -> int:
        """Note each row's place, reward, group and id; returns the number of trained tokens."""
        digest, start, num_trained, num_rows = 0, len(self._file), 0, 0
        for row_number, place, raw in file.rows():
            num_rows += 1
            row = [("", raw)] if isinstance(raw, str) else parse_row(raw, self._rules)
            if not isinstance(row, Row):
                for field, reason in row:
                    self._problems.add(f"{file.label}:{row_number}" + (f":{field}" if field else ""), reason)
                continue
            index = len(self._file)
            digest = row.digest(digest)
            num_trained += int(row.loss_mask.sum())
            self._is_mismatched |= not np.array_equal(row.old_log_probs, row.sampling_log_probs)
            self._checksum.append(row.digest(0))
            self._file.append(number)
            self._number.append(row_number)
            self._place.append(place)
            self._reward.append(np.nan if row.reward is None else row.reward)
            for field in ("old_log_probs", "advantage", "reward"):
                self._first.setdefault((field, getattr(row, field) is not None), index)
            self.groups.append(-1 if row.group_id is None else groups.setdefault(row.group_id, len(groups)))
            if row.id is not None and (first := ids.setdefault(row.id, index)) != index:
                self._refuse(index, "id", f"is {row.id!r} like that of {self._label(first)}")
        count = len(self._file) - start
        if file.digest not in (None, digest) and count == num_rows:
            raise DataError(f"{file.label} is damaged: its rows are not those that were written. Copy it again.")
        self._fingerprint.update(json.dumps([file.label, file.path.stat().st_size, count, digest]).encode())
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
            log.warning("note: no row has an advantage or a reward: every advantage is 1 (supervised fine-tuning).")
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
                if count % (size or 1):
                    reason = f"has no group_id and {count} rows, which is no multiple of rollout.group_size={size}"
                    self._problems.add(file.label, reason)
        self._problems.raise_if_any()
        self._num_groups = int(self.groups.max()) + 1
        if self.has_groups and self._num_groups == len(self.groups) and not self._given:
            log.warning("note: every group has one document, so every advantage is 0. Is group_id that of the prompt?")

    def _check_groups(self, ids: list[int | str]) -> None:
        """Groups that the rows name: all of `group_size`, if that is given, and each in one file."""
        size = self.config.group_size
        _, first, counts = np.unique(self.groups, return_index=True, return_counts=True)
        for number in np.flatnonzero(counts != size) if size is not None else ():
            reason = f"is {ids[number]!r}, a group of {counts[number]} documents; rollout.group_size={size}"
            self._refuse(first[number], "group_id", reason)
        spread = np.unique(self.groups * len(self._files) + np.asarray(self._file)).size - len(counts)
        if spread:
            log.warning(
                "note: %d groups have documents in several files. A group_id means the same prompt in all of them; "
                "if the files count anew, read them one by one or make the ids differ.",
                spread,
            )

    def _compute_advantages(self) -> None:
        if self._given:
            return
        rewards, self._advantage = np.asarray(self._reward), np.empty(len(self._reward))
        order = np.argsort(self.groups, kind="stable")
        for members in np.split(order, np.flatnonzero(np.diff(self.groups[order])) + 1):
            try:
                self._advantage[members] = group_advantages(self.estimator, rewards[members].tolist())
            except DataError as error:
                self._refuse(members[0], "group_id", str(error))
        self._advantage /= batch_divisor(self.estimator, rewards.tolist())

    def _refuse(self, index: int, field: str, reason: str) -> None:
        self._problems.add(f"{self._label(index)}:{field}", reason)


def needed_fields(config: Any, correction: Correction | None) -> tuple[str, ...]:
    """Fields of a row that a configuration reads whatever its advantage: for groups, a correction, a penalty."""
    needs = ("group_id",) if AGGREGATIONS[config.aggregation.mode].needs_groups else ()
    needs += ("sampling_log_probs",) if correction is not None and not correction.of_policy else ()
    return needs + (("ref_log_probs",) if config.kl.reference == "recorded" else ())


def check_first_rows(
    config: Any, reads_old_log_probs: bool, needs: tuple[str, ...], vocabulary_size: int, max_tokens: int
) -> None:
    """The columns and the first 100 rows of each file, as `RecordedRollouts` will check all of them.

    config: a whole configuration. Raises DataError, as a run would.
    """
    rollout, estimator = config.rollout, config.advantage.estimator
    required = _required(estimator, reads_old_log_probs, needs)
    rules = Rules(vocabulary_size, required, max_tokens, rollout.max_completion_length)
    problems, empty = Problems("the recorded rollouts cannot be trained on"), True
    for file in open_files(find_files(rollout.path, "rollout.path"), FIELDS):
        _check_columns(file, rules, problems)
        for number, _, raw in itertools.islice(file.rows(), 100):
            row = [("", raw)] if isinstance(raw, str) else parse_row(raw, rules)
            for field, reason in row if isinstance(row, list) else ():
                problems.add(f"{file.label}:{number}" + (f":{field}" if field else ""), reason)
            empty = False
    problems.raise_if_any()
    if empty:
        raise DataError(f"rollout.path={rollout.path} needs at least one row (got none).")


def _required(estimator: str, reads_old_log_probs: bool, needs: Collection[str]) -> list[str]:
    """Fields that every row needs besides its tokens and their mask."""
    is_given = estimator == AdvantageEstimator.given
    asked = {"reward": not is_given, "advantage": is_given and reads_old_log_probs}
    asked |= {"old_log_probs": reads_old_log_probs} | {name: name in needs for name in OPTIONAL_VECTORS}
    return [name for name, is_asked in asked.items() if is_asked]


def _check_columns(file: RowFile, rules: Rules, problems: Problems) -> None:
    for name in ("token_ids", "loss_mask", *rules.required):
        if file.names is not None and name not in file.names:
            problems.add(file.label, f"has no column {name}; its columns are {', '.join(file.names)}")
    problems.raise_if_any()
