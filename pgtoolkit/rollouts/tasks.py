"""Tasks: prompts by number, and the score of a completion."""

from __future__ import annotations

import difflib
import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pgtoolkit.config.schema import PromptsTaskConfig, ReasoningGymTaskConfig, ReverseTaskConfig
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.rollouts.verifiers import make_verifier
from pgtoolkit.system.functions import blaming


@dataclass(frozen=True)
class Prompt:
    """A prompt, its reference answer, the index it was asked for by, and where it comes from, such as `a.jsonl:12`."""

    text: str
    answer: str
    index: int
    place: str


@dataclass(frozen=True)
class Score:
    """reward: finite. exact_match: whether the completion is right, whatever partial reward there is."""

    reward: float
    exact_match: bool


class Task(Protocol):
    """Endless prompts by index, a pure function of the seed and the index, and their verification.

    num_prompts: number of different prompts, after which they come again; None: they never end, and are equally long.
    alphabet: the characters of prompts and answers; None: unknown, expect any printable ASCII.
    """

    num_prompts: int | None
    alphabet: str | None

    def prompt(self, index: int) -> Prompt: ...

    def rows(self) -> Iterator[Prompt]:
        """Each different prompt once, by the number of its row; a few where they never end."""
        ...

    def drop(self, rows: set[int]) -> None:
        """Never ask these again; not of a task without end."""
        ...

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        """finished: whether the completion ended by itself, with the end of the sequence."""
        ...


TaskConfig = ReverseTaskConfig | ReasoningGymTaskConfig | PromptsTaskConfig


def make_task(config: TaskConfig, seed: int) -> Task:
    """The task of a configuration. Raises ConfigError or, for a file of prompts, DataError."""
    return {"reverse": ReverseTask, "reasoning_gym": ReasoningGymTask, "prompts": PromptsTask}[config.name](
        config, seed
    )


class ReverseTask:
    """A number written backwards: `482913=` asks for `319284` and the end of the sequence.

    The reward is the fraction of right positions among the n digits and the end: the end is right if it comes after
    exactly n characters. So a policy without any skill gets some reward, and every position is learnt by itself.
    """

    num_prompts = None
    alphabet = "0123456789="

    def __init__(self, config: ReverseTaskConfig, seed: int):
        self._num_digits = config.num_digits
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        digits = "".join(str(self._digit(index, place)) for place in range(self._num_digits))
        return Prompt(digits + "=", digits[::-1], index, f"prompt {index}")

    def rows(self) -> Iterator[Prompt]:
        return map(self.prompt, range(64))

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        right = sum(given == wanted for given, wanted in zip(completion, prompt.answer, strict=False))
        ends = finished and len(completion) == len(prompt.answer)
        return Score((right + ends) / (len(prompt.answer) + 1), ends and completion == prompt.answer)

    def _digit(self, index: int, place: int) -> int:
        # A hash, not a generator of random numbers: the same in every version of every library.
        return int.from_bytes(hashlib.sha256(f"{self._seed} {index} {place}".encode()).digest()[:8], "little") % 10


class _NumberedRows:
    """What tasks of a finite number of rows share."""

    def __init__(self, num_rows: int):
        self._kept: Sequence[int] = range(num_rows)

    @property
    def num_prompts(self) -> int:
        return len(self._kept)

    def rows(self) -> Iterator[Prompt]:
        return (self._prompt_of(row, row) for row in self._kept)

    def drop(self, rows: set[int]) -> None:
        self._kept = [row for row in self._kept if row not in rows]

    def prompt(self, index: int) -> Prompt:
        return self._prompt_of(self._row(index), index)


class ReasoningGymTask(_NumberedRows):
    """A data set of the reasoning-gym package, which writes its questions from a seed and scores answers itself.

    The package's score, 0 to 1, is the reward; the completion is stripped of white space around it first.
    `options` are the data set's own, among them `size`, the number of different questions.
    """

    alphabet = None
    default_size = 10_000

    def __init__(self, config: ReasoningGymTaskConfig, seed: int):
        options = dict(config.options)
        if "seed" in options:
            raise ConfigError(
                f"task.options.seed={options['seed']} needs to be left out. The run's seed is used. Use seed=NUMBER."
            )
        options.setdefault("size", self.default_size)
        data = _reasoning_gym_data(config.dataset, seed, options)
        super().__init__(options["size"])
        self._dataset = config.dataset
        self._score_answer = data.score_answer
        # A question is asked for again for each completion that is scored.
        self._entry = functools.lru_cache(maxsize=1024)(data.__getitem__)

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        with blaming(f"the scorer of {self._dataset} of reasoning-gym", DataError, _called_on(completion, prompt)):
            reward = float(self._score_answer(completion.strip(), self._entry(self._row(prompt.index))))
        if not math.isfinite(reward):
            raise DataError(f"reasoning-gym scored {completion[:60]!r} with {reward}; a reward must be finite")
        return Score(reward, reward >= 1)

    def _row(self, index: int) -> int:
        return self._kept[index % self.num_prompts]

    def _prompt_of(self, row: int, index: int) -> Prompt:
        entry = self._entry(row)
        return Prompt(entry["question"], entry["answer"] or "", index, f"{self._dataset}:{row}")


