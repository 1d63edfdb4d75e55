"""Runs whose training asked other numbers, since their evaluations hold out others, are noted, and
so is a resume that evaluates numbers that were asked before."""

import hashlib

import numpy as np
import pytest

from pgtoolkit.assembly.open_run import notes_on_asked_numbers
from pgtoolkit.comparison.held_out_prompts import notes_on_other_prompts
from pgtoolkit.config.compose import compose
from pgtoolkit.config.evaluation_sets import held_out_sets
from pgtoolkit.config.names import plain_config
from pgtoolkit.config.schema import Config
from pgtoolkit.runs.find import Run

GROUP_SIZE = 4


def run(name: str, documents: int, **changed: object) -> Run:
    config = {
        "seed": 0,
        "task.name": "reverse",
        "task.num_digits": 3,
        "rollout.name": "policy",
        "rollout.group_size": GROUP_SIZE,
        "evaluation.every": 20,
        "evaluation.seed": 7,
        "evaluation.prompts_per_set": 5,
        "evaluation.sets": {},
    }
    columns = {"documents_seen": np.array([GROUP_SIZE, float(documents)])}
    return Run("/", name, "done", config=config | changed, columns=columns)


def number(seed: int, index: int) -> list[int]:
    """Return the digits of a prompt, by the hash that defines them."""
    digests = [hashlib.sha256(f"{seed} {index} {place}".encode()).digest() for place in range(3)]
    return [int.from_bytes(digest[:8], "little") % 10 for digest in digests]


HELD_OUT = [number(7, index) for index in range(5)]
FIRST = next(index for index in range(10_000) if number(0, index) in HELD_OUT)
"""The first prompt of training that an evaluation of `run` holds out."""


@pytest.mark.parametrize(
    "other", [{"evaluation.every": 0}, {"evaluation.sets.easy.task": "sums", "evaluation.seed": 7}]
)
def test_runs_that_have_asked_another_number_are_noted_from_that_prompt_on(other):
    before = GROUP_SIZE * FIRST  # documents of the prompts 0 to FIRST - 1
    evaluated = run("a", before + 100 * GROUP_SIZE)
    assert notes_on_other_prompts([evaluated, run("b", before, **other)]) == []
    (note,) = notes_on_other_prompts([evaluated, run("b", before + 1, **other)])
    assert f"a and b also differ in prompt {FIRST:,} of training." in note


@pytest.mark.parametrize(
    "other",
    [
        {"evaluation.every": 5},  # the same numbers, evaluated more often
        {"seed": 1, "evaluation.every": 0},  # other prompts, as always with another seed
        {"task.num_digits": 4, "evaluation.every": 0},
        {"task.name": "sums", "evaluation.every": 0},
    ],
)
def test_runs_whose_evaluations_have_replaced_no_prompt_of_the_other_are_not_noted(other):
    documents = GROUP_SIZE * (FIRST + 10)
    assert notes_on_other_prompts([run("a", documents), run("b", documents, **other)]) == []


def configuration(*overrides: str) -> Config:
    config = compose(["task.num_digits=3", f"rollout.group_size={GROUP_SIZE}", *overrides]).config
    assert config is not None
    return config


@pytest.mark.parametrize("every_before", [0, 20])
def test_a_resume_with_another_evaluation_says_which_of_its_numbers_were_asked(every_before):
    """An evaluation of these numbers from the start would have kept training from them."""
    before = configuration(f"evaluation.every={every_before}", "evaluation.seed=7")
    now = configuration(
        "evaluation.every=20", "evaluation.seed=7", "evaluation.prompts_per_set=400"
    )
    documents = GROUP_SIZE * (FIRST + 1)
    avoided = [number(7, index) for index in range(128 if every_before else 0)]
    asked = [number(0, index) for index in range(FIRST + 1)]
    both = [
        held_out
        for held_out in (number(7, index) for index in range(400))
        if held_out in asked and held_out not in avoided
    ]
    saved = plain_config(before)
    (note,) = notes_on_asked_numbers(now.task, now.seed, held_out_sets(now), saved, documents)
    assert note.startswith(f"{len(both)} of the 400 prompts of evaluation set held_out are also ")
