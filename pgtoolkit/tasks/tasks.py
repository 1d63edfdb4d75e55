"""Tasks: prompts by number, and the scores of their completions."""

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
from pgtoolkit.tasks.reward_functions import BatchScores
from pgtoolkit.tasks.signatures import Signature
from pgtoolkit.tasks.verifiers import Named, Response, Scoring


@dataclass(frozen=True)
class Score:
    """The score of a completion.

    reward: finite; None where scoring failed and the completion is left out
        (`task.verifier_failure=exclude`).
    exact_match: whether the completion is right, whatever partial reward it gets.
    measures: further numbers of the document by name; see `Document`.
    failed: whether scoring failed, also if `task.failure_score` is the reward then.
    logged: texts that reward functions have logged of it, by name.
    """

    reward: float | None
    exact_match: bool
    measures: dict[str, float] = field(default_factory=dict)
    failed: bool = False
    logged: dict[str, str] = field(default_factory=dict)


class Task:
    """Endless prompts by index, a pure function of the seed and the index, and the scores of their
    completions.

    num_prompts: number of different prompts, after which they come again; None: they never end.
    alphabet: the characters of prompts and answers; None: unknown, expect any printable ASCII.
    """

    num_prompts: int | None = None
    alphabet: str | None = None

    def prompt(self, index: int) -> Prompt:
        raise NotImplementedError

    def row(self, index: int) -> int:
        """Return the number of a prompt's row. If prompts never end, each is a row by itself."""
        return index

    def rows(self) -> Iterator[Prompt]:
        """Return each different prompt once, by the number of its row.

        If prompts never end, return a few, some of the longest among them.
        """
        return map(self.prompt, range(64))

    def drop(self, rows: set[int]) -> None:
        """Never ask these rows again. Not for a task without end."""

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        """Return the score of a completion.

        finished: whether it ended by itself, with the end of the sequence or a stop string.
        """
        raise NotImplementedError

    def scores(self, responses: Sequence[Response]) -> list[Score]:
        """Return the `score` of each, in their order."""
        return [
            self.score(response.prompt, response.text, response.finished) for response in responses
        ]

    def close(self) -> None:
        """End what scoring has started."""


Once = Callable[[Callable[[], Any]], Any]
"""Calls a function that reads or measures files on some ranks, and returns its result on all."""


class ReverseTask(Task):
    """A number written backwards: `482913=` asks for `319284` and the end of the sequence.

    The reward is the fraction of right positions among the n digits and the end, which is right if
    it comes after exactly n characters. So a policy without any skill gets some reward, and each
    position can be learned by itself.
    """

    alphabet = ReverseTaskConfig.alphabet

    def __init__(self, config: ReverseTaskConfig, seed: int):
        self._num_digits = config.num_digits
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        digits = "".join(str(self._digit(index, place)) for place in range(self._num_digits))
        return Prompt(digits + "=", digits[::-1], index, f"prompt {index}")

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        answer = prompt.answer
        right = sum(digit == wanted for digit, wanted in zip(completion, answer, strict=False))
        ends = finished and len(completion) == len(answer)
        return Score((right + ends) / (len(answer) + 1), ends and completion == answer)

    def _digit(self, index: int, place: int) -> int:
        # A hash, not a generator of random numbers: the same in every version of every library.
        digest = hashlib.sha256(f"{self._seed} {index} {place}".encode()).digest()
        return int.from_bytes(digest[:8], "little") % 10


class Seeds(Task):
    """Endless prompts without text, for tasks that make their text from the number."""

    def of_row(self, row: int) -> Prompt:
        return Prompt("", "", row, f"prompt {row}")

    def prompt(self, index: int) -> Prompt:
        return self.of_row(index)


