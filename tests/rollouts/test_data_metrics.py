"""Metrics of a step that its documents give without the model: means over the documents that have a
number, and shares of groups. All expected values are worked out by hand."""

import pytest
import torch
from builders.documents import document_of
from builders.rollout_rows import recorded_config

from pgtoolkit.document import Document
from pgtoolkit.rollouts.data_metrics import data_metrics, mismatch_note


def document(
    group: int = 0,
    advantages: tuple[float, ...] = (1.0,),
    log_probs: list[float] | None = None,
    **fields,
) -> Document:
    """Return a document with one prompt token and a trained token for each advantage."""
    old_log_probs = -1.0 if log_probs is None else torch.tensor(log_probs)
    return document_of(
        len(advantages) + 1,
        old_log_probs=old_log_probs,
        advantages=torch.tensor(advantages),
        group=group,
        **fields,
    )


def test_a_metric_is_the_mean_over_the_documents_that_have_its_number():
    documents = [
        document(0, reward=1.0, measures={"a": 3.0}),
        document(1, measures={"b": 0.25}, truncated=True, model_version=5),
        document(
            2, reward=0.0, measures={"a": 0.0}, truncated=False, model_version=2**24 + 1
        ),  # the version is not exact in float32
    ]
    assert data_metrics(documents, 2**24 + 2) == {
        "a": 1.5,
        "b": 0.25,
        "reward": 0.5,
        "truncated_fraction": 0.5,
        "staleness": (2**24 - 2) / 2,
        "completion_length": 1.0,
        "zero_advantage_group_fraction": 0.0,
    }


def test_a_trajectory_counts_once_however_many_documents_it_has():
    """Three documents of one trajectory and one of another: a reward of 0.5, not 0.75."""
    trajectory = {"reward": 1.0, "exact_match": True, "measures": {"a": 4.0}, "trajectory": 3}
    parts = [document(0, (1.0,) * n, truncated=n == 3, **trajectory) for n in (1, 2, 3)]
    other = document(reward=0.0, exact_match=False, measures={"a": 0.0})
    for documents in ([*parts, other], [parts[0], other, *parts[1:]]):
        metrics = data_metrics(documents, 0)
        assert metrics["reward"] == 0.5
        assert metrics["exact_match"] == 0.5
        assert metrics["a"] == 2.0
        assert metrics["completion_length"] == 7 / 4
        assert metrics["truncated_fraction"] == 1 / 3


def test_a_group_has_a_signal_if_any_of_its_tokens_has_an_advantage():
    documents = [
        document(0, (0.0, 0.5)),
        document(0, (0.0,)),
        document(1, (0.0,)),
        document(1, (0.0,)),
        document(2, (0.0,)),
        document(2, (-1.0,)),
        document(3, ()),
    ]
    assert data_metrics(documents, 0)["zero_advantage_group_fraction"] == 2 / 4


def test_a_document_of_weight_0_gives_its_group_no_signal():
    """One is cut off, one without a score, and of one the kept set is not known."""
    unknown = torch.full((1, 2), -1, dtype=torch.int32)
    documents = [
        document(0, truncated=True),
        document(0, (0.0,), truncated=False),
        document(1, score_failed=True),
        document(2, sampling_kept_ids=unknown),
        document(3, truncated=False),
    ]
    assert data_metrics(documents, 0)["zero_advantage_group_fraction"] == 2 / 4
    masked = data_metrics(documents, 0, masks_truncated=True)
    assert masked["zero_advantage_group_fraction"] == 3 / 4
    assert masked["completion_length"] == 1


@pytest.mark.parametrize(("num_empty", "has_note"), [(2, True), (1, False)])
def test_the_note_on_a_mismatch_leaves_out_documents_of_weight_0(num_empty, has_note):
    """Mean log-probs of -1 and of a document of weight 0, whose -9 are no part of the metric. Where
    the metric counts more documents than these, a reducer weighs them."""
    documents = [
        document(log_probs=[-1.0]),
        document(log_probs=[-9.0], score_failed=True),
        document(advantages=(), log_probs=[]),
    ]
    for new_logprobs, differs in ((-1 / 3, False), (-0.8 / 3, True)):
        metrics = {
            "new_logprobs": new_logprobs,
            "num_documents": 3,
            "num_empty_documents": num_empty,
        }
        note = mismatch_note(documents, metrics, recorded_config("."))
        assert ("by +0.2 a token" in note) == (differs and has_note)


@pytest.mark.parametrize(
    ("new_log_prob", "gap"), [(-0.75, None), (-0.714, None), (-0.66, "+0.12"), (-1.5, "-1")]
)
def test_the_note_on_a_mismatch_compares_means_over_documents(new_log_prob, gap):
    """Mean log-probs of -1, -2, 0 and of an empty document, which the metric counts as 0: -3 / 4,
    while a gap is that of the other three."""
    documents = [
        document(log_probs=[-1.0]),
        document(advantages=(1.0, 1.0), log_probs=[-1.5, -2.5]),
        document(log_probs=[0.0]),
        document(advantages=(), log_probs=[]),
    ]
    metrics = {"new_logprobs": new_log_prob, "num_documents": 4, "num_empty_documents": 1}
    note = mismatch_note(documents, metrics, recorded_config("."))
    if gap is None:
        assert note == ""
    else:
        assert f"differ from the old ones by {gap} a token" in note
