"""Indexes recorded rollouts: one pass over the files, in which every row is checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pgtoolkit.document import OPTIONAL_VECTORS
from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.conversations import has_texts
from pgtoolkit.rollouts.estimator import Attempt, Estimator
from pgtoolkit.rollouts.parsed_rows import WrongRow, parse_row, parse_rows
from pgtoolkit.rollouts.recorded_checks import Plausibility
from pgtoolkit.rollouts.recorded_index import (
    ROW,
    IndexedFile,
    RecordedIndex,
    first_parts,
    read_index,
    stamp_of,
)
from pgtoolkit.rollouts.recorded_prompts import checksums_before_trained
from pgtoolkit.rollouts.rows import RecordedRow, Rules
from pgtoolkit.rollouts.settings import AdvantageEstimator, RecordedRolloutSettings
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.row_files import ParquetFile, Problems, RowFile

_TRUTH = {None: -1, False: 0, True: 1}
"""A truth value as the index has it."""

_MISSING = -1
_UNREADABLE = -2
"""A group that a row does not name, and one that it names wrongly."""


@dataclass(eq=False)
class Indexing:
    """Makes the index: every row of the files is read once, and checked.

    See `RecordedRollouts` for the fields.
    """

    files: Sequence[RowFile]
    config: RecordedRolloutSettings
    estimator: Estimator
    rules: Rules
    needs_groups: bool
    first: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Everything that the index depends on, but for the files."""
        return repr((self.rules, self.estimator, self.needs_groups, self.config.group_size))

    def kept(self, folder: Path) -> RecordedIndex | None:
        """Return the index in a run directory, if `make` would make the same one of these files.

        None if a file has changed since, or the rows are to be checked or read in another way.
        """
        index = read_index(folder)
        if index is None or index.rules != self.key or len(index.files) != len(self.files):
            return None
        texts = self.rules.texts
        if index.texts is not None and (texts is None or index.texts != texts.fingerprint()):
            return None
        return index if all(index.knows(file.label, file.path) for file in self.files) else None

    def make(self) -> RecordedIndex:
        """Return the index.

        Raises DataError for what cannot be trained on: the first ten problems, as file:row:field.
        """
        self._problems = Problems("the recorded rollouts cannot be trained on")
        self._given = self.estimator.name == AdvantageEstimator.given
        # Taken before the files are read, so that a change while they are read is seen later.
        stamps = [stamp_of(file.path) for file in self.files]
        self._read_rows()
        if not self._problems:
            self._check_use()
        imitates = self._check_optional()
        self._find_attempts()
        self._check_attempts()
        self._check_plausible()
        has_groups = self._number_groups()
        self._compute_advantages(imitates)
        self._problems.raise_if_any()
        files: list[IndexedFile] = [
            {"name": file.label, **stamp, "sha256": file.digest.hexdigest()}
            for file, stamp in zip(self.files, stamps, strict=True)
        ]
        texts = self.rules.texts
        fingerprint = texts.fingerprint() if texts is not None and texts.read else None
        prompts = np.array(sorted(self._prompts), np.uint64)
        return RecordedIndex(
            self._rows, files, self.key, has_groups, self.notes, prompts, fingerprint
        )

    def _read_rows(self) -> None:
        """Read all rows into `_rows`; the problems of wrong rows are collected.

        Wrong rows are among them, for the checks of groups, with little more than their groups.
        """
        # group_id -> number of the group, in the order in which they come.
        self._groups: dict[int | str, int] = {}
        # Whether some row has sampling log-probs other than its old ones.
        self._is_mismatched = False
        # Whether rows beyond `first` were not read.
        self._is_cut = False
        self._num_too_long = 0
        # Checksums of the prompts that the trained tokens answer.
        self._prompts: set[int] = set()
        self._plausibility = Plausibility()
        # The places of wrong rows.
        self._wrong: list[int] = []
        self._rows = np.fromiter(self._entries(), ROW)
        # (documents,) whether a row is right by itself.
        self._is_right = np.ones(len(self._rows), bool)
        self._is_right[self._wrong] = False

    def _entries(self) -> Iterator[tuple]:
        """Yield the entries of each row, as ROW has them."""
        ids: dict[str, str] = {}
        trajectories: dict[tuple[object, int | str], int] = {}
        texts = self.rules.texts
        if texts is not None:
            texts.asked = set()  # by the row of a fingerprint
        index = itertools.count()
        for file_number, file in enumerate(self.files):
            rows = _checked_rows(file, self.rules, self._problems)
            for count, (number, place, row) in enumerate(rows):
                if count == self.first:
                    self._is_cut = True
                    break
                if row is None:
                    self._num_too_long += 1
                    continue
                wrong = row if isinstance(row, WrongRow) else None
                row = row.row if isinstance(row, WrongRow) else row
                self._check_id(row, f"{file.label}:{number}", ids)
                group = _MISSING
                if row.group_id is not None:
                    group = self._groups.setdefault(row.group_id, len(self._groups))
                elif wrong is not None and wrong.has_problem("group_id"):
                    group = _UNREADABLE
                row_index = next(index)
                trajectory = -1
                if row.trajectory is not None:
                    # Unique in its group, or in its file if that names no groups.
                    prompt = (file_number,) if row.group_id is None else row.group_id
                    trajectory = trajectories.setdefault((prompt, row.trajectory), row_index)
                if wrong is not None:
                    self._wrong.append(row_index)
                    yield file_number, number, place, *_entries_of_wrong(group, trajectory)
                    continue
                if not self._is_mismatched:
                    self._is_mismatched = not np.array_equal(
                        row.old_log_probs, row.sampling_log_probs
                    )
                is_first_part = trajectory in (-1, row_index)
                self._plausibility.add(row, group if is_first_part else -1)
                self._prompts.update(checksums_before_trained(row.token_ids, row.loss_mask))
                if texts is not None:
                    self._prompts |= texts.asked
                yield file_number, number, place, *_entries_of(row, group, trajectory)

    def _check_id(self, row: RecordedRow, label: str, ids: dict[str, str]) -> None:
        """Collect a problem if another row has the same id.

        ids: of the rows so far, with their labels.
        """
        if row.id is None:
            return
        first = ids.setdefault(row.id, label)
        if first != label:
            self._problems.add(f"{label}:id", f"is {row.id!r} like that of {first}")

    def _find_attempts(self) -> None:
        """Find the first document of each trajectory, with which the trajectory is counted."""
        # (documents,) the place of the first document of each one's trajectory.
        self._first = first_parts(self._rows)
        # (trajectories,) the places of these first documents.
        self._attempts = np.flatnonzero(self._first == np.arange(len(self._rows)))
        # (documents,) whether nobody could score it.
        self._excluded = self._rows["score_failed"] & np.isnan(self._rows["reward"])
        self._counted = "documents" if len(self._attempts) == len(self._rows) else "trajectories"
        if self._counted == "trajectories":
            self.notes.append(
                f"{len(self._rows)} documents are {len(self._attempts)} trajectories, which "
                "rewards, aggregation=sample_mean and constant count (D) once each."
            )

    def _check_use(self) -> None:
        """Raise DataError if these rows teach nothing, or if a setting does nothing."""
        path = f"rollout.path={self.config.path}"
        rows = self._rows
        if self._num_too_long:
            count = f"{self._num_too_long} of {len(rows) + self._num_too_long} rows"
            self.notes.append(
                f"rollout.too_long=skip leaves out {count}, with more than {self.rules.max_tokens} "
                "tokens."
            )
        self._check_texts_are_used()
        if len(rows) == 0:
            labels = ", ".join(file.label for file in self.files)
            raise DataError(f"{path} needs at least one row (got none in {labels}).")
        if self._is_cut:
            return  # The rows that were not read may have what these lack.
        if not rows["trained"].any():
            raise DataError(
                f"{path} needs a trained token (got {len(rows)} documents whose loss_mask is false "
                "everywhere). Nothing would be learned. Mark the tokens of the completions as true."
            )
        if (rows["score_failed"] & np.isnan(rows["reward"])).all():
            raise DataError(
                f"{path} needs a document that was scored (got {len(rows)} with score_failed=true "
                "and no reward). They have weight 0, so nothing would be learned. Record rollouts "
                "whose scoring works."
            )
        if "sampling_log_probs" in self.rules.required and not self._is_mismatched:
            raise DataError(
                f"{path} needs sampling_log_probs other than old_log_probs (got the same in every "
                "row). A correction would be 1 everywhere. Use old_log_probs that the trainer "
                "computed, or correction=none, in Python Loss(..., correction=None)."
            )

    def _check_texts_are_used(self) -> None:
        """Raise DataError if keys for rows with texts are set, and no row has texts."""
        texts = self.rules.texts
        chat = self.config.chat.value
        trained_turns = self.config.trained_turns.value
        if texts is None or texts.read or (chat, trained_turns) == ("auto", "all"):
            return
        raise DataError(
            refusal(
                setting=f"rollout.chat={chat} with rollout.trained_turns={trained_turns}",
                needs="rows of messages, or of prompt and completion",
                got="tokens",
                reason="It would be ignored.",
                use="rollout.chat=auto with rollout.trained_turns=all",
            )
        )

    def _check_optional(self) -> bool:
        """Check that optional fields are in all rows or in none.

        Return whether the rows are examples to imitate: without an advantage or a reward.
        """
        right = np.flatnonzero(self._is_right)
        rows = self._rows[right]
        present = {"old_log_probs": rows["old_log_probs"]}
        if self._given:
            present["advantage"] = rows["has_advantage"]
        for name, is_present in present.items():
            if is_present.any() and not is_present.all():
                index = right[is_present.argmin()]
                self._refuse(index, name, "is missing; other rows have one")
        imitates = self._given and not rows["has_advantage"].any()
        has_reward = ~np.isnan(rows["reward"])
        if imitates and has_reward.any():
            reason = (
                "is missing, and rows have a reward: advantage=dr_grpo makes advantages of rewards"
            )
            self._refuse(right[has_reward.argmax()], "advantage", reason)
        elif imitates:
            self.notes.append(
                "no row has an advantage or a reward: every advantage is 1 (supervised "
                "fine-tuning)."
            )
        else:
            self.notes += notes_on_weights(rows, self.estimator, self.rules)
        return imitates

    def _check_attempts(self) -> None:
        """Check that the documents of a trajectory have the same reward and the same outcome, and
        that the loss takes trajectories of several."""
        for name in ("reward", "exact_match", "score_failed"):
            values = self._rows[name]
            first = values[self._first]
            differs = (values != first) & ~(np.isnan(values) & np.isnan(first))
            differs &= self._is_right & self._is_right[self._first]
            for index in np.flatnonzero(differs):
                self._refuse(
                    index,
                    name,
                    f"is not that of {self._label(self._first[index])}, a row of the same "
                    f"trajectory. An attempt has one {name}. Let all of its rows repeat it, or "
                    "leave the trajectory out",
                )
        if self.rules.instead_of_parts is not None:
            for index in np.flatnonzero(self._rows["trajectory"] >= 0):
                self._refuse(
                    index,
                    "trajectory",
                    "is given, and the loss takes attempts of one document each. Leave the column "
                    f"out if each has one, or use {self.rules.instead_of_parts}",
                )

    def _check_plausible(self) -> None:
        """Refuse log-probs one place off; note groups of different prompts, and repeated rows."""
        misplaced = self._plausibility.misplaced()
        if misplaced is not None:
            self._problems.add(
                f"rollout.path={self.config.path}:sampling_log_probs",
                f"needs the log-prob of each token itself (got {misplaced}). Every ratio between "
                "the two would compare different tokens. Move one of the two lists by one place in "
                "the program that writes the rows",
            )
        self.notes += self._plausibility.notes()

    def _number_groups(self) -> bool:
        """Number every document's group, by group_id or by `rollout.group_size`.

        Return whether the groups are known. Where they are not, each attempt is a group by itself.
        """
        size = self.config.group_size
        groups = self._rows["group"]
        missing = np.flatnonzero(groups == _MISSING)
        if len(missing) == 0:
            self._check_groups(list(self._groups))
            return True
        if self._groups or (self.needs_groups and size is None):
            others = "; other rows have one" if self._groups else ""
            for index in missing:
                self._refuse(
                    index,
                    "group_id",
                    f"is missing{others}. Documents of one prompt share it. Without any, set "
                    "rollout.group_size",
                )
            self._check_groups(list(self._groups))
        else:
            groups[self._attempts] = np.arange(len(self._attempts)) // (size or 1)
            groups[:] = groups[self._first]
            self._check_counts(size or 1)
        return size is not None

    def _check_counts(self, size: int) -> None:
        """Collect a problem for each file that ends within a group of `size` attempts."""
        if self._is_cut:
            return
        counts = np.bincount(self._rows["file"][self._attempts], minlength=len(self.files))
        for file, count in zip(self.files, counts, strict=True):
            if count % size:
                self._problems.add(
                    file.label,
                    f"has no group_id and {count} {self._counted}, which is no multiple of "
                    f"rollout.group_size={size}",
                )

    def _check_groups(self, ids: list[int | str]) -> None:
        """Check the groups that rows name, and note those in several files.

        All must be of `group_size`, if it is set.
        """
        size = self.config.group_size
        groups = self._rows["group"]
        attempts = self._attempts[groups[self._attempts] >= 0]
        numbers, first, counts = np.unique(groups[attempts], return_index=True, return_counts=True)
        if size is not None and not self._is_cut:
            for place in np.flatnonzero(counts != size):
                self._refuse(
                    int(attempts[first[place]]),
                    "group_id",
                    f"is {ids[numbers[place]]!r}, a group of {counts[place]} {self._counted}; "
                    f"rollout.group_size={size}",
                )
        spread = np.unique(groups * len(self.files) + self._rows["file"]).size - len(counts)
        if spread:
            self.notes.append(
                f"{spread} groups have documents in several files. A group_id means the same "
                "prompt in all of them; if the files count anew, read them one by one or make the "
                "ids differ."
            )

    def _compute_advantages(self, imitates: bool) -> None:
        """Fill in `advantage` and `has_signal` of all rows."""
        rows = self._rows
        if imitates:
            rows["advantage"] = 1.0
        elif self.estimator.name == AdvantageEstimator.none:
            rows["advantage"] = 0.0
        elif not self._given:
            self._estimate()
        # Nobody could score them: as with rewards, metrics of advantages count 0.
        rows["advantage"][self._excluded] = 0.0
        if imitates or not self._given:
            rows["has_signal"] = (rows["advantage"].astype(np.float32) != 0) & (rows["trained"] > 0)
        rows["has_signal"] &= ~self._excluded

    def _estimate(self) -> None:
        """Fill in `advantage` by the estimator, from the rewards of the attempts of each group."""
        rows = self._rows
        order = self._attempts[np.argsort(rows["group"][self._attempts], kind="stable")]
        groups = np.split(order, np.flatnonzero(np.diff(rows["group"][order])) + 1)
        if self._is_cut:
            # The others of a group may be among the rows that were not read, and a function of the
            # user's may need them.
            is_ours = self.estimator.function is None
            groups = [members for members in groups if len(members) > 1 and is_ours]
        if self._problems:
            # Groups without a wrong row are tried, so that all problems come together.
            if self.estimator.function is not None:
                return
            known = [members for members in groups if rows["group"][members[0]] >= 0]
            groups = [members for members in known if self._is_right[members].all()]
        rewards = rows["reward"].tolist()
        lengths = np.bincount(self._first, rows["trained"]).astype(int).tolist()
        is_scored = (~self._excluded).tolist()
        attempts = (
            [Attempt(rewards[i] if is_scored[i] else None, lengths[i]) for i in members]
            for members in groups
        )

        def refuse(number: int, problem: str) -> None:
            self._refuse(groups[number][0], "group_id", problem)

        estimated = self.estimator.advantages(attempts, refuse)
        for members, advantages in zip(groups, estimated, strict=True):
            rows["advantage"][members] = advantages
        rows["advantage"] = rows["advantage"][self._first]

    def _label(self, index: int | np.integer) -> str:
        row = self._rows[index]
        return f"{self.files[row['file']].label}:{row['number']}"

    def _refuse(self, index: int | np.integer, field: str, reason: str) -> None:
        """Collect a problem with a field of a row."""
        self._problems.add(f"{self._label(index)}:{field}", reason)


