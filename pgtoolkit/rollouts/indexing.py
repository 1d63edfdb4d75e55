"""How recorded rollouts are indexed: one pass over the files, in which every row is checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pgtoolkit.batch import OPTIONAL_VECTORS
from pgtoolkit.config.schema_loss import AdvantageEstimator
from pgtoolkit.config.schema_rollouts import RecordedRolloutConfig
from pgtoolkit.errors import DataError
from pgtoolkit.rollouts.advantages import Attempt, Estimator
from pgtoolkit.rollouts.plausible import Plausibility
from pgtoolkit.rollouts.recorded_index import ROW, RecordedIndex, first_parts, read_index, stamp_of
from pgtoolkit.rollouts.rows import Row, Rules, has_texts, parse_row, parse_rows
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.row_files import ParquetFile, Problems, RowFile


@dataclass(eq=False)
class Indexing:
    """Makes the index: every row of the files is read once, and checked; see `RecordedRollouts` for
    the fields."""

    files: Sequence[RowFile]
    config: RecordedRolloutConfig
    estimator: Estimator
    rules: Rules
    needs_groups: bool
    first: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """What the index depends on, but for the files."""
        return repr((self.rules, self.estimator, self.needs_groups, self.config.group_size))

    def kept(self, folder: Path) -> RecordedIndex | None:
        """The index in a run directory, if it is the one that `make` would make of files that have
        not changed."""
        index = read_index(folder)
        if index is None or index.rules != self.key or len(index.files) != len(self.files):
            return None
        texts = self.rules.texts
        if index.texts is not None and (texts is None or index.texts != texts.fingerprint()):
            return None
        return index if all(index.knows(file.label, file.path) for file in self.files) else None

    def make(self) -> RecordedIndex:
        """Raises DataError for what cannot be trained on, the first ten problems as
        file:row:field."""
        self._given = self.estimator.name == AdvantageEstimator.given
        self._problems = Problems("the recorded rollouts cannot be trained on")
        self._groups: dict[int | str, int] = {}
        self._is_mismatched = self._is_cut = False
        self._num_too_long = 0
        self._plausibility = Plausibility()
        # before they are read: a later change is seen
        stamps = [stamp_of(file.path) for file in self.files]
        self._rows = np.fromiter(self._read(), ROW)
        self._problems.raise_if_any()
        self._check_use()
        imitates = self._check_optional()
        self._first = first_parts(self._rows)
        self._attempts = np.flatnonzero(self._first == np.arange(len(self._rows)))
        self._counted = "documents" if len(self._attempts) == len(self._rows) else "trajectories"
        if self._counted == "trajectories":
            counted = f"{len(self._rows)} documents are {len(self._attempts)} trajectories"
            self.notes.append(
                f"{counted}, which rewards, aggregation=sample_mean and constant count (D) once "
                "each."
            )
        self._excluded = self._rows["score_failed"] & np.isnan(self._rows["reward"])
        self._check_attempts()
        self._check_plausible()
        has_groups = self._number_groups()
        self._compute_advantages(imitates)
        self._problems.raise_if_any()
        files = [
            {"name": file.label, **stamp, "sha256": file.digest.hexdigest()}
            for file, stamp in zip(self.files, stamps, strict=True)
        ]
        texts = self.rules.texts
        fingerprint = texts.fingerprint() if texts is not None and texts.read else None
        return RecordedIndex(self._rows, files, self.key, has_groups, self.notes, fingerprint)

    def _read(self) -> Iterator[tuple]:
        """Each row that is right, as ROW has it; what is wrong with the others is added to the
        problems."""
        ids: dict[str, str] = {}
        trajectories, places = {}, itertools.count()
        for file_number, file in enumerate(self.files):
            for count, (number, place, row) in enumerate(
                _checked_rows(file, self.rules, self._problems)
            ):
                if count == self.first:
                    self._is_cut = True
                    break
                if row is None:
                    self._num_too_long += 1
                    continue
                if not self._is_mismatched:
                    self._is_mismatched = not np.array_equal(
                        row.old_log_probs, row.sampling_log_probs
                    )
                here = f"{file.label}:{number}"
                if row.id is not None and (first := ids.setdefault(row.id, here)) != here:
                    self._problems.add(f"{here}:id", f"is {row.id!r} like that of {first}")
                group = (
                    -1
                    if row.group_id is None
                    else self._groups.setdefault(row.group_id, len(self._groups))
                )
                trajectory, place_of_all = -1, next(places)
                # unique in its group, or in the file where that names no groups
                if row.trajectory is not None:
                    prompt = (file_number,) if row.group_id is None else row.group_id
                    trajectory = trajectories.setdefault((prompt, row.trajectory), place_of_all)
                self._plausibility.add(row, group if trajectory in (-1, place_of_all) else -1)
                yield file_number, number, place, *_entries(row, group, trajectory)

    def _check_use(self) -> None:
        """Something is there that can be learned."""
        path = f"rollout.path={self.config.path}"
        rows = self._rows
        if self._num_too_long:
            count = f"{self._num_too_long} of {len(rows) + self._num_too_long} rows"
            self.notes.append(
                f"rollout.too_long=skip leaves out {count}, with more than {self.rules.max_tokens} "
                "tokens."
            )
        texts = self.rules.texts
        chosen = (self.config.chat.value, self.config.trained_turns.value)
        if texts is not None and not texts.read and chosen != ("auto", "all"):
            raise DataError(
                refusal(
                    setting="rollout.chat={} with rollout.trained_turns={}".format(*chosen),
                    needs="rows of messages, or of prompt and completion",
                    got="tokens",
                    reason="It would be ignored.",
                    use="rollout.chat=auto with rollout.trained_turns=all",
                )
            )
        if len(rows) == 0:
            raise DataError(
                f"{path} needs at least one row (got none in "
                f"{', '.join(x.label for x in self.files)})."
            )
        if not rows["trained"].any() and not self._is_cut:
            raise DataError(
                f"{path} needs a trained token (got {len(rows)} documents whose loss_mask is false "
                "everywhere). Nothing would be learned. Mark the tokens of the completions as true."
            )
        if (rows["score_failed"] & np.isnan(rows["reward"])).all() and not self._is_cut:
            raise DataError(
                f"{path} needs a document that was scored (got {len(rows)} with score_failed=true "
                "and no reward). They have weight 0, so nothing would be learned. Record rollouts "
                "whose scoring works."
            )
        if "sampling_log_probs" in self.rules.required and not (
            self._is_mismatched or self._is_cut
        ):
            raise DataError(
                f"{path} needs sampling_log_probs other than old_log_probs (got the same in every "
                "row). A correction would be 1 everywhere. Use old_log_probs that the trainer "
                "computed, or correction=none."
            )

    def _check_optional(self) -> bool:
        """What a row may lack is in all rows or in none. Returns whether these are examples to
        imitate."""
        rows = self._rows
        has = {"old_log_probs": rows["old_log_probs"]}
        if self._given:
            has["advantage"] = rows["has_advantage"]
        for name, there in has.items():
            if there.any() and not there.all():
                self._refuse(int(there.argmin()), name, "is missing; other rows have one")
        imitates, rewarded = (
            self._given and not rows["has_advantage"].any(),
            ~np.isnan(rows["reward"]),
        )
        if imitates and rewarded.any():
            reason = (
                "is missing, and rows have a reward: advantage=dr_grpo makes advantages of rewards"
            )
            self._refuse(int(rewarded.argmax()), "advantage", reason)
        elif imitates:
            self.notes.append(
                "no row has an advantage or a reward: every advantage is 1 (supervised "
                "fine-tuning)."
            )
        self._problems.raise_if_any()
        return imitates

    def _check_attempts(self) -> None:
        """The documents of a trajectory have one reward, and either all or none match exactly."""
        for name in ("reward", "exact_match", "score_failed"):
            own, shared = self._rows[name], self._rows[name][self._first]
            for index in np.flatnonzero((own != shared) & ~(np.isnan(own) & np.isnan(shared))):
                reason = (
                    f"is not that of {self._label(self._first[index])}, which is of the same "
                    "trajectory. "
                )
                reason += "An attempt has one. Let all of its"
                self._refuse(index, name, f"{reason} rows repeat it, or leave the trajectory out")
        self._problems.raise_if_any()

    def _check_plausible(self) -> None:
        """Refuse log-probs one place off; note groups of different prompts, and rows that are there
        twice."""
        misplaced = self._plausibility.misplaced()
        if misplaced is not None:
            raise DataError(
                f"sampling_log_probs in rollout.path={self.config.path} needs the log-prob of each "
                f"token itself (got {misplaced}). Every ratio between the two would compare "
                "different tokens. Move one of the two lists by one place in the program that "
                "writes the rows."
            )
        self.notes += self._plausibility.notes()

    def _number_groups(self) -> bool:
        """Number every document's group, where the data says which it is or `group_size` does;
        whether they do."""
        size, groups = self.config.group_size, self._rows["group"]
        missing = np.flatnonzero(groups < 0)
        if len(missing) == 0:
            self._check_groups(list(self._groups))
        elif self._groups or (self.needs_groups and size is None):
            others = "; other rows have one" if self._groups else ""
            reason = (
                f"is missing{others}. Documents of one prompt share it. Without any, set "
                "rollout.group_size"
            )
            for index in missing:
                self._refuse(index, "group_id", reason)
        else:  # each alone where nothing asks which documents share a prompt
            groups[self._attempts] = np.arange(len(self._attempts)) // (size or 1)
            groups[:] = groups[self._first]
            counts = np.bincount(self._rows["file"][self._attempts], minlength=len(self.files))
            for file, count in zip(self.files, counts, strict=True):
                if count % (size or 1) and not self._is_cut:
                    counted = (
                        f"{count} {self._counted}, which is no multiple of "
                        f"rollout.group_size={size}"
                    )
                    self._problems.add(file.label, f"has no group_id and {counted}")
        self._problems.raise_if_any()
        return len(missing) == 0 or size is not None

    def _check_groups(self, ids: list[int | str]) -> None:
        """Groups that the rows name: all of `group_size`, if that is given, and each in one
        file."""
        size, groups = self.config.group_size, self._rows["group"]
        _, first, counts = np.unique(groups[self._attempts], return_index=True, return_counts=True)
        for number in (
            np.flatnonzero(counts != size) if size is not None and not self._is_cut else ()
        ):
            reason = (
                f"is {ids[number]!r}, a group of {counts[number]} {self._counted}; "
                f"rollout.group_size={size}"
            )
            self._refuse(int(self._attempts[first[number]]), "group_id", reason)
        spread = np.unique(groups * len(self.files) + self._rows["file"]).size - len(counts)
        if spread:
            self.notes.append(
                f"{spread} groups have documents in several files. A group_id means the same "
                "prompt in all of them; if the files count anew, read them one by one or make the "
                "ids differ."
            )

    def _compute_advantages(self, imitates: bool) -> None:
        rows = self._rows
        if imitates:
            rows["advantage"] = 1.0
        elif self.estimator.name == AdvantageEstimator.none:
            rows["advantage"] = 0.0
        elif not self._given:
            order = self._attempts[np.argsort(rows["group"][self._attempts], kind="stable")]
            groups = np.split(order, np.flatnonzero(np.diff(rows["group"][order])) + 1)
            # the others of a group may follow, without whom a function of the user's may not do
            if self._is_cut:
                groups = [
                    members
                    for members in groups
                    if len(members) > 1 and self.estimator.function is None
                ]
            rewards, lengths = (
                rows["reward"].tolist(),
                np.bincount(self._first, rows["trained"]).astype(int).tolist(),
            )
            scored = (~self._excluded).tolist()
            attempts = (
                [Attempt(rewards[i] if scored[i] else None, lengths[i]) for i in members]
                for members in groups
            )
            found = self.estimator.advantages(
                attempts,
                lambda number, problem: self._refuse(groups[number][0], "group_id", problem),
            )
            for members, advantages in zip(groups, found, strict=True):
                rows["advantage"][members] = advantages
            rows["advantage"] = rows["advantage"][self._first]
        if imitates or not self._given:
            rows["has_signal"] = (rows["advantage"].astype(np.float32) != 0) & (rows["trained"] > 0)
        rows["has_signal"] &= ~self._excluded

    def _label(self, index: int) -> str:
        return f"{self.files[self._rows['file'][index]].label}:{self._rows['number'][index]}"

    def _refuse(self, index: int | np.integer, field: str, reason: str) -> None:
        self._problems.add(f"{self._label(int(index))}:{field}", reason)


def _entries(row: Row, group: int, trajectory: int) -> tuple:
    """A row's entries of ROW from its checksum on."""
    trained, old, truth = (
        int(np.count_nonzero(row.loss_mask)),
        row.old_log_probs,
        {None: -1, False: 0, True: 1},
    )
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
        truth[row.truncated],
        truth[row.exact_match],
        *(getattr(row, name) is not None for name in OPTIONAL_VECTORS),
    )


def _checked_rows(
    file: RowFile, rules: Rules, problems: Problems
) -> Iterator[tuple[int, int, Row | None]]:
    """Number from 1, place and contents of each row that is right; what is wrong is added to the
    problems.

    None for a row that is too long, and left out.
    """
    tokens = () if file.names is not None and has_texts(file.names) else ("token_ids", "loss_mask")
    for name in (*tokens, *rules.required):
        if file.names is not None and name not in file.names:
            problems.add(
                file.label, f"has no column {name}; its columns are {', '.join(file.names)}"
            )
    problems.raise_if_any()
    if isinstance(file, ParquetFile):
        parsed = (row for batch in file.batches() for row in parse_rows(batch, rules))
        rows = ((place + 1, place, row) for place, row in enumerate(parsed))
    else:
        rows = ((number, place, parse_row(raw, rules)) for number, place, raw in file.rows())
    for number, place, row in rows:
        if row is None or isinstance(row, Row):
            yield number, place, row
            continue
        for name, reason in row:
            problems.add(f"{file.label}:{number}" + (f":{name}" if name else ""), reason)
