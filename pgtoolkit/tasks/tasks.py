"""Tasks: prompts by number, and the scores of their completions."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Protocol, TypeVar

from pgtoolkit.completion import Prompt
from pgtoolkit.tasks.failed_scores import FailedScore, FailedScores
from pgtoolkit.tasks.gym import GymData, GymQuestion
from pgtoolkit.tasks.process_pool import Failure, Processes
from pgtoolkit.tasks.scoring import Response
from pgtoolkit.tasks.settings import QUESTIONS, ReasoningGymTaskSettings, ReverseTaskSettings

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Score:
    """The score of a completion.

    reward: finite; None where scoring failed and the completion is left out
        (`task.verifier_failure=exclude`).
    exact_match: whether the completion is right, whatever partial reward it gets; None where the
        verifier that decides it does not score the completion.
    measures: further numbers of the document by name; see `Document`.
    failed: whether scoring failed, also if `task.failure_score` is the reward then.
    logged: texts that reward functions have logged of it, by name.
    """

    reward: float | None
    exact_match: bool | None
    measures: dict[str, float] = field(default_factory=dict)
    failed: bool = False
    logged: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("reward", self.reward), *self.measures.items()):
            if not isinstance(value, Real) and (value is not None or name != "reward"):
                raise ValueError(
                    f"Score needs a number as {name} (got {value!r:.60}). Use float(...)"
                )
        if self.exact_match is not None and not isinstance(self.exact_match, bool | int):
            raise ValueError(
                f"Score needs exact_match=True, False or None (got {self.exact_match!r:.60}). Use "
                "bool(...)"
            )


def above_one(giver: str, score: float, on: str) -> str:
    """Return a note on a score above 1, since lower ones that count as right may be meant as wrong.

    giver: the setting of the user's code that gave it. on: what it is the score of.
    """
    return (
        f"{giver} gives {score:g} to {on}. Every score of 1 or more counts as right, in "
        "exact_match and pass@k. If only the highest score is right, divide by it: return score / "
        f"{score:g}, if {score:g} is the highest."
    )


_above_one: set[str] = set()
"""Functions and environments of which this process has said that they score above 1."""


def is_first_above_one(name: str) -> bool:
    """Return whether a score above 1 by the user's code is the first of this process.

    name: its dotted path. The trial at the start, training and each evaluation set may see one.
    """
    is_first = name not in _above_one
    _above_one.add(name)
    return is_first


class Task:
    """Endless prompts by index, a pure function of the seed and the index, and the scores of their
    completions.

    num_prompts: number of different prompts, after which they come again; None: they never end.
    alphabet: the characters of prompts and answers; None: unknown, expect any printable ASCII.
    """

    num_prompts: int | None = None
    alphabet: str | None = None

    def prompt(self, index: int) -> Prompt:
        raise NotImplementedError(f"{type(self).__name__} needs a method prompt(index)")

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
        name = type(self).__name__
        raise NotImplementedError(f"{name} needs a method score(prompt, completion, finished)")

    def scores(self, responses: Sequence[Response]) -> list[Score]:
        """Return the `score` of each, in their order."""
        return [
            self.score(response.prompt, response.text, response.finished) for response in responses
        ]

    def close(self) -> None:
        """End what scoring has started."""


class Once(Protocol):
    """Calls a function that reads or measures files on some ranks; returns its result on all."""

    def __call__(self, read: Callable[[], _Value], /) -> _Value: ...


class ReverseTask(Task):
    """A number written backwards: `482913=` asks for `319284` and the end of the sequence.

    The reward is the fraction of right positions among the n digits and the end, which is right if
    it comes after exactly n characters. So a policy without any skill gets some reward, and each
    position can be learned by itself.

    never: texts of prompts that are not asked: in their place another number is drawn. There must
        be other ones.
    """

    alphabet = ReverseTaskSettings.alphabet

    def __init__(self, settings: ReverseTaskSettings, seed: int, never: Collection[str] = ()):
        self._num_digits = settings.num_digits
        self._seed = seed
        self._never = never

    def prompt(self, index: int) -> Prompt:
        draw = str(index)
        while True:
            digits = "".join(str(self._digit(draw, place)) for place in range(self._num_digits))
            if digits + "=" not in self._never:
                return Prompt(digits + "=", digits[::-1], index, f"prompt {index}")
            draw += " again"

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        answer = prompt.answer
        right = sum(digit == wanted for digit, wanted in zip(completion, answer, strict=False))
        ends = finished and len(completion) == len(answer)
        return Score((right + ends) / (len(answer) + 1), ends and completion == answer)

    def _digit(self, draw: str, place: int) -> int:
        # A hash, not a generator of random numbers: the same in every version of every library.
        digest = hashlib.sha256(f"{self._seed} {draw} {place}".encode()).digest()
        return int.from_bytes(digest[:8], "little") % 10


class Seeds(Task):
    """Endless prompts without text, for tasks that make their text from the number."""

    def of_row(self, row: int) -> Prompt:
        return Prompt("", "", row, f"prompt {row}")

    def prompt(self, index: int) -> Prompt:
        return self.of_row(index)


class NumberedRows(Task):
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


class ReasoningGymTask(NumberedRows):
    """A data set of the reasoning-gym package, which writes questions from a seed and scores the
    answers.

    The package's score, 0 to 1, is the reward; the completion is stripped of white space around it
    first. `options` are the data set's own, among them `size`, the number of different questions.
    """

    def __init__(self, settings: ReasoningGymTaskSettings, seed: int, held_out: bool = False):
        options = {"size": QUESTIONS} | settings.options
        arguments = (settings.dataset, options, settings.options, seed)
        super().__init__(options["size"])
        self._dataset = settings.dataset
        self._data = GymData(*arguments)
        self._has_processes = settings.verifier_processes > 0
        self._scorers = Processes(
            kind=GymData,
            arguments=arguments,
            noun="verifier",
            setting=f"task.dataset={settings.dataset}",
            processes=settings.verifier_processes,
            seconds=settings.verifier_seconds,
        )
        self._failed_scores = FailedScores(settings, held_out)

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
            FailedScore(scorer, outcome, question.on)
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
