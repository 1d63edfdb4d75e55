"""The task of sums in words, whose problems are drawn, and divided by a hash of the problem into
those of training and those held out."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator

from pgtoolkit.completion import Prompt
from pgtoolkit.tasks.settings import SumsTaskSettings
from pgtoolkit.tasks.tasks import Score, Task
from pgtoolkit.tasks.verifiers import last_number

_PROBLEMS_FOR_ONE_HELD_OUT = 8
"""One of this many problems is held out."""

Draw = Callable[[], float]
"""Returns a number from 0 to 1, without 1: the one method of Python's generator whose numbers stay
the same over its versions."""


def is_held_out(text: str) -> bool:
    """Return whether a problem is held out: by a hash of its words, in any order."""
    parts = " ".join(sorted(re.findall(r"\w+", text)))
    return hashlib.sha256(parts.encode()).digest()[0] % _PROBLEMS_FOR_ONE_HELD_OUT == 0


class SumsTask(Task):
    """A sum in words: `What is 23 + 45? Answer with the number only.`

    Training asks no problem that is held out, whatever the seed; an evaluation asks only those.
    The reward is 1 where the last number of a completion is the sum, whether it has ended by itself
    or not, else 0.
    """

    def __init__(self, settings: SumsTaskSettings, seed: int, held_out: bool):
        self._settings = settings
        self._seed = seed
        self._held_out = held_out

    def prompt(self, index: int) -> Prompt:
        draw = random.Random(f"{self._seed} {index}").random
        while True:
            text, answer = self._drawn(draw)
            if is_held_out(text) == self._held_out:
                return Prompt(text, answer, index, f"prompt {index}")

    def rows(self) -> Iterator[Prompt]:
        """Return a few prompts; all have equally many characters."""
        return map(self.prompt, range(8))

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        right = last_number(completion) == last_number(prompt.answer)
        return Score(float(right), right)

    def _drawn(self, draw: Draw) -> tuple[str, str]:
        """Return a problem, and its answer."""
        low = 10 ** (self._settings.num_digits - 1)
        high = 10 * low - 1
        terms = [_between(draw, low, high) for _ in range(self._settings.num_terms)]
        return self._settings.asked(terms), str(sum(terms))


def _between(draw: Draw, low: int, high: int) -> int:
    """Draw a whole number, both ends included."""
    return low + int(draw() * (high - low + 1))
