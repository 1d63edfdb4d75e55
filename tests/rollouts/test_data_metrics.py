"""What the documents of a step tell without the model: means over those that know a number, and
groups."""

import pytest
import torch
from builders.rollout_rows import recorded_config

from pgtoolkit.batch import Document
from pgtoolkit.rollouts.data_metrics import data_metrics, mismatch_note


def document(group=0, advantages=(1.0,), log_probs=None, **known):
    number = len(advantages)
    mask = torch.arange(number + 1) > 0
    log_probs = torch.tensor(log_probs or [-1.0] * number)[:number]
    return Document(
        torch.arange(number + 1), mask, log_probs, torch.tensor(advantages), group, "", **known
    )


def test_a_number_is_the_mean_over_the_documents_that_know_it():
    known = (
        {"reward": 1.0, "measures": {"a": 3.0}},
        {"measures": {"b": 0.25}, "truncated": True, "model_version": 5},
        {"reward": 0.0, "measures": {"a": 0.0}, "truncated": False, "model_version": 2**24 + 1},
    )
    metrics = data_metrics([document(number, **one) for number, one in enumerate(known)], 2**24 + 2)
    expected = {
        "a": 1.5,
        "b": 0.25,
        "reward": 0.5,
        "truncated_fraction": 0.5,
        "staleness": (2**24 - 2) / 2,
    }
    assert metrics == expected | {"completion_length": 1.0, "zero_advantage_group_fraction": 0.0}


def test_an_attempt_is_counted_once_however_many_documents_it_has():
    """Three parts of one attempt and one of another: a reward of 0.5 and not 0.75."""
    known = {"reward": 1.0, "exact_match": True, "measures": {"a": 4.0}, "trajectory": 3}
    other = {"reward": 0.0, "exact_match": False, "measures": {"a": 0.0}}
    parts = [document(0, (1.0,) * n, truncated=n == 3, **known) for n in (1, 2, 3)]
    for documents in ([*parts, document(**other)], [parts[0], document(**other), *parts[1:]]):
        metrics = data_metrics(documents, 0)
        assert (metrics["reward"], metrics["exact_match"], metrics["a"]) == (0.5, 0.5, 2.0)
        assert (metrics["completion_length"], metrics["truncated_fraction"]) == (7 / 4, 1 / 3)


def test_a_group_with_one_advantage_has_a_signal_wherever_that_stands():
    groups = [
        (0, (0.0, 0.5)),
        (0, (0.0,)),
        (1, (0.0,)),
        (1, (0.0,)),
        (2, (0.0,)),
        (2, (-1.0,)),
        (3, ()),
    ]
    metrics = data_metrics([document(group, advantages) for group, advantages in groups], 0)
    assert metrics["zero_advantage_group_fraction"] == 2 / 4


@pytest.mark.parametrize(
    ("new", "gap"), [(-0.75, None), (-0.701, None), (-0.65, "+0.1"), (-1.5, "-0.75")]
)
def test_the_first_log_probs_are_compared_as_the_metric_counts_them(new, gap):
    """Means over tokens of -1 and -2, over three documents and an empty one: -3 / 4."""
    documents = [
        document(log_probs=[-1.0]),
        document(advantages=(1.0, 1.0), log_probs=[-1.5, -2.5]),
    ]
    note = mismatch_note(
        [*documents, document(log_probs=[0.0]), document(advantages=())], new, recorded_config(".")
    )
    assert (f"differ from the old ones by {gap} a token" in note) if gap else note == ""