def notes_on_weights(rows: np.ndarray, estimator: Estimator, rules: Rules) -> list[str]:
    """Return a note where a loss that could imitate the rows is weighted by their advantages.

    rows: (documents,) of ROW.
    """
    imitates = estimator.name == AdvantageEstimator.given and "old_log_probs" not in rules.required
    if not imitates or not rows["has_advantage"].any() or np.isnan(rows["reward"]).all():
        return []
    return [
        "rows have rewards and advantages: every token is weighted by its advantage, and a "
        "negative one makes it less likely. To imitate the right completions alone (supervised "
        "fine-tuning), use files of their rows with token_ids and loss_mask only."
    ]


def _entries_of(row: RecordedRow, group: int, trajectory: int) -> tuple:
    """Return a row's entries of ROW, from its checksum on."""
    trained = int(np.count_nonzero(row.loss_mask))
    old = row.old_log_probs
    return (
        row.digest(),
        len(row.token_ids),
        trained,
        group,
        trajectory,
        np.nan if row.reward is None else row.reward,
        np.nan,
        row.advantage is not None,
        row.advantage is not None and bool(row.advantage.any()),
        bool(row.score_failed),
        np.nan if old is None else old.sum() / max(1, trained),
        np.nan if row.model_version is None else row.model_version,
        _TRUTH[row.truncated],
        _TRUTH[row.exact_match],
        *(getattr(row, name) is not None for name in OPTIONAL_VECTORS),
        row.sampling_kept_ids is not None,
        _overflows(row),
    )


