"""Tasks: prompts by number, what a sampler is asked and what it writes, and the score of that."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pgtoolkit.completion import Prompt
from pgtoolkit.config.evaluation_sets import QUESTIONS
from pgtoolkit.config.schema_tasks import (
    ConversationTaskConfig,
    PromptsTaskConfig,
    ReasoningGymTaskConfig,
    ReverseTaskConfig,
)
from pgtoolkit.errors import DataError
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.failed_scores import FailedScores
from pgtoolkit.tasks.gym import GymData, GymQuestion
from pgtoolkit.tasks.process_pool import NOTHING, Failure, Processes
from pgtoolkit.tasks.prompt_rows import read_prompts
from pgtoolkit.tasks.reward_functions import BatchScores, Signature
from pgtoolkit.tasks.verifiers import Named, Response, Scoring


@dataclass(frozen=True)
class Score:
    """reward: finite; None where scoring failed and the completion is left out
    (`task.verifier_failure=exclude`).

    exact_match: whether the completion is right, whatever partial reward there is. measures:
        further numbers of the
    document by name, see there. failed: whether scoring failed, also where `task.failure_score`
        took its place.
    logged: what reward functions have logged of it, by name.
    """

    reward: float | None
    exact_match: bool
    measures: dict[str, float] = field(default_factory=dict)
    failed: bool = False
    logged: dict[str, str] = field(default_factory=dict)


class Task:
    """Endless prompts by index, a pure function of the seed and the index, and their verification.

    num_prompts: number of different prompts, after which they come again; None: they never end.
    alphabet: the characters of prompts and answers; None: unknown, expect any printable ASCII.
    """

    num_prompts: int | None = None
    alphabet: str | None = None

    def prompt(self, index: int) -> Prompt:
        raise NotImplementedError

    def row(self, index: int) -> int:
        """Return the number of the row that a prompt is; without an end each is a row of its
        own."""
        return index

    def rows(self) -> Iterator[Prompt]:
        """Each different prompt once, by the number of its row; where they never end a few, some of
        the longest."""
        return map(self.prompt, range(64))

    def drop(self, rows: set[int]) -> None:
        """Never ask these again; not of a task without end."""

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        """finished: whether the completion ended by itself, with the end of the sequence or a stop
        string."""
        raise NotImplementedError

    def scores(self, responses: Sequence[Response]) -> list[Score]:
        """Return the `score` of each, in their order."""
        return [
            self.score(response.prompt, response.text, response.finished) for response in responses
        ]

    def close(self) -> None:
        """End what scoring has started."""


Once = Callable[[Callable[[], Any]], Any]
"""Calls what reads or measures files, on some ranks, and gives all what it returns."""


class ReverseTask(Task):
    """A number written backwards: `482913=` asks for `319284` and the end of the sequence.

    The reward is the fraction of right positions among the n digits and the end: the end is right
    if it comes after exactly n characters. So a policy without any skill gets some reward, and
    every position is learnt by itself.
    """

    alphabet = ReverseTaskConfig.alphabet

    def __init__(self, config: ReverseTaskConfig, seed: int):
        self._num_digits = config.num_digits
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        digits = "".join(str(self._digit(index, place)) for place in range(self._num_digits))
        return Prompt(digits + "=", digits[::-1], index, f"prompt {index}")

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        right = sum(
            given == wanted for given, wanted in zip(completion, prompt.answer, strict=False)
        )
        ends = finished and len(completion) == len(prompt.answer)
        return Score(
            (right + ends) / (len(prompt.answer) + 1), ends and completion == prompt.answer
        )

    def _digit(self, index: int, place: int) -> int:
        # A hash, not a generator of random numbers: the same in every version of every library.
        return (
            int.from_bytes(
                hashlib.sha256(f"{self._seed} {index} {place}".encode()).digest()[:8], "little"
            )
            % 10
        )


class Seeds(Task):
    """Endless prompts without words, for whoever makes some of their numbers."""

    def of_row(self, row: int) -> Prompt:
        return Prompt("", "", row, f"prompt {row}")

    def prompt(self, index: int) -> Prompt:
        return self.of_row(index)


class _NumberedRows(Task):
    """What tasks of a finite number of rows share."""

    def __init__(self, num_rows: int):
        self._kept: Sequence[int] = range(num_rows)

    @property
    def num_prompts(self) -> int:
        return len(self._kept)

    def rows(self) -> Iterator[Prompt]:
        return map(self.of_row, self._kept)

    def drop(self, rows: set[int]) -> None:
        self._kept = [row for row in self._kept if row not in rows]

    def prompt(self, index: int) -> Prompt:
        return dataclasses.replace(self.of_row(self.row(index)), index=index)

    def of_row(self, row: int) -> Prompt:
        raise NotImplementedError

    def row(self, index: int) -> int:
        return self._kept[index % self.num_prompts]


class ReasoningGymTask(_NumberedRows):
    """A data set of the reasoning-gym package, which writes its questions from a seed and scores
    answers itself.

    The package's score, 0 to 1, is the reward; the completion is stripped of white space around it
    first. `options` are the data set's own, among them `size`, the number of different questions.
    """

    def __init__(self, config: ReasoningGymTaskConfig, seed: int):
        options = {"size": QUESTIONS} | config.options
        told = (config.dataset, options, config.options, seed)
        super().__init__(options["size"])
        self._dataset = config.dataset
        self._data = GymData(*told)
        self._has_processes = config.verifier_processes > 0
        limits = config.verifier_processes, config.verifier_seconds
        self._scorers = Processes(
            GymData, told, "verifier", f"task.dataset={config.dataset}", *limits
        )
        self._failed_scores = FailedScores(config)

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        return self.scores([Response(prompt, completion, finished)])[0]

    def scores(self, responses: Sequence[Response]) -> list[Score]:
        questions = [
            GymQuestion(self.row(response.prompt.index), response.text, str(response))
            for response in responses
        ]
        ask = self._scorers.answers if self._has_processes else self._answers_here
        outcomes = ask(questions)
        failures = [
            (
                f"the scorer of {self._dataset} of reasoning-gym {outcome.reason} on {question.on}",
                outcome,
            )
            for question, outcome in zip(questions, outcomes, strict=True)
            if isinstance(outcome, Failure)
        ]
        self._failed_scores.note(failures, len(questions))
        return [self._score(outcome) for outcome in outcomes]

    def close(self) -> None:
        self._scorers.close()

    def _answers_here(self, questions: Sequence[GymQuestion]) -> list[float | Failure]:
        return [self._data.answer(question) for question in questions]

    def _score(self, outcome: float | Failure) -> Score:
        measures = self._scorers.measures([outcome])
        if isinstance(outcome, Failure):
            return Score(self._failed_scores.score, False, measures, failed=True)
        return Score(outcome, outcome >= 1, measures)

    def of_row(self, row: int) -> Prompt:
        entry = self._data.entry(row)
        return Prompt(entry["question"], entry["answer"] or "", row, f"{self._dataset}:{row}")


class PromptRows(_NumberedRows):
    """Prompts from files, all of them read at the start. They come in another seeded order in every
    pass."""

    def __init__(
        self,
        config: PromptsTaskConfig | ConversationTaskConfig,
        seed: int,
        once: Once,
        keep_rows: bool = False,
    ):
        # not above: `pgtk check` does without NumPy and pyarrow
        from pgtoolkit.tasks.shuffle import shuffled

        chosen = config.path, config.split, config.prompt_field, config.answer_field
        cut = getattr(config, "config", None), getattr(config, "answer_pattern", None)
        self._read = once(functools.partial(read_prompts, *chosen, *cut, keep_rows))
        super().__init__(len(self._read))
        self.alphabet = "".join(
            sorted({character for row in self._read for character in row.text + row.answer})
        )
        # The number of prompts is among the arguments since some may be dropped.
        self._order = functools.lru_cache(maxsize=2)(
            lambda number, count: shuffled(count, seed, number)
        )

    def row(self, index: int) -> int:
        number, place = divmod(index, self.num_prompts)
        return self._kept[self._order(number, self.num_prompts)[place]]

    def of_row(self, row: int) -> Prompt:
        return self._read[row]


class PromptsTask(PromptRows):
    """Prompts with reference answers from files, scored by verifiers.

    Verifiers see the text of a completion whether it was finished or cut off at its maximum length.
    The reward is the sum of each one's score times its weight, of those that score the completion;
    a score of 1 or more by the first of them is an exact match.
    """

    def __init__(self, config: PromptsTaskConfig, seed: int, once: Once):
        chosen = config.verifiers or {"": {"verifier": config.verifier, "pattern": config.pattern}}
        self._weights = {name: float(one.get("weight", 1)) for name, one in chosen.items()}
        self.named = [
            Named(
                f"task.verifiers.{name}.verifier" if name else "task.verifier",
                one["verifier"],
                one.get("pattern"),
            )
            for name, one in chosen.items()
        ]
        self._failed_scores = FailedScores(config)
        processes = config.verifier_processes
        self._scoring = Scoring(
            self.named, processes, config.verifier_seconds, config.verifier_concurrency
        )
        self.signatures = self._scoring.signatures
        keep_rows = any(
            signature is not None and signature.wants_rows for signature in self.signatures
        )
        super().__init__(config, seed, once, keep_rows)
        for verifier, signature in zip(self.named, self.signatures, strict=True):
            if signature is not None:
                self._check_columns(verifier, signature)

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        return self.scores([Response(prompt, completion, finished)])[0]

    def scores(self, responses: Sequence[Response]) -> list[Score]:
        said = [self._scoring.scores(number, responses) for number in range(len(self.named))]
        outcomes = [
            list(of_response)
            for of_response in zip(*(of_one.scores for of_one in said), strict=True)
        ]
        for of_response in outcomes:
            if all(outcome is None for outcome in of_response):
                of_response[:] = [Failure(NOTHING, "returned None")] * len(of_response)
        self._note_failures(responses, outcomes)
        metrics = self._metrics(said)
        return [
            replace(self._score(of_response, metrics), logged=self._logged(said, place))
            for place, of_response in enumerate(outcomes)
        ]

    def outcomes(
        self, number: int, responses: Sequence[Response]
    ) -> Sequence[float | Failure | None]:
        """Return what the verifier of this number in `named` says of each; None where it does not
        score it."""
        return self._scoring.scores(number, responses).scores

    def close(self) -> None:
        self._scoring.close()

    def _check_columns(self, verifier: Named, signature: Signature) -> None:
        """Raise DataError where a row lacks a column that a function asks for."""
        for name in signature.columns:
            lacking = next(
                (prompt for prompt in self.rows() if name not in (prompt.row or {})), None
            )
            if lacking is not None:
                raise DataError(
                    refusal(
                        setting=str(verifier),
                        needs=f"a column {name} in every row, which its function asks for",
                        got=f"{', '.join(lacking.row or {})} at {lacking.place}",
                        reason="Parameters without a default are columns of the file, beside "
                        "completions and prompts.",
                        use=f"a file with this column, or a default: {name}=None",
                    )
                )

    def _metrics(self, said: Sequence[BatchScores]) -> dict[str, float]:
        """Return what functions have logged of these completions as a whole, by metric."""
        metrics = {}
        for name, scores in zip(self._weights, said, strict=True):
            prefix = f"verifier/{name}/" if name else "verifier/"
            metrics |= {
                prefix + metric: sum(values) / len(values)
                for metric, values in scores.metrics.items()
            }
        return metrics

    def _logged(self, said: Sequence[BatchScores], place: int) -> dict[str, str]:
        """Return what functions have logged of the completion at this place; a verifier's name
        tells equal columns."""
        logged = {}
        for name, scores in zip(self._weights, said, strict=True):
            for column, texts in scores.columns.items():
                logged[f"{name}/{column}" if name else column] = texts[place]
        return logged

    def _note_failures(
        self, responses: Sequence[Response], outcomes: list[list[float | Failure | None]]
    ) -> None:
        """Tell of each completion's first failure. outcomes: of each completion what its verifiers
        say."""
        failures = []
        for response, of_response in zip(responses, outcomes, strict=True):
            asked = zip(self.named, of_response, strict=True)
            failed = [
                (verifier, outcome) for verifier, outcome in asked if isinstance(outcome, Failure)
            ]
            for verifier, failure in failed[:1]:
                failures.append((f"{verifier} {failure.reason} on {response}", failure))
        self._failed_scores.note(failures, len(responses))

    def _score(self, outcomes: list[float | Failure | None], metrics: dict[str, float]) -> Score:
        """Return the score of one completion; without that of a verifier that failed there is no
        sum."""
        failed = any(isinstance(outcome, Failure) for outcome in outcomes)
        scored = [
            (name, weight, self._failed_scores.score if isinstance(outcome, Failure) else outcome)
            for (name, weight), outcome in zip(self._weights.items(), outcomes, strict=True)
            if outcome is not None
        ]
        counted = [weight * score for _, weight, score in scored if score is not None]
        reward = sum(counted) if len(counted) == len(scored) else None
        measures = {
            f"reward/{name}": score for name, _, score in scored if name and score is not None
        }
        first = next(outcome for outcome in outcomes if outcome is not None)
        is_right = not isinstance(first, Failure) and first >= 1
        measures |= metrics | self._scoring.measures(outcomes)
        return Score(reward, is_right, measures, failed)
