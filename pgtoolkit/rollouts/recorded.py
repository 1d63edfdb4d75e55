"""Recorded rollouts as a source of documents: checked in one pass, then read from the files as they are needed."""

from __future__ import annotations

import hashlib
import json
import logging
from array import array

import numpy as np

from pgtoolkit.batch import OPTIONAL_VECTORS, Document
from pgtoolkit.config.schema import AdvantageEstimator, RecordedRolloutConfig
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.rollouts.advantages import batch_divisor, group_advantages
from pgtoolkit.rollouts.files import Problems, RowFile, find_files, open_files
from pgtoolkit.rollouts.rows import FIELDS, Row, Rules, parse_row
from pgtoolkit.rollouts.shuffle import shuffled

log = logging.getLogger("pgtoolkit")


class RecordedRollouts:
    """The documents of JSONL and Parquet files (docs/data.md), `epochs` times over.

    estimator: `given` reads the recorded advantages; any other computes them from all rewards of a group.
    reads_old_log_probs: as of the loss family. Where it is False no row needs any, and with `given` rows of which none
    has an advantage or a reward are examples to imitate: every advantage is 1.
    vocabulary_size: of the model; token ids are below it. max_tokens: the longest document that fits, if limited.
    needs: fields that matter although the estimator does not ask for them: group_id (prompt_mean), sampling_log_probs
    (a correction), ref_log_probs (a penalty). accept_changed: an attribute, whether a saved state of other data is
    taken over.

    The constructor reads every row once and raises DataError for what cannot be trained on, the first ten problems as
    file:row:field. It keeps about 60 bytes per document, among them a checksum by which a row that was changed is
    noticed when it is read again (DataError). The documents of a group have consecutive positions wherever they stand
    in the files; groups come in the order of their first document or, with shuffle, in another one every epoch.
    batch_end is the end of the epoch. has_groups: whether the data says which documents share a prompt.
    """

    def __init__(
        self,
        config: RecordedRolloutConfig,
        estimator: str,
        vocabulary_size: int,
        seed: int = 0,
        needs: tuple[str, ...] = (),
        max_tokens: int | None = None,
        reads_old_log_probs: bool = True,
    ):
        self._config = config
        self.accept_changed = False
        self._estimator = estimator
        self._seed = seed
        self._given = estimator == AdvantageEstimator.given
        self._needs_groups = "group_id" in needs or not self._given
        asked = not self._given, self._given and reads_old_log_probs, reads_old_log_probs
        limits = max_tokens, config.max_completion_length
        self._rules = Rules(vocabulary_size, *asked, *limits, *(name in needs for name in OPTIONAL_VECTORS))
        self._imitates = False
        self._files = open_files(find_files(config.path, "rollout.path"), FIELDS)
        # One entry per document, in the order of the files. Arrays of machine words: lists would take ten times more.
        self._file, self._number, self._place = array("l"), array("q"), array("q")
        self._checksum = array("I")
        self._reward = array("d")
        self._group = array("q")
        self._advantage = np.empty(0)
        self._first: dict[tuple[str, bool], int] = {}
        """(field, whether it is there) -> the first such row."""
        self._fingerprint = hashlib.sha256()
        self._epoch_order: tuple[int, np.ndarray] = (-1, np.empty(0))
        self._read_all()

    @property
    def num_documents(self) -> int:
        """Documents of all epochs."""
        return len(self._file) * self._config.epochs

    @property
    def groups(self) -> np.ndarray:
        """(documents,) int64, the group of each of an epoch, in the order of the files."""
        return self._group

    def document(self, position: int) -> Document:
        if not 0 <= position < self.num_documents:
            raise IndexError(f"position {position} is outside of the {self.num_documents} recorded documents")
        epoch, place = divmod(position, len(self._file))
        index = int(self._order(epoch)[place])
        row = self._read(index)
        advantage = 1.0 if self._imitates else None if self._given else self._advantage[index]
        name = row.id or self._label(index)
        group = epoch * self._num_groups + int(self._group[index])
        return row.document(advantage, group, name if epoch == 0 else f"{name} (epoch {epoch + 1})")

    def before_step(self, position: int) -> None:
        """All documents are there."""

    def seconds(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Files are opened for each row anew."""

    def batch_end(self, position: int) -> int:
        return (position // len(self._file) + 1) * len(self._file)

    def state_dict(self) -> dict:
        return {
            "fingerprint": self._fingerprint.hexdigest(),
            "contents": f"{len(self._files)} files with {len(self._file)} documents",
            "order": {"seed": self._seed, "rollout.shuffle": self._config.shuffle},
        }

    def load_state_dict(self, state: dict) -> None:
        """Raises DataError if the files are not those of the saved state, ConfigError if their order would differ."""
        now = self.state_dict()
        if state["fingerprint"] != now["fingerprint"] and not self.accept_changed:
            raise DataError(
                f"rollout.path={self._config.path} needs the data of the checkpoint, {state['contents']} "
                f"(got {now['contents']} and other contents). The position in the data would mean other documents. "
                "Restore the files, or use trainer.accept_changed_data=true."
            )
        for key, value in state["order"].items():
            if value != now["order"][key]:
                raise ConfigError(
                    f"{key}={now['order'][key]} needs the value of the checkpoint (got {value} there). "
                    f"The position in the data would mean other documents. Use {key}={value}, or start a new run."
                )

    def _order(self, epoch: int) -> np.ndarray:
        """Index of each document of an epoch, in the order of positions."""
        if self._epoch_order[0] != epoch:
            ranks = np.arange(self._num_groups)
            if self._config.shuffle:
                ranks = shuffled(self._num_groups, self._seed, epoch)
            self._epoch_order = (epoch, np.argsort(ranks[self._group], kind="stable"))
        return self._epoch_order[1]

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
        problems = Problems("the recorded rollouts cannot be trained on")
        groups: dict[int | str, int] = {}
        ids: dict[str, int] = {}
        num_trained, self._is_mismatched = 0, False
        for number, file in enumerate(self._files):
            _check_columns(file, self._rules, problems)
            num_trained += self._read_file(number, file, groups, ids, problems)
        problems.raise_if_any()
        if not self._file:
            names = ", ".join(file.label for file in self._files)
            raise DataError(f"rollout.path={self._config.path} needs at least one row (got none in {names}).")
        if num_trained == 0:
            raise DataError(
                f"rollout.path={self._config.path} needs a trained token (got {len(self._file)} documents whose "
                "loss_mask is false everywhere). Nothing would be learned. Mark the tokens of the completions as true."
            )
        if self._rules.needs_sampling_log_probs and not self._is_mismatched:
            raise DataError(
                f"rollout.path={self._config.path} needs sampling_log_probs other than old_log_probs (got the same in "
                "every row). A correction would be 1 everywhere. Use old_log_probs that the trainer computed, or "
                "correction=none."
            )
        self._check_optional(problems)
        self._number_groups(groups, problems)
        if not self._given:
            self._compute_advantages(problems)
        problems.raise_if_any()

    def _read_file(self, number: int, file: RowFile, groups: dict, ids: dict, problems: Problems) -> int:
        """Note each row's place, reward, group and id; returns the number of trained tokens."""
        digest, start, num_trained = 0, len(self._file), 0
        has_problem = False
        for row_number, place, raw in file.rows():
            row = raw if isinstance(raw, str) else parse_row(raw, self._rules)
            if not isinstance(row, Row):
                has_problem = True
                if isinstance(raw, dict):
                    _refuse_text_only(file.label, raw)
                for field, reason in [("", row)] if isinstance(row, str) else row:
                    problems.add(f"{file.label}:{row_number}" + (f":{field}" if field else ""), reason)
                continue
            digest = row.digest(digest)
            num_trained += int(row.loss_mask.sum())
            self._is_mismatched |= not np.array_equal(row.old_log_probs, row.sampling_log_probs)
            self._checksum.append(row.digest(0))
            self._file.append(number)
            self._number.append(row_number)
            self._place.append(place)
            self._reward.append(np.nan if row.reward is None else row.reward)
            for field in ("old_log_probs", "advantage", "reward"):
                self._first.setdefault((field, getattr(row, field) is not None), len(self._file) - 1)
            self._group.append(-1 if row.group_id is None else groups.setdefault(row.group_id, len(groups)))
            index = len(self._file) - 1
            if row.id is not None and (first := ids.setdefault(row.id, index)) != index:
                problems.add(f"{self._label(index)}:id", f"is {row.id!r} like that of {self._label(first)}")
        if file.digest not in (None, digest) and not has_problem:
            raise DataError(f"{file.label} is damaged: its rows are not those that were written. Copy it again.")
        summary = [file.label, file.path.stat().st_size, len(self._file) - start, digest]
        self._fingerprint.update(json.dumps(summary).encode())
        return num_trained

    def _check_optional(self, problems: Problems) -> None:
        """What a row may lack is in all rows or in none."""
        for field in ("old_log_probs", *(("advantage",) if self._given else ())):
            if (field, True) in self._first and (field, False) in self._first:
                problems.add(f"{self._label(self._first[field, False])}:{field}", "is missing; other rows have one")
        if self._given and ("advantage", True) not in self._first:
            if ("reward", True) in self._first:
                reason = "is missing, and rows have a reward: advantage=dr_grpo makes advantages of rewards"
                problems.add(f"{self._label(self._first['reward', True])}:advantage", reason)
            else:
                self._imitates = True
                log.warning("note: no row has an advantage or a reward: every advantage is 1 (supervised fine-tuning).")
        problems.raise_if_any()

    def _number_groups(self, groups: dict[int | str, int], problems: Problems) -> None:
        """Number every document's group, where the data says which it is or `group_size` does."""
        size, self._group = self._config.group_size, np.asarray(self._group)
        missing = np.flatnonzero(self._group < 0)
        self.has_groups = len(missing) == 0
        if self.has_groups:
            self._check_groups(list(groups), problems)
        elif groups or (self._needs_groups and size is None):
            others = "; other rows have one" if groups else ""
            for index in missing:
                problems.add(
                    f"{self._label(index)}:group_id",
                    f"is missing{others}. Documents of one prompt share it. Without any, set rollout.group_size",
                )
        elif size is not None:
            self._group = np.arange(len(self._group)) // size
            self.has_groups = True
            for file, count in zip(self._files, np.bincount(self._file, minlength=len(self._files)), strict=True):
                if count % size:
                    reason = f"has no group_id and {count} rows, which is no multiple of rollout.group_size={size}"
                    problems.add(file.label, reason)
        else:
            self._group = np.arange(len(self._group))  # each alone: nothing asks which documents share a prompt
        problems.raise_if_any()
        self._num_groups = int(self._group.max()) + 1
        if self.has_groups and self._num_groups == len(self._group) and not self._given:
            log.warning("note: every group has one document, so every advantage is 0. Is group_id that of the prompt?")

    def _check_groups(self, ids: list[int | str], problems: Problems) -> None:
        """Groups that the rows name: all of `group_size`, if that is given, and each in one file."""
        counts, size = np.bincount(self._group), self._config.group_size
        first = np.unique(self._group, return_index=True)[1]
        for number in np.flatnonzero(counts != size) if size is not None else ():
            problems.add(
                f"{self._label(first[number])}:group_id",
                f"is {ids[number]!r}, a group of {counts[number]} documents; rollout.group_size={size}",
            )
        spread = np.unique(self._group * len(self._files) + np.asarray(self._file)).size - len(counts)
        if spread:
            log.warning(
                "note: %d groups have documents in several files. A group_id means the same prompt in all of them; "
                "if the files count anew, read them one by one or make the ids differ.",
                spread,
            )

    def _compute_advantages(self, problems: Problems) -> None:
        order = np.argsort(self._group, kind="stable")
        rewards = np.asarray(self._reward)[order]
        starts = np.flatnonzero(np.diff(self._group[order], prepend=-1))
        self._advantage = np.empty(len(order))
        divisor = batch_divisor(self._estimator, rewards.tolist())
        for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
            try:
                advantages = group_advantages(self._estimator, rewards[start:stop].tolist())
                self._advantage[order[start:stop]] = [advantage / divisor for advantage in advantages]
            except DataError as error:
                problems.add(f"{self._label(order[start])}:group_id", str(error))


def _check_columns(file: RowFile, rules: Rules, problems: Problems) -> None:
    if file.names is None:
        return
    _refuse_text_only(file.label, file.names)
    for name in FIELDS:
        if name in rules.required and name not in file.names:
            problems.add(file.label, f"has no column {name}; its columns are {', '.join(file.names)}")
    problems.raise_if_any()


def _refuse_text_only(label: str, names) -> None:
    if "token_ids" not in names and "input" in names and "output" in names:
        raise DataError(
            f"{label} holds texts (input, output), such as verl's rollout dumps, and no token ids or log-probs. "
            "The ratio of new to old policy needs the log-prob of every token as it was sampled, and tokenizing a text "
            "again need not give the tokens that were sampled. Record token_ids and old_log_probs: docs/data.md."
        )
