"""Generated tasks: sizes of problems, correct answers by plain search, and held-out problems that
training never asks."""

import itertools
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.completion import Prompt
from pgtoolkit.config.keys import option_values
from pgtoolkit.config.schema_tasks import ChainSumTaskConfig, ShortestPathTaskConfig, SumsTaskConfig
from pgtoolkit.tasks.generated import is_held_out
from pgtoolkit.tasks.tasks import Task


def chain_sum(seed: int = 0, held_out: bool = False, **sizes: int) -> Task:
    sizes = {"min_terms": 3, "max_terms": 8} | sizes
    return make_task(ChainSumTaskConfig(**sizes), seed, held_out=held_out)


def shortest_path(seed: int = 0, held_out: bool = False, **sizes: int) -> Task:
    sizes = {"min_nodes": 12, "max_nodes": 20} | sizes
    return make_task(ShortestPathTaskConfig(**sizes), seed, held_out=held_out)


def sums(seed: int = 0, held_out: bool = False, num_terms: int = 2, num_digits: int = 2) -> Task:
    values = option_values("task", "sums") | {"num_terms": num_terms, "num_digits": num_digits}
    return make_task(SumsTaskConfig(**values), seed, held_out=held_out)


def distances(prompt: Prompt) -> tuple[dict[str, int], str]:
    """Return the distance of each node from the start, by plain search, and the start and end."""
    edges, question = prompt.text.removesuffix("=").split(":")
    start = question[0]
    distance = {start: 0}
    queue = [start]
    for node in queue:
        for edge in edges.split():
            if edge[0] == node and edge[1] not in distance:
                distance[edge[1]] = distance[node] + 1
                queue.append(edge[1])
    return distance, question


@pytest.mark.parametrize("make", [chain_sum, shortest_path])
def test_training_never_asks_a_held_out_problem(make):
    """With several seeds a problem of few terms would appear on both sides if it could."""
    sizes = {"max_terms": 3} if make is chain_sum else {}
    problems = {
        held_out: {
            make(seed, held_out, **sizes).prompt(i).text for seed in range(3) for i in range(400)
        }
        for held_out in (False, True)
    }
    assert not problems[False] & problems[True]
    for held_out, texts in problems.items():
        assert len(texts) > 1150
        assert {is_held_out(text) for text in texts} == {held_out}


@pytest.mark.parametrize("num_terms", [2, 3])
@pytest.mark.parametrize("num_digits", [1, 2, 4])
def test_sums_have_the_configured_size_and_are_scored_by_the_last_number(num_terms, num_digits):
    task = sums(7, num_terms=num_terms, num_digits=num_digits)
    for index in range(50):
        prompt = task.prompt(index)
        problem = re.fullmatch(r"What is ([\d +]+)\? Answer with the number only\.", prompt.text)[1]
        terms = problem.split(" + ")
        assert [len(term) for term in terms] == [num_digits] * num_terms
        total = sum(map(int, terms))
        assert prompt.answer == str(total)
        for finished in (True, False):
            score = task.score(prompt, f"It was 1 and is {total:,}.", finished)
            assert score.reward == 1.0
            assert score.exact_match
            score = task.score(prompt, f"It is {total}, not {total + 1}.", finished)
            assert score.reward == 0.0
            assert not score.exact_match
        assert task.score(prompt, "I do not know", True).reward == 0


def test_training_never_asks_a_held_out_sum():
    """The same terms in another order count as the same sum."""
    asked = {}
    for held_out in (False, True):
        prompts = [sums(seed, held_out).prompt(index) for seed in range(2) for index in range(600)]
        asked[held_out] = {tuple(sorted(re.findall(r"\d+", prompt.text))) for prompt in prompts}
    assert not asked[False] & asked[True]
    assert min(len(terms) for terms in asked.values()) > 300


def test_an_eighth_is_held_out_and_another_order_is_the_same_problem():
    pairs = [f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)]
    assert sum(map(is_held_out, pairs)) / len(pairs) == pytest.approx(1 / 8, abs=0.015)
    assert all(
        is_held_out(f"{a}+{b}=") == is_held_out(f"{b}+{a}=")
        for a in range(10, 50)
        for b in range(50, 90)
    )
    assert is_held_out("ab bd ac cd:ad=") == is_held_out("cd ac ab bd:ad=")


def test_generated_problems_are_the_same_on_every_machine_and_in_every_version():
    assert chain_sum().prompt(0) == Prompt(
        "71+81+14+93=", "71+81=52;52+14=66;66+93=59;59", 0, "prompt 0"
    )
    expected = (
        "rn ce od dp gr gj kh eg ai qm nb js ks ba fi bf ah ol ed jn mp rk hi ln dl nk pn "
        "cq sa pl si qd hf md lj:db="
    )
    assert shortest_path().prompt(0) == Prompt(expected, "dpnb", 0, "prompt 0")
    assert chain_sum(1).prompt(0).text != chain_sum().prompt(0).text != chain_sum().prompt(1).text


