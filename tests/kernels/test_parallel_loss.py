"""The promise over ranks: loss, gradient and metrics do not depend on how documents, tokens and vocabulary are spread.

Ranks are threads here; `test_parallel_loss_processes.py` runs some of it in processes.
"""

import pytest
import torch
from builders.cuts import CUTS, Cut, assert_same, axis_groups, evaluate, expected
from builders.losses import AGGREGATIONS, CORRECTIONS, EVERY_LOSS, OBJECTIVES, make_head_case
from builders.threads import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from pgtoolkit.kernels import losses

HEAD_CASE = make_head_case()
ROUNDED = make_head_case(dtype=torch.float32)


def check(cut, head_case, fused, loss, aggregation, metrics, tolerance=1e-12, correction=None):
    def run(rank):
        groups = axis_groups(cut.sizes)
        return evaluate(groups, cut, head_case, fused, loss, aggregation, metrics, correction=correction)

    wanted = expected(head_case, fused, loss, aggregation, metrics, correction)
    assert_same(on_ranks(cut.world_size, run), cut, wanted, fused, tolerance)


@pytest.mark.parametrize(("loss", "aggregation", "level"), OBJECTIVES)
@pytest.mark.parametrize("cut", CUTS)
def test_given_logits(cut, loss, aggregation, level):
    check(CUTS[cut], HEAD_CASE, False, loss, aggregation, level)


@pytest.mark.parametrize(
    ("loss", "aggregation", "rows"),
    [
        *(("grpo", "constant", 3), ("gspo", "sample_mean", 3), ("gspo", "token_mean", 3), ("cispo", "sample_mean", 3)),
        *(("grpo", "sample_mean", 100), ("gspo", "sample_mean", 100), ("gspo", "prompt_mean", 100)),
    ],
)
@pytest.mark.parametrize("cut", CUTS)
def test_fused_head(cut, loss, aggregation, rows, monkeypatch):
    """With chunks shorter than most documents, and longer. Ranks agree on them, though their shards differ in size."""
    monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: min(rows, columns))
    check(CUTS[cut], HEAD_CASE, True, loss, aggregation, "with_entropy")


@pytest.mark.parametrize(
    ("correction", "loss", "aggregation", "fused"),
    [
        *(("token truncated", "grpo", "constant", False), ("token masked", "gspo", "sample_mean", True)),
        *(("product truncated", "gmpo", "token_mean", False), ("mean truncated", "cispo", "prompt_mean", True)),
        *(("product masked, V", "grpo", "sample_mean", True), ("mean masked, v", "gspo", "token_mean", False)),
        *(("off policy", "gspo", "sample_mean", False), ("off policy", "grpo", "token_mean", True)),
        ("off policy", "kimi", "sample_mean", False),
    ],
)
@pytest.mark.parametrize("cut", CUTS)
def test_corrections(cut, correction, loss, aggregation, fused, monkeypatch):
    """A product or a mean over a document is over all of its tokens, wherever they lie."""
    monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: min(3, columns))
    check(CUTS[cut], HEAD_CASE, fused, loss, aggregation, "with_entropy", correction=correction)


@pytest.mark.parametrize(("loss", "fused"), [("grpo", False), ("gspo", True), ("cispo", True)])
@pytest.mark.parametrize("cut", CUTS)
def test_in_float32(cut, loss, fused):
    check(CUTS[cut], ROUNDED, fused, loss, "sample_mean", "with_entropy", tolerance=1e-5)


@st.composite
def spread_steps(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    vocabulary = draw(st.integers(1, 9))
    head_case = make_head_case(draw(st.integers(0, 999)), tuple(lengths), vocabulary)
    sizes = st.sampled_from([(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 4, 1), (1, 1, 4), (2, 2, 1), (1, 2, 2), (2, 1, 2)])
    num_data, num_sequence, num_shards = draw(st.one_of(sizes, st.just((2, 2, 2))))
    num_micro_batches = draw(st.integers(1, 3))
    places = [(rank, number) for rank in range(num_data) for number in range(num_micro_batches)]
    documents = [[[] for _ in range(num_micro_batches)] for _ in range(num_data)]
    for document in draw(st.permutations(range(len(lengths)))):
        rank, number = draw(st.sampled_from(places))
        documents[rank][number].append(document)

    def bounds(number, end, inner):
        return (0, *sorted(draw(st.lists(inner, min_size=number - 1, max_size=number - 1))), end)

    return head_case, Cut(
        tuple(tuple(tuple(micro_batch) for micro_batch in rank) for rank in documents),
        bounds(num_sequence, 1, st.floats(0, 1)),
        bounds(num_shards, vocabulary, st.integers(0, vocabulary)),
        draw(st.integers(0, 2)),
    )


@settings(max_examples=60, derandomize=True)
@given(
    spread_steps(),
    st.sampled_from(EVERY_LOSS),
    st.sampled_from(AGGREGATIONS),
    st.sampled_from([None, 1, 4]),
    st.booleans(),
    st.sampled_from([None, *CORRECTIONS]),
)
def test_any_step_spread_anyhow(step, loss, aggregation, rows, fused, correction):
    head_case, cut = step
    if int((head_case.case.labels >= 0).sum()) == 0:
        return
    with pytest.MonkeyPatch.context() as patch:
        if rows is not None:
            patch.setattr(losses, "rows_within", lambda memory, columns, dtype: min(rows, columns))
        check(cut, head_case, fused, loss, aggregation, "with_entropy", correction=correction)
