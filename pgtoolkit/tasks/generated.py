"""Tasks whose problems are drawn, and divided by a hash of the problem into those of training and
those held out."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import string
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

from pgtoolkit.completion import Prompt
from pgtoolkit.config.schema_tasks import ChainSumTaskConfig, ShortestPathTaskConfig, SumsTaskConfig
from pgtoolkit.tasks.tasks import Score, Task
from pgtoolkit.tasks.verifiers import last_number

_PROBLEMS_FOR_ONE_HELD_OUT = 8
"""One of this many problems is held out."""

_FURTHEST = 4
"""The most nodes that an edge of a graph leads ahead."""
_EDGES = 2
"""Edges from each node."""
_SHORTEST = 3
"""The fewest edges of a path that is asked for."""

Draw = Callable[[], float]
"""Returns a number from 0 to 1, without 1: the one method of Python's generator whose numbers stay
the same over its versions."""


def is_held_out(text: str) -> bool:
    """Return whether a problem is held out: by a hash of its terms, or edges, in any order."""
    parts = " ".join(sorted(re.findall(r"\w+", text)))
    return hashlib.sha256(parts.encode()).digest()[0] % _PROBLEMS_FOR_ONE_HELD_OUT == 0


class DividedTask(Task):
    """A task whose problems are divided. Training asks no problem that is held out, whatever the
    seed; an evaluation asks only those. The reward is 0 or 1.

    A prompt's answer is a worked one. A completion needs only the part of it that is verified.
    """

    def __init__(
        self,
        config: ChainSumTaskConfig | ShortestPathTaskConfig | SumsTaskConfig,
        seed: int,
        held_out: bool,
    ):
        self.alphabet = getattr(config, "alphabet", None)
        self._config = config
        self._seed = seed
        self._held_out = held_out

    def prompt(self, index: int) -> Prompt:
        draw = random.Random(f"{self._seed} {index}").random
        while True:
            text, answer = self._drawn(draw)
            if is_held_out(text) == self._held_out:
                return Prompt(text, answer, index, f"prompt {index}")

    def rows(self) -> Iterator[Prompt]:
        """Return a few of the longest prompts."""
        assert not isinstance(self._config, SumsTaskConfig)  # Its task has rows of its own.
        longest, _ = self._config.longest
        prompts = map(self.prompt, itertools.count())
        return itertools.islice((prompt for prompt in prompts if len(prompt.text) == longest), 8)

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        right = finished and self._is_right(prompt, completion)
        return Score(float(right), right)

    @abstractmethod
    def _drawn(self, draw: Draw) -> tuple[str, str]:
        """Return a problem, and its worked answer."""

    @abstractmethod
    def _is_right(self, prompt: Prompt, completion: str) -> bool:
        """Return whether a completion that has ended by itself is right."""


class ChainSumTask(DividedTask):
    """The sum of two-digit numbers modulo 100: `57+68+21=` is answered by `57+68=25;25+21=46;46`.

    Only the part after the last semicolon, `46`, is verified.
    """

    def _drawn(self, draw: Draw) -> tuple[str, str]:
        assert isinstance(self._config, ChainSumTaskConfig)
        terms = [
            _between(draw, 10, 99)
            for _ in range(_between(draw, self._config.min_terms, self._config.max_terms))
        ]
        sums = [total % 100 for total in itertools.accumulate(terms)]
        steps = zip(sums, terms[1:], sums[1:], strict=False)
        worked = "".join(f"{before:02}+{term}={total:02};" for before, term, total in steps)
        return "+".join(map(str, terms)) + "=", f"{worked}{sums[-1]:02}"

    def _is_right(self, prompt: Prompt, completion: str) -> bool:
        return completion.rpartition(";")[2] == prompt.answer.rpartition(";")[2]


class SumsTask(DividedTask):
    """A sum in words: `What is 23 + 45? Answer with the number only.`

    The reward is 1 where the last number of a completion is the sum, whether it has ended by itself
    or not.
    """

    def rows(self) -> Iterator[Prompt]:
        """Return a few prompts; all have equally many characters."""
        return map(self.prompt, range(8))

    def score(self, prompt: Prompt, completion: str, finished: bool) -> Score:
        right = self._is_right(prompt, completion)
        return Score(float(right), right)

    def _drawn(self, draw: Draw) -> tuple[str, str]:
        assert isinstance(self._config, SumsTaskConfig)
        low = 10 ** (self._config.num_digits - 1)
        terms = [_between(draw, low, 10 * low - 1) for _ in range(self._config.num_terms)]
        return self._config.asked(terms), str(sum(terms))

    def _is_right(self, prompt: Prompt, completion: str) -> bool:
        return last_number(completion) == last_number(prompt.answer)


class ShortestPathTask(DividedTask):
    """A shortest path in a directed graph without cycles: `ab bd ac cd de:ae=` is answered by
    `abde`, or by `acde`.

    Two edges leave each node but the last two, to two of the next four nodes in an order that the
    prompt does not show. A path that is asked for has three edges or more. Any shortest path
    counts; the worked answer is one of them, by chance.
    """

    def _drawn(self, draw: Draw) -> tuple[str, str]:
        assert isinstance(self._config, ShortestPathTaskConfig)
        while True:
            count = _between(draw, self._config.min_nodes, self._config.max_nodes)
            nodes = _shuffled(string.ascii_lowercase[:count], draw)
            ahead = [
                _shuffled(nodes[i + 1 : i + 1 + _FURTHEST], draw)[:_EDGES] for i in range(count)
            ]
            edges = dict(zip(nodes, ahead, strict=True))
            paths = _shortest_paths(edges, nodes[int(draw() * count)])
            ends = [node for node in nodes if node in paths and len(paths[node][0]) > _SHORTEST]
            if not ends:
                continue
            to_end = paths[ends[int(draw() * len(ends))]]
            path = to_end[int(draw() * len(to_end))]
            pairs = [node + after for node in nodes for after in edges[node]]
            return f"{' '.join(_shuffled(pairs, draw))}:{path[0]}{path[-1]}=", path

    def _is_right(self, prompt: Prompt, completion: str) -> bool:
        edges, question = prompt.text[:-1].split(":")
        steps = {f"{a}{b}" for a, b in itertools.pairwise(completion)}
        ends = completion[:1] + completion[-1:]
        is_shortest = len(completion) == len(prompt.answer)
        return is_shortest and ends == question and steps <= {*edges.split()}


def _shortest_paths(edges: dict[str, list[str]], start: str) -> dict[str, list[str]]:
    """Return all shortest paths from the start to each node that can be reached."""
    paths = {start: [start]}
    newest = dict(paths)
    while newest:
        further: dict[str, list[str]] = {}
        for node, to_node in newest.items():
            for after in edges[node]:
                if after not in paths:
                    further.setdefault(after, []).extend(path + after for path in to_node)
        paths |= further
        newest = further
    return paths


def _between(draw: Draw, low: int, high: int) -> int:
    """Draw a whole number, both ends included."""
    return low + int(draw() * (high - low + 1))


def _shuffled(items: Sequence[str], draw: Draw) -> list[str]:
    return [items[place] for _, place in sorted((draw(), place) for place in range(len(items)))]
