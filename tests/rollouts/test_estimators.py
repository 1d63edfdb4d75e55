"""Advantages of a batch: of a function of one's own, and of several verifiers."""

import itertools

import pytest
from builders.rollout_rows import good_row, write_jsonl
from builders.runs import SHORT, config_of, last_of_each_key, module_and_loader

from pgtoolkit.config.validate import validate
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.rollouts.advantages import gdpo, over_batch
from pgtoolkit.rollouts.estimator import Attempt, Estimator

FUNCTIONS = """
import random
import numpy as np

def by_length(rewards, *, lengths, measures):
    flat = [one for group in rewards for one in group]
    mean = sum(flat) / len(flat)
    return [(np.array(group) - mean) * sizes for group, sizes in zip(rewards, lengths)]

def format_first(rewards, *, measures, **others):
    return [[one["reward/format"] for one in group] for group in measures]

def rewards_alone(rewards):
    return rewards

def flat(rewards, **others):
    return [one for group in rewards for one in group]

def one_per_group(rewards, **others):
    return [[max(group)] for group in rewards]

def normalised(rewards, **others):
    with np.errstate(invalid="ignore"):
        return [[(one - np.mean(group)) / np.std(group) for one in group] for group in rewards]

def of_the_first(rewards, **others):
    return [[one - rewards[0][1] for one in group] for group in rewards]

def drawn(rewards, **others):
    return [[random.random() for one in group] for group in rewards]

def endless(rewards, **others):
    return [[10**400 for one in group] for group in rewards]

def failing(rewards, **others):
    raise KeyError("format")
"""


@pytest.fixture(autouse=True)
def functions(tmp_path, monkeypatch):
    name = f"advantages_of_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def custom(functions, name):
    return [f"advantage={functions}.{name}"]


def test_a_function_of_ones_own_gets_the_whole_batch(functions):
    chosen = "accumulation.docs_per_step=16", "rollout.old_log_probs=sampling"
    _, loader = module_and_loader(
        *last_of_each_key(*SHORT, *custom(functions, "by_length"), *chosen)
    )
    documents = next(iter(loader)).documents
    loader.source.close()
    mean = sum(document.reward for document in documents) / 16
    for document in documents:
        expected = [(document.reward - mean) * document.num_trained] * document.num_trained
        assert document.advantages.tolist() == pytest.approx(expected, abs=1e-6)
    assert len({document.num_trained for document in documents}) > 1
    assert len({document.reward for document in documents}) > 1


def test_it_gets_recorded_rollouts_with_each_attempt_once(functions, tmp_path):
    """Of two groups; the first attempt of each is two documents of 3 and 2 trained tokens."""
    rows = []
    for group in range(2):
        for attempt, reward, trained in ((0, 1.0, 3), (0, 1.0, 2), (1, group, 1)):
            mask = [i >= 5 - trained for i in range(5)]
            rows.append(good_row(loss_mask=mask, group_id=group, trajectory=attempt, reward=reward))
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    chosen = (
        "rollout=recorded",
        f"rollout.path={path}",
        "tracking=none",
        *custom(functions, "by_length"),
    )
    _, loader = module_and_loader(*chosen, "accumulation.docs_per_step=6", "trainer.device=cpu")
    documents = next(iter(loader)).documents
    found = [float(document.advantages[0]) for document in documents]
    # of a mean of 0.75; lengths 5, 1
    assert found == pytest.approx([1.25, 1.25, -0.75, 1.25, 1.25, 0.25])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rewards_alone", "that can be called as rewards_alone(rewards, *, lengths, measures)"),
        (
            "flat",
            (
                "needs a finite number within -1e+12 and 1e+12 for each completion of each group "
                "(got [0.0, 0.25,"
            ),
        ),
        ("one_per_group", "(got [1, 1, 1] numbers where there are [4, 4, 4] completions)"),
        ("normalised", "(got [nan])"),
        ("endless", "for each completion of each group (got [[1000"),
        ("of_the_first", "needs the same advantages in whichever order the groups come"),
        ("drawn", "needs the same advantages in whichever order the groups come"),
        (
            "failing",
            "raised KeyError on 3 groups, the first with the rewards [0.0, 0.25, 0.5, 0.0]:",
        ),
    ],
)
def test_a_function_that_makes_no_advantages_is_refused_at_the_start(functions, name, said):
    config = config_of(*SHORT, *custom(functions, name))
    with pytest.raises(ConfigError) as caught:
        Estimator.of(config)
    assert said in str(caught.value).replace("np.float64(nan)", "nan")
    assert f"advantage={functions}.{name}" in str(caught.value)


def test_one_that_fails_on_a_batch_names_it(functions):
    config = config_of(*SHORT, *custom(functions, "format_first"))
    estimator = Estimator.of(config)  # measures that nobody knows yet have some value then
    groups = [[Attempt(reward, 2, {"reward/format": reward / 2}) for reward in (0.0, 1.0)]] * 2
    assert estimator.advantages(groups, refuse=None) == [[0.0, 0.5]] * 2
    with pytest.raises(
        DataError, match=r"raised KeyError on 1 groups, the first with the rewards \[0.5\]"
    ):
        estimator.advantages([[Attempt(0.5, 2, {})]], refuse=None)
    told = []
    groups = [[Attempt(float("nan"), 1, {"reward/format": 1.0})]]
    estimator.advantages(groups, lambda place, problem: told.append((place, problem)))
    assert told == [(0, "the reward of completion 0 of 1 is nan; it must be finite")]


def test_gdpo_reads_the_score_of_each_verifier_and_its_weight(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
    digits = "{verifier: regular_expression, pattern: '(.)', weight: -1}"
    letters = "{verifier: regular_expression, pattern: '(.)'}"  # of the weight 1
    verifiers = (
        f"{{right: {{verifier: exact_match, weight: 2}}, digits: {digits}, letters: {letters}}}"
    )
    chosen = (
        "task=prompts",
        "task.path=prompts.jsonl",
        f"task.verifiers={verifiers}",
        "advantage=gdpo",
    )
    composed = config_of(*(one for one in SHORT if not one.startswith("task.")), *chosen)
    assert validate(composed)[1].problems == []
    estimator = Estimator.of(composed)
    scores = [[(1.0, 0.0), (0.0, 1.0), (0.0, 0.5)], [(1.0, 1.0), (1.0, 0.0), (1.0, 0.0)]]
    scores = [
        [(a, b, c) for (a, b), c in zip(group, (0.25, 0.0, 1.0), strict=True)] for group in scores
    ]
    names = "reward/right", "reward/digits", "reward/letters"
    groups = [
        [Attempt(9.0, 1, dict(zip(names, one, strict=True))) for one in group] for group in scores
    ]
    found = estimator.advantages(groups, refuse=None)
    parts = [
        gdpo([[*column] for column in zip(*group, strict=True)], (2.0, -1.0, 1.0))
        for group in scores
    ]
    assert found == over_batch("gdpo", parts, [])
    assert found[0][0] > 0 > found[0][1]
    assert len({*itertools.chain.from_iterable(found)}) == 6
