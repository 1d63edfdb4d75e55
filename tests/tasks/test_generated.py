"""The task sums: sizes of problems, and held-out problems that training never asks."""

import re

import pytest

from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.cli import main
from pgtoolkit.completion import Prompt
from pgtoolkit.config.keys import option_values
from pgtoolkit.runs.directory import RunDirectory
from pgtoolkit.tasks.generated import is_held_out
from pgtoolkit.tasks.settings import SumsTaskSettings
from pgtoolkit.tasks.tasks import Task


def sums(seed: int = 0, held_out: bool = False, num_terms: int = 2, num_digits: int = 2) -> Task:
    values = option_values("task", "sums") | {"num_terms": num_terms, "num_digits": num_digits}
    return make_task(SumsTaskSettings(**values), seed, held_out=held_out)


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


def test_sums_are_the_same_on_every_machine_and_in_every_version():
    first = sums().prompt(0)
    assert first == Prompt("What is 41 + 83? Answer with the number only.", "124", 0, "prompt 0")
    assert sums(1).prompt(0).text != first.text != sums().prompt(1).text


@pytest.mark.parametrize("name", ["chain_sum", "shortest_path"])
def test_a_task_of_an_earlier_version_is_answered_with_the_data_set_that_has_it(
    name, tmp_path, capsys
):
    use = f"task=reasoning_gym task.dataset={name}."
    assert main(["check", f"task={name}"]) == 2
    assert f"(got '{name}'). The options of task are the files in conf/task. Use {use}" in (
        capsys.readouterr().out
    )
    with RunDirectory(tmp_path / "run") as run:
        run.write_config({"task": {"name": name}}, [])
    assert main(["resume", str(tmp_path / "run")]) == 2
    refused = capsys.readouterr().err
    assert f"config.yaml needs a task that this version of pgtoolkit has (got task={name})" in (
        refused
    )
    assert f"provenance.json names, or a new run with {use}" in refused