class _NumberedRows(Task):
    """A task with a finite number of rows."""

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
    """A data set of the reasoning-gym package, which writes questions from a seed and scores the
    answers.

    The package's score, 0 to 1, is the reward; the completion is stripped of white space around it
    first. `options` are the data set's own, among them `size`, the number of different questions.
    """

    def __init__(self, config: ReasoningGymTaskConfig, seed: int):
        options = {"size": QUESTIONS} | config.options
        arguments = (config.dataset, options, config.options, seed)
        super().__init__(options["size"])
        self._dataset = config.dataset
        self._data = GymData(*arguments)
        self._has_processes = config.verifier_processes > 0
        self._scorers = Processes(
            kind=GymData,
            arguments=arguments,
            noun="verifier",
            setting=f"task.dataset={config.dataset}",
            processes=config.verifier_processes,
            seconds=config.verifier_seconds,
        )
        self._failed_scores = FailedScores(config)

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        return self.scores([Response(prompt, completion, finished)])[0]

    def scores(self, responses: Sequence[Response]) -> list[Score]:
        questions = [
            GymQuestion(self.row(response.prompt.index), response.text, str(response))
            for response in responses
        ]
        answers = self._scorers.answers if self._has_processes else self._answers_here
        outcomes = answers(questions)
        scorer = f"the scorer of {self._dataset} of reasoning-gym"
        failures = [
            (f"{scorer} {outcome.reason} on {question.on}", outcome)
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
    """Prompts from files, which are all read at the start. Every pass has another seeded order."""

    def __init__(
        self,
        config: PromptsTaskConfig | ConversationTaskConfig,
        seed: int,
        once: Once,
        keep_rows: bool = False,
    ):
        # Not above: `pgtk check` does without NumPy and pyarrow.
        from pgtoolkit.tasks.shuffle import shuffled

        read = functools.partial(
            read_prompts,
            config.path,
            config.split,
            config.prompt_field,
            config.answer_field,
            config=getattr(config, "config", None),
            answer_pattern=getattr(config, "answer_pattern", None),
            keep_rows=keep_rows,
        )
        self._prompts: list[Prompt] = once(read)
        super().__init__(len(self._prompts))
        characters = {
            character for prompt in self._prompts for character in prompt.text + prompt.answer
        }
        self.alphabet = "".join(sorted(characters))
        # The number of prompts is among the arguments since some may be dropped.
        self._order = functools.lru_cache(maxsize=2)(
            lambda epoch, count: shuffled(count, seed, epoch)
        )

    def row(self, index: int) -> int:
        epoch, place = divmod(index, self.num_prompts)
        return self._kept[self._order(epoch, self.num_prompts)[place]]

    def of_row(self, row: int) -> Prompt:
        return self._prompts[row]


class PromptsTask(PromptRows):
    """Prompts with reference answers from files, scored by verifiers.

    Verifiers see the text of a completion whether it was finished or cut off at its maximum length.
    The reward is the weighted sum of the scores of the verifiers that score the completion; a score
    of 1 or more by the first of them is an exact match.
    """

    def __init__(self, config: PromptsTaskConfig, seed: int, once: Once):
        only = {"": {"verifier": config.verifier, "pattern": config.pattern}}
        verifiers = config.verifiers or only
        self._weights = {
            name: float(options.get("weight", 1)) for name, options in verifiers.items()
        }
        self.named = [
            Named(
                f"task.verifiers.{name}.verifier" if name else "task.verifier",
                options["verifier"],
                options.get("pattern"),
            )
            for name, options in verifiers.items()
        ]
        self._failed_scores = FailedScores(config)
        self._scoring = Scoring(
            self.named,
            config.verifier_processes,
            config.verifier_seconds,
            config.verifier_concurrency,
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
        by_verifier = [self._scoring.scores(number, responses) for number in range(len(self.named))]
        outcomes = [
            list(of_response)
            for of_response in zip(*(batch.scores for batch in by_verifier), strict=True)
        ]
        for of_response in outcomes:
            if all(outcome is None for outcome in of_response):
                of_response[:] = [Failure(NOTHING, "returned None")] * len(of_response)
        self._note_failures(responses, outcomes)
        metrics = self._metrics(by_verifier)
        return [
            replace(self._score(of_response, metrics), logged=self._logged(by_verifier, place))
            for place, of_response in enumerate(outcomes)
        ]

    def outcomes(
        self, number: int, responses: Sequence[Response]
    ) -> Sequence[float | Failure | None]:
        """Return the scores by the verifier of this number in `named`; None for a completion that
        it does not score."""
        return self._scoring.scores(number, responses).scores

    def close(self) -> None:
        self._scoring.close()

    def _check_columns(self, verifier: Named, signature: Signature) -> None:
        """Raise DataError if a row lacks a column that a function asks for."""
        for name in signature.columns:
            without = (prompt for prompt in self.rows() if name not in (prompt.row or {}))
            lacking = next(without, None)
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

    def _metrics(self, by_verifier: Sequence[BatchScores]) -> dict[str, float]:
        """Return the metrics that functions have logged of all these completions together."""
        metrics = {}
        for name, scores in zip(self._weights, by_verifier, strict=True):
            prefix = f"verifier/{name}/" if name else "verifier/"
            for metric, values in scores.metrics.items():
                metrics[prefix + metric] = sum(values) / len(values)
        return metrics

    def _logged(self, by_verifier: Sequence[BatchScores], place: int) -> dict[str, str]:
        """Return the texts that functions have logged of the completion at this place, by column,
        each under the name of its verifier."""
        logged = {}
        for name, scores in zip(self._weights, by_verifier, strict=True):
            for column, texts in scores.columns.items():
                logged[f"{name}/{column}" if name else column] = texts[place]
        return logged

    def _note_failures(
        self, responses: Sequence[Response], outcomes: list[list[float | Failure | None]]
    ) -> None:
        """Log notes on each completion's first failure.

        outcomes: for each completion, those of all verifiers.
        """
        failures = []
        for response, of_response in zip(responses, outcomes, strict=True):
            for verifier, outcome in zip(self.named, of_response, strict=True):
                if isinstance(outcome, Failure):
                    failures.append((f"{verifier} {outcome.reason} on {response}", outcome))
                    break
        self._failed_scores.note(failures, len(responses))

    def _score(self, outcomes: list[float | Failure | None], metrics: dict[str, float]) -> Score:
        """Return the score of one completion.

        There is no reward without the score of a verifier that failed.
        """
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
        # None stands for a verifier that does not score this completion.
        first = next(outcome for outcome in outcomes if outcome is not None)
        is_right = not isinstance(first, Failure) and first >= 1
        measures |= metrics | self._scoring.measures(outcomes)
        return Score(reward, is_right, measures, failed)