def _entries_of_wrong(group: int, trajectory: int) -> tuple:
    """Return a wrong row's entries of ROW, from its checksum on: nothing but its group and its
    trajectory."""
    numbers = (np.nan, np.nan, False, False, False, np.nan, np.nan, -1, -1)
    return (0, 0, 0, group, trajectory, *numbers, *(False for _ in OPTIONAL_VECTORS), False, False)


def _overflows(row: RecordedRow) -> bool:
    """Return whether the tokens that sampling has kept are not known at a trained token."""
    kept = row.sampling_kept_ids
    return kept is not None and bool((row.loss_mask & (kept < 0).all(1)).any())


def _checked_rows(
    file: RowFile, rules: Rules, problems: Problems
) -> Iterator[tuple[int, int, RecordedRow | WrongRow | None]]:
    """Yield the number from 1, the place and the contents of each row; None for one that is too
    long.

    What is wrong with rows is added to the problems.
    """
    if file.names is not None:
        tokens = () if has_texts(file.names) else ("token_ids", "loss_mask")
        for name in (*tokens, *rules.required):
            if name not in file.names:
                columns = ", ".join(file.names)
                advice = rules.advice_without(name)
                problems.add(file.label, f"has no column {name}; its columns are {columns}{advice}")
    problems.raise_if_any()
    if isinstance(file, ParquetFile):
        parsed = (row for batch in file.batches() for row in parse_rows(batch, rules))
        rows = ((place + 1, place, row) for place, row in enumerate(parsed))
    else:
        rows = ((number, place, parse_row(raw, rules)) for number, place, raw in file.rows())
    for number, place, row in rows:
        for name, reason in row.problems if isinstance(row, WrongRow) else ():
            label = f"{file.label}:{number}"
            problems.add(f"{label}:{name}" if name else label, reason)
        yield number, place, row
