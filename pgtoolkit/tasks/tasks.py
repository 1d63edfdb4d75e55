"""Tasks: prompts by number, what a sampler is asked and what it writes, and the score of that."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pgtoolkit.config.evaluation import QUESTIONS
from pgtoolkit.config.schema_tasks import (
    ConversationTaskConfig,
    PromptsTaskConfig,
    ReasoningGymTaskConfig,
    ReverseTaskConfig,
    TaskConfig,
)
from pgtoolkit.errors import ConfigError, DataError, first_line
from pgtoolkit.system.functions import blaming
from pgtoolkit.system.report import refusal
from pgtoolkit.tasks.prompt_rows import Prompt, read_prompts
from pgtoolkit.tasks.verifiers import Named, Question, verifiers_of

if TYPE_CHECKING:  # `pgtk check` does without torch
    from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One prompt to be completed.

    tokens: the prompt's token ids. completions: how many completions of it are wanted.
    seed: of this prompt in this run, below 2^32: with the number of a completion it decides all that is drawn for it.
    max_tokens: of a completion, where that is less than the sampler's own number; None: that.
    prompt: whose tokens these are, for whoever scores the completions.
    """

    tokens: list[int]
    completions: int
    seed: int
    max_tokens: int | None = None
    prompt: Prompt | None = None


@dataclass(frozen=True)
class Completion:
    """What a sampler wrote after one prompt.

    tokens: (C,) int64, up to the end-of-sequence token or the one that completes a stop string (`StopStrings`),
        whichever comes first, and with it.
    log_probs: (N,) float32, of each drawn token under the distribution it was sampled from: tempered, and renormalised
        if top_p cuts it.
    finish_reason: "stop" after an end-of-sequence token or a stop string, else "length", at the longest allowed.
    model_version: of the weights that wrote it, as `publish` was told.
    drawn: (C,) bool, False for what an environment said; None: the model drew all tokens, and N = C.
    conversation: of a task of several turns, what its score is made of.
    """

    tokens: Tensor
    log_probs: Tensor
    finish_reason: Literal["stop", "length"]
    model_version: int
    drawn: Tensor | None = None
    conversation: Any = None


@dataclass(frozen=True)
class Score:
    """reward: finite. exact_match: whether the completion is right, whatever partial reward there is.

    measures: further numbers of the document by name, see there.
    """

    reward: float
    exact_match: bool
    measures: dict[str, float] = field(default_factory=dict)


class Task(Protocol):
    """Endless prompts by index, a pure function of the seed and the index, and their verification.

    num_prompts: number of different prompts, after which they come again; None: they never end.
    alphabet: the characters of prompts and answers; None: unknown, expect any printable ASCII.
    """

    num_prompts: int | None = None
    alphabet: str | None = None

    def prompt(self, index: int) -> Prompt: ...

    def rows(self) -> Iterator[Prompt]:
        """Each different prompt once, by the number of its row; where they never end a few, some of the longest."""
        return map(self.prompt, range(64))

    def drop(self, rows: set[int]) -> None:
        """Never ask these again; not of a task without end."""

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        """finished: whether the completion ended by itself, with the end of the sequence or a stop string."""
        ...

    def scores(self, answers: Sequence[tuple[Prompt, str, bool]]) -> list[Score]:
        """Of each answer its `score`, in their order."""
        return [self.score(*answer) for answer in answers]

    def close(self) -> None:
        """End what scoring has started."""


Once = Callable[[Callable[[], Any]], Any]
"""Calls what reads or measures files, on some ranks, and gives all what it returns."""


def make_task(config: TaskConfig, seed: int, once: Once = lambda read: read(), held_out: bool = False) -> Task:
    """The task of a configuration. Raises ConfigError or, for a file of prompts, DataError.

    held_out: of a task that divides its problems itself, those that training never asks.
    """
    if config.name == "prompts":
        return PromptsTask(config, seed, once)
    if config.name in ("chain_sum", "shortest_path"):
        from pgtoolkit.tasks.generated import ChainSumTask, ShortestPathTask  # not above: it imports this file

        return {"chain_sum": ChainSumTask, "shortest_path": ShortestPathTask}[config.name](config, seed, held_out)
    if config.name in ("conversation", "guess"):
        from pgtoolkit.tasks.conversation import ConversationTask  # which is made of what is below

        return ConversationTask(config, seed, once)
    return {"reverse": ReverseTask, "reasoning_gym": ReasoningGymTask}[config.name](config, seed)


class ReverseTask(Task):
    """A number written backwards: `482913=` asks for `319284` and the end of the sequence.

    The reward is the fraction of right positions among the n digits and the end: the end is right if it comes after
    exactly n characters. So a policy without any skill gets some reward, and every position is learnt by itself.
    """

    alphabet = ReverseTaskConfig.alphabet

    def __init__(self, config: ReverseTaskConfig, seed: int):
        self._num_digits = config.num_digits
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        digits = "".join(str(self._digit(index, place)) for place in range(self._num_digits))
        return Prompt(digits + "=", digits[::-1], index, f"prompt {index}")

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        right = sum(given == wanted for given, wanted in zip(completion, prompt.answer, strict=False))
        ends = finished and len(completion) == len(prompt.answer)
        return Score((right + ends) / (len(prompt.answer) + 1), ends and completion == prompt.answer)

    def _digit(self, index: int, place: int) -> int:
        # A hash, not a generator of random numbers: the same in every version of every library.
        return int.from_bytes(hashlib.sha256(f"{self._seed} {index} {place}".encode()).digest()[:8], "little") % 10


