"""Tasks divided by a hash of the problem: what is asked, what is right, and what training never
asks."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgtoolkit.completion import Prompt
from pgtoolkit.config.keys import option_values
from pgtoolkit.config.schema_tasks import ChainSumTaskConfig, ShortestPathTaskConfig, SumsTaskConfig
from pgtoolkit.tasks.from_config import make_task
from pgtoolkit.tasks.generated import is_held_out


def chain_sum(seed=0, held_out=False, **sizes):
    sizes = {"min_terms": 3, "max_terms": 8} | sizes
    return make_task(ChainSumTaskConfig("chain_sum", **sizes), seed, held_out=held_out)


def shortest_path(seed=0, held_out=False, **sizes):
    sizes = {"min_nodes": 12, "max_nodes": 20} | sizes
    return make_task(ShortestPathTaskConfig("shortest_path", **sizes), seed, held_out=held_out)


def sums(seed=0, held_out=False, num_terms=2, num_digits=2):
    values = option_values("task", "sums") | {"num_terms": num_terms, "num_digits": num_digits}
    return make_task(SumsTaskConfig(**values), seed, held_out=held_out)


def distances(prompt):
    """By plain search, in how many edges each node is reached from the start of a prompt; and the
    two that it names."""
    edges, question = prompt.text.removesuffix("=").split(":")
    reached, after = {question[0]: 0}, [question[0]]
    for node in after:
        for edge in edges.split():
            if edge[0] == node and edge[1] not in reached:
                reached[edge[1]] = reached[node] + 1
                after.append(edge[1])
    return reached, question


@pytest.mark.parametrize("make", [chain_sum, shortest_path])
def test_training_never_asks_what_is_held_out(make):
    """Whatever the seeds, so that a problem of few terms comes up on both sides if it may; an
    eighth is held out."""
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
def test_sums_are_as_large_as_asked_and_scored_by_the_last_number(num_terms, num_digits):
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
            assert (score.reward, score.exact_match) == (1.0, True)
            score = task.score(prompt, f"It is {total}, not {total + 1}.", finished)
            assert (score.reward, score.exact_match) == (0.0, False)
        assert task.score(prompt, "I do not know", True).reward == 0


def test_training_never_asks_a_held_out_sum():
    """Nor the same terms in another order."""
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


def test_the_same_numbers_on_every_machine_and_in_every_version():
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
def test_a_worked_sum_is_right(seed, index, held_out):
    task = chain_sum(seed, held_out)
    prompt = task.prompt(index)
    terms = [int(term) for term in prompt.text.removesuffix("=").split("+")]
    *steps, last = prompt.answer.split(";")
    sums = list(itertools.accumulate(terms))
    assert [
        (int(a), int(b), int(c)) for a, b, c in (re.split(r"[+=]", step) for step in steps)
    ] == [
        (before % 100, term, total % 100)
        for before, term, total in zip(sums, terms[1:], sums[1:], strict=False)
    ]
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
def test_what_counts_of_a_sum_is_behind_the_last_semicolon(completion, finished, right):
    prompt = Prompt("57+68+21=", "57+68=25;25+21=46;46", 0, "prompt 0")
    score = chain_sum().score(prompt, completion, finished)
    assert (score.reward, score.exact_match) == (float(right), right)


@given(st.integers(0, 2**32), st.integers(0, 10**12), st.booleans())
def test_a_worked_path_is_a_shortest_one(seed, index, held_out):
    task = shortest_path(seed, held_out)
    prompt = task.prompt(index)
    reached, (start, end) = distances(prompt)
    # each node is one edge on
    assert [reached[node] for node in prompt.answer] == list(range(len(prompt.answer)))
    assert (prompt.answer[0], prompt.answer[-1]) == (start, end)
    assert reached[end] >= 3
    assert set(prompt.text + prompt.answer) <= set(task.alphabet)
    assert task.score(prompt, prompt.answer, True).exact_match


def test_every_shortest_path_is_right_and_nothing_else():
    prompt = Prompt("ab bd ac cd de da af fg gd:ae=", "abde", 0, "prompt 0")
    right = {
        "".join(path)
        for n in range(6)
        for path in itertools.product("abcdefg", repeat=n)
        if scored(prompt, path)
    }
    assert right == {"abde", "acde"}
    assert not shortest_path().score(prompt, "abde", False).exact_match


def scored(prompt, path):
    score = shortest_path().score(prompt, "".join(path), True)
    assert score.reward == float(score.exact_match)
    return score.exact_match


def test_paths_by_chance_and_several_right_answers():
    """Most questions have several, so that pass@k and diversity mean something; no edge goes
    back."""
    task, several = shortest_path(), 0
    for index in range(60):
        prompt = task.prompt(index)
        edges = prompt.text.split(":")[0].split()
        assert len({*edges}) == len(edges) == 2 * len({*"".join(edges)}) - 3
        length, (_, (start, end)) = len(prompt.answer), distances(prompt)
        paths = [start]
        for _ in range(length - 1):
            paths = [path + edge[1] for path in paths for edge in edges if edge[0] == path[-1]]
        right = [path for path in paths if path[-1] == end]
        assert all(scored(prompt, path) == (path in right) for path in paths)
        several += len(right) > 1
    assert 25 < several < 55


@pytest.mark.parametrize("make", [chain_sum, shortest_path])
def test_problems_are_as_large_as_asked_and_what_is_longest_is_known(make):
    name, sizes = ("terms", (4, 6)) if make is chain_sum else ("nodes", (9, 11))
    task = make(**{f"min_{name}": sizes[0], f"max_{name}": sizes[1]})
    prompts = [task.prompt(i) for i in range(300)]
    if make is chain_sum:
        found = {prompt.text.count("+") + 1 for prompt in prompts}
    else:
        found = {len({*prompt.text} - {*" :="}) for prompt in prompts}
    assert found == {*range(sizes[0], sizes[1] + 1)}
    kind = ChainSumTaskConfig if make is chain_sum else ShortestPathTaskConfig
    longest, answer = kind("", *sizes).longest
    assert max(len(prompt.text) for prompt in prompts) == longest
    assert {len(prompt.text) for prompt in task.rows()} == {longest}
    most = max(len(prompt.answer) for prompt in prompts) + 1
    assert most == answer if make is chain_sum else most <= answer
