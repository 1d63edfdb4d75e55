"""Loss, gradient and metrics do not depend on how documents, tokens and vocabulary are spread over
ranks and micro-batches: they are those of the reference.

Ranks are threads here; `test_parallel_loss_processes.py` has some of the tests with processes.
"""

import pytest
import torch
from builders.cuts import CUTS, Cut, assert_matches_reference
from builders.losses import (
    AGGREGATIONS,
    CORRECTIONS,
    FAMILIES,
    LEVELS,
    PENALTIES,
    Choice,
    HeadCase,
    covering,
    make_head_case,
)
from builders.quick import with_slow_between
from hypothesis import given, settings
from hypothesis import strategies as st

from pgtoolkit.kernels import losses

GIVEN_LOGITS = None
CHUNKS = (GIVEN_LOGITS, 3, 100)
"""Given logits, or the number of rows of a chunk of the fused head: fewer than most documents have,
and more."""
CASES = covering(
    [*CUTS],
    [*FAMILIES],
    [None, *CORRECTIONS],
    PENALTIES,
    AGGREGATIONS,
    LEVELS,
    CHUNKS,
    (0.0, 0.3),
    (False, True),
)


def limit_rows(patch: pytest.MonkeyPatch, rows: int | None) -> None:
    """Let the fused head compute `rows` rows of logits at a time, or fewer on small shards, so that
    ranks have to agree."""
    if rows is not GIVEN_LOGITS:
        patch.setattr(losses, "rows_within", lambda memory, columns, dtype: min(rows, columns))


@pytest.mark.parametrize(
    (
        "cut",
        "family",
        "correction",
        "kl",
        "aggregation",
        "level",
        "rows",
        "entropy",
        "trajectories",
    ),
    with_slow_between(CASES, 6),
    ids=[", ".join(map(str, row)) for row in CASES],
)
def test_a_step_spread_over_ranks_matches_the_reference(
    cut, family, correction, kl, aggregation, level, rows, entropy, trajectories, monkeypatch
):
    """Every pair of these choices. The tokens of a document or a trajectory count together,
    wherever they are."""
    limit_rows(monkeypatch, rows)
    choice = Choice(family, correction, kl, aggregation, level, entropy, trajectories)
    assert_matches_reference(CUTS[cut], make_head_case(), choice, rows is not GIVEN_LOGITS)


@pytest.mark.parametrize(("loss", "fused"), [("grpo", False), ("gspo", True)])
@pytest.mark.parametrize(
    "cut", ["data 4", "sequence 4", "vocabulary 4", "data x sequence x vocabulary"]
)
def test_a_step_spread_over_ranks_matches_the_reference_in_float32(cut, loss, fused):
    assert_matches_reference(
        CUTS[cut], make_head_case(dtype=torch.float32), Choice(loss), fused, tolerance=1e-5
    )


@st.composite
def spread_steps(draw: st.DrawFn) -> tuple[HeadCase, Cut]:
    """Draw a step, and a way to spread its documents, tokens and vocabulary."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    vocabulary = draw(st.integers(1, 9))
    problem = make_head_case(draw(st.integers(0, 999)), tuple(lengths), vocabulary)
    sizes = [
        (1, 1, 1),
        (2, 1, 1),
        (1, 2, 1),
        (1, 1, 2),
        (1, 4, 1),
        (1, 1, 4),
        (2, 2, 1),
        (1, 2, 2),
        (2, 1, 2),
        (2, 2, 2),
    ]
    num_data, num_sequence, num_shards = draw(st.sampled_from(sizes))
    num_micro_batches = draw(st.integers(1, 3))
    places = [(rank, number) for rank in range(num_data) for number in range(num_micro_batches)]
    documents = [[[] for _ in range(num_micro_batches)] for _ in range(num_data)]
    for document in draw(st.permutations(range(len(lengths)))):
        rank, number = draw(st.sampled_from(places))
        documents[rank][number].append(document)

    def bounds(num_parts: int, end: int, inner: st.SearchStrategy) -> tuple:
        cuts = draw(st.lists(inner, min_size=num_parts - 1, max_size=num_parts - 1))
        return (0, *sorted(cuts), end)

    return problem, Cut(
        tuple(tuple(tuple(micro_batch) for micro_batch in rank) for rank in documents),
        bounds(num_sequence, 1, st.floats(0, 1)),
        bounds(num_shards, vocabulary, st.integers(0, vocabulary)),
        draw(st.integers(0, 2)),
    )


@pytest.mark.slow
@settings(max_examples=40, derandomize=True)
@given(
    spread_steps(),
    st.sampled_from([*FAMILIES]),
    st.sampled_from(AGGREGATIONS),
    st.sampled_from([GIVEN_LOGITS, 1, 4]),
    st.sampled_from([None, *CORRECTIONS]),
    st.booleans(),
)
def test_any_step_spread_at_random_matches_the_reference(
    step, family, aggregation, rows, correction, trajectories
):
    problem, cut = step
    if int((problem.case.labels >= 0).sum()) == 0:
        return
    with pytest.MonkeyPatch.context() as patch:
        limit_rows(patch, rows)
        choice = Choice(family, correction, aggregation=aggregation, trajectories=trajectories)
        assert_matches_reference(cut, problem, choice, rows is not GIVEN_LOGITS)