class Seeds(Task):
    """Endless prompts without words, for whoever makes some of their numbers."""

    def of_row(self, row: int) -> Prompt:
        return Prompt("", "", row, f"prompt {row}")

    prompt = of_row

    def row(self, index: int) -> int:
        return index


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

    def row(self, index: int) -> int:
        """The number of the row that a prompt is."""
        return self._kept[index % self.num_prompts]


class ReasoningGymTask(_NumberedRows):
    """A data set of the reasoning-gym package, which writes its questions from a seed and scores answers itself.

    The package's score, 0 to 1, is the reward; the completion is stripped of white space around it first.
    `options` are the data set's own, among them `size`, the number of different questions.
    """

    def __init__(self, config: ReasoningGymTaskConfig, seed: int):
        from reasoning_gym import create_dataset

        options = {"size": QUESTIONS} | config.options
        try:
            data = create_dataset(config.dataset, seed=seed, **options)
        except (TypeError, ValueError, AssertionError) as error:  # among them a seed of its own
            setting = f"task.dataset={config.dataset} with task.options={config.options}"
            needs, reason = "a data set of reasoning-gym, and options that it has", "Its seed is that of the run."
            raise ConfigError(refusal(setting, needs, first_line(error), reason, "task.dataset=chain_sum")) from error
        super().__init__(options["size"])
        self._dataset = config.dataset
        self._score_answer = data.score_answer
        # A question is asked for again for each completion that is scored.
        self._entry = functools.lru_cache(maxsize=1024)(data.__getitem__)

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        with blaming(f"the scorer of {self._dataset} of reasoning-gym", DataError, _called_on(completion, prompt)):
            reward = float(self._score_answer(completion.strip(), self._entry(self.row(prompt.index))))
        if not math.isfinite(reward):
            raise DataError(f"reasoning-gym scored {completion[:60]!r} with {reward}; a reward must be finite")
        return Score(reward, reward >= 1)

    def of_row(self, row: int) -> Prompt:
        entry = self._entry(row)
        return Prompt(entry["question"], entry["answer"] or "", row, f"{self._dataset}:{row}")


class PromptRows(_NumberedRows):
    """Prompts from files, all of them read at the start. They come in another seeded order in every pass."""

    def __init__(self, config: PromptsTaskConfig | ConversationTaskConfig, seed: int, once: Once):
        from pgtoolkit.tasks.shuffle import shuffled  # not above: `pgtk check` does without NumPy and pyarrow

        chosen = config.path, config.split, config.prompt_field, config.answer_field
        self._read = once(functools.partial(read_prompts, *chosen))
        super().__init__(len(self._read))
        self.alphabet = "".join(sorted({character for row in self._read for character in row.text + row.answer}))
        # The number of prompts is among the arguments since some may be dropped.
        self._order = functools.lru_cache(maxsize=2)(lambda number, count: shuffled(count, seed, number))

    def row(self, index: int) -> int:
        number, place = divmod(index, self.num_prompts)
        return self._kept[self._order(number, self.num_prompts)[place]]

    def of_row(self, row: int) -> Prompt:
        return self._read[row]


class PromptsTask(PromptRows):
    """Prompts with reference answers from files, scored by verifiers.

    Verifiers see the text of a completion whether it was finished or cut off at its maximum length. The reward is the
    sum of each one's score times its weight; a score of 1 or more by the first is an exact match.
    """

    def __init__(self, config: PromptsTaskConfig, seed: int, once: Once):
        chosen = config.verifiers or {"": {"verifier": config.verifier, "pattern": config.pattern}}
        self._weights = {name: float(one.get("weight", 1)) for name, one in chosen.items()}
        self.named = [
            Named(f"task.verifiers.{name}.verifier" if name else "task.verifier", one["verifier"], one.get("pattern"))
            for name, one in chosen.items()
        ]
        self._verifiers = verifiers_of(self.named, config.verifier_processes, config.verifier_seconds)
        super().__init__(config, seed, once)

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        return self.scores([(prompt, completion, finished)])[0]

    def scores(self, answers: Sequence[tuple[Prompt, str, bool]]) -> list[Score]:
        count = len(self._weights)
        questions = [
            Question(number, completion, prompt.answer, _called_on(completion, prompt))
            for prompt, completion, _ in answers
            for number in range(count)
        ]
        scores = self._verifiers.answers(questions)
        return [self._score(scores[i : i + count]) for i in range(0, len(scores), count)]

    def outcomes(self, number: int, completions: Sequence[tuple[Prompt, str]]) -> list[float | str]:
        """Return what the verifier of this number in `named` says of each completion, TIMEOUT or CRASH if nothing."""
        questions = [
            Question(number, completion, prompt.answer, _called_on(completion, prompt))
            for prompt, completion in completions
        ]
        return self._verifiers.answers(questions)

    def close(self) -> None:
        self._verifiers.close()

    def _score(self, outcomes: list[float | str]) -> Score:
        """Of the scores of one completion, by verifier; one without an answer counts 0."""
        scores = [0.0 if isinstance(outcome, str) else outcome for outcome in outcomes]
        reward = sum(weight * score for weight, score in zip(self._weights.values(), scores, strict=True))
        measures = {f"reward/{name}": score for name, score in zip(self._weights, scores, strict=True) if name}
        return Score(reward, scores[0] >= 1, measures | self._verifiers.measures(outcomes))


def _called_on(completion: str, prompt: Prompt) -> str:
    return (
        f"the completion {completion[:200]!r} of the prompt at {prompt.place}, whose answer is {prompt.answer[:60]!r}"
    )