def _reasoning_gym_data(name: str, seed: int, options: dict):
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            "task=reasoning_gym needs the reasoning-gym package (it is not installed). "
            'Some of its dependencies need a compiler. Use pip install "pgtoolkit[reasoning-gym]".'
        ) from error
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5) or ["chain_sum"]
        raise ConfigError(
            f"task.dataset={name} needs one of the {len(DATASETS)} data sets of reasoning-gym (got {name}). "
            f"Use {' or '.join(f'task.dataset={n}' for n in near)}."
        )
    try:
        return create_dataset(name, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"task.options={options} needs options of the data set {name} (got an error: {error or 'refused'})."
        ) from error


class PromptsTask(_NumberedRows):
    """Prompts with reference answers from JSONL or Parquet files, scored by a verifier.

    All prompts are read at the start. They come in another seeded order in every pass. The verifier sees the text of a
    completion whether it was finished or cut off at its maximum length.
    """

    def __init__(self, config: PromptsTaskConfig, seed: int):
        from pgtoolkit.rollouts.shuffle import shuffled  # not above: `pgtk check` does without NumPy and pyarrow

        self._verifier = config.verifier
        self._verify = make_verifier(config.verifier, config.pattern)
        self._read = read_prompts(config.path, config.prompt_field, config.answer_field)
        super().__init__(len(self._read))
        self.alphabet = "".join(sorted({character for *texts, _ in self._read for text in texts for character in text}))
        # The number of prompts is among the arguments since some may be dropped.
        self._order = functools.lru_cache(maxsize=2)(lambda number, count: shuffled(count, seed, number))

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        with blaming(f"task.verifier={self._verifier}", DataError, _called_on(completion, prompt)):
            reward = self._verify(completion, prompt.answer)
        return Score(reward, reward >= 1)

    def _row(self, index: int) -> int:
        number, place = divmod(index, self.num_prompts)
        return self._kept[self._order(number, self.num_prompts)[place]]

    def _prompt_of(self, row: int, index: int) -> Prompt:
        return Prompt(*self._read[row][:2], index, self._read[row][2])


def _called_on(completion: str, prompt: Prompt) -> str:
    return (
        f"the completion {completion[:200]!r} of the prompt at {prompt.place}, whose answer is {prompt.answer[:60]!r}"
    )


def read_prompts(path: str, prompt_field: str, answer_field: str) -> list[tuple[str, str, str]]:
    """Of each row the prompt, its answer, and its place, such as `a.jsonl:12`.

    Raises DataError with all that is wrong with the files.
    """
    from pgtoolkit.rollouts.files import Problems, open_files

    problems = Problems(f"the prompts of task.path={path} cannot be used")
    prompts = []
    for file in open_files(path, "task.path", (prompt_field, answer_field)):
        for number, _, row in file.rows():
            place = f"{file.label}:{number}"
            if isinstance(row, str):
                problems.add(place, row)
                continue
            texts = {field: _text(row.get(field), field == answer_field) for field in (prompt_field, answer_field)}
            for field in (field for field, text in texts.items() if text is None):
                there = ", ".join(file.names or row) or "no fields"
                problem = "is missing" if row.get(field) is None else f"needs a text (got {row[field]!r:.40})"
                problems.add(f"{place}:{field}", f"{problem}; the row has {there}")
            prompts.append((texts[prompt_field], texts[answer_field], place))
    problems.raise_if_any()
    if not prompts:
        raise DataError(f"task.path={path} needs at least one prompt (got none).")
    return prompts


def _text(value, may_be_number: bool) -> str | None:
    """The value as a text that is not empty; None if it is none. Answers may be numbers."""
    if may_be_number and (type(value) is int or (type(value) is float and math.isfinite(value))):
        return str(value)
    return value if isinstance(value, str) and value else None