@given(st.integers(0, 2**32), st.integers(0, 10**12), st.booleans())
def test_the_steps_of_a_worked_sum_are_correct(seed, index, held_out):
    task = chain_sum(seed, held_out)
    prompt = task.prompt(index)
    terms = [int(term) for term in prompt.text.removesuffix("=").split("+")]
    *steps, last = prompt.answer.split(";")
    sums = list(itertools.accumulate(terms))
    expected = [
        [before % 100, term, total % 100]
        for before, term, total in zip(sums, terms[1:], sums[1:], strict=False)
    ]
    assert [[int(number) for number in re.split(r"[+=]", step)] for step in steps] == expected
    assert last == f"{sum(terms) % 100:02}"
    assert 20 <= len(prompt.answer) <= 90
    assert set(prompt.text + prompt.answer) <= set(task.alphabet)
    assert task.score(prompt, prompt.answer, True).exact_match


@pytest.mark.parametrize(
    ("completion", "finished", "right"),
    [
        ("57+68=25;25+21=46;46", True, True),
        ("46", True, True),
        ("57+68=99;46", True, True),
        ("57+68=25;25+21=46;46", False, False),
        ("57+68=25;25+21=46;64", True, False),
        ("57+68=25;25+21=46;46;", True, False),
        ("57+68=25;25+21=46", True, False),
        ("", True, False),
    ],
)
def test_only_the_text_after_the_last_semicolon_of_a_sum_is_scored(completion, finished, right):
    prompt = Prompt("57+68+21=", "57+68=25;25+21=46;46", 0, "prompt 0")
    score = chain_sum().score(prompt, completion, finished)
    assert score.reward == float(right)
    assert score.exact_match is right


@given(st.integers(0, 2**32), st.integers(0, 10**12), st.booleans())
def test_a_worked_path_is_a_shortest_path(seed, index, held_out):
    task = shortest_path(seed, held_out)
    prompt = task.prompt(index)
    distance, (start, end) = distances(prompt)
    # Each node is one edge further from the start.
    assert [distance[node] for node in prompt.answer] == list(range(len(prompt.answer)))
    assert prompt.answer[0] == start
    assert prompt.answer[-1] == end
    assert distance[end] >= 3
    assert set(prompt.text + prompt.answer) <= set(task.alphabet)
    assert task.score(prompt, prompt.answer, True).exact_match


def test_exactly_the_shortest_paths_are_correct():
    prompt = Prompt("ab bd ac cd de da af fg gd:ae=", "abde", 0, "prompt 0")
    right = {
        "".join(path)
        for n in range(6)
        for path in itertools.product("abcdefg", repeat=n)
        if is_correct(prompt, path)
    }
    assert right == {"abde", "acde"}
    assert not shortest_path().score(prompt, "abde", False).exact_match


def is_correct(prompt: Prompt, path: Sequence[str]) -> bool:
    score = shortest_path().score(prompt, "".join(path), True)
    assert score.reward == float(score.exact_match)
    return score.exact_match


def test_many_path_problems_have_several_correct_answers():
    """Pass@k and diversity need them. No edge goes back."""
    task = shortest_path()
    num_several = 0
    for index in range(60):
        prompt = task.prompt(index)
        edges = prompt.text.split(":")[0].split()
        assert len({*edges}) == len(edges) == 2 * len({*"".join(edges)}) - 3
        _, (start, end) = distances(prompt)
        paths = [start]
        for _ in range(len(prompt.answer) - 1):
            paths = [path + edge[1] for path in paths for edge in edges if edge[0] == path[-1]]
        right = [path for path in paths if path[-1] == end]
        assert all(is_correct(prompt, path) == (path in right) for path in paths)
        num_several += len(right) > 1
    assert 25 < num_several < 55


@pytest.mark.parametrize("make", [chain_sum, shortest_path])
def test_problems_have_the_configured_sizes_and_the_announced_longest_length(make):
    name, sizes = ("terms", (4, 6)) if make is chain_sum else ("nodes", (9, 11))
    task = make(**{f"min_{name}": sizes[0], f"max_{name}": sizes[1]})
    prompts = [task.prompt(i) for i in range(300)]
    if make is chain_sum:
        num_parts = {prompt.text.count("+") + 1 for prompt in prompts}
    else:
        num_parts = {len({*prompt.text} - {*" :="}) for prompt in prompts}
    assert num_parts == {*range(sizes[0], sizes[1] + 1)}
    kind = ChainSumTaskConfig if make is chain_sum else ShortestPathTaskConfig
    longest, answer = kind(**{f"min_{name}": sizes[0], f"max_{name}": sizes[1]}).longest
    assert max(len(prompt.text) for prompt in prompts) == longest
    assert {len(prompt.text) for prompt in task.rows()} == {longest}
    longest_answer = max(len(prompt.answer) for prompt in prompts) + 1
    if make is chain_sum:
        assert longest_answer == answer
    else:
        assert longest_answer <= answer
