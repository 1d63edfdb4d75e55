"""Ranks that share a step exchange no more than is documented, end together on bad data, and give
the result of one process with each of the further keywords."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders import cuts
from builders.cuts import ALL_DOCUMENTS, CUTS, Cut
from builders.losses import (
    AGGREGATIONS,
    FAMILIES,
    TEMPERATURE,
    TYPICAL_LOSSES,
    Choice,
    HeadCase,
    assert_numbers_close,
    make_head_case,
)
from builders.threads import on_ranks
from torch import Tensor

from pgtoolkit import linear_policy_loss, policy_loss
from pgtoolkit.errors import DataError
from pgtoolkit.kernels import losses
from pgtoolkit.kernels.chunks import common_bins

HEAD_CASE = make_head_case()
TWO_BY_TWO = CUTS["sequence x vocabulary"]


def assert_as_specified(
    cut: Cut, head_case: HeadCase, fused: bool, loss: str, tolerance: float = 1e-12, **options: Any
) -> None:
    """Assert that a step cut so has the results of the reference."""
    cuts.assert_matches_reference(cut, head_case, Choice(loss), fused, tolerance, **options)


@pytest.mark.parametrize(
    "cut", ["vocabulary 2", "vocabulary 4", "sequence 4", "sequence x vocabulary"]
)
def test_the_head_by_all_logits_or_by_splits_matches_the_reference(cut):
    # The padding's hidden states are NaN, and where all rows are multiplied they reach the weight's
    # gradient, on one rank as well.
    cut = replace(CUTS[cut], padding=0)
    for loss in TYPICAL_LOSSES:
        assert_as_specified(cut, HEAD_CASE, True, loss, impl="torch")
    for num_splits in (2, 5):
        assert_as_specified(cut, HEAD_CASE, True, "grpo", num_splits=num_splits)


def test_in_bfloat16_with_an_fp32_head_only_gradients_are_rounded():
    """Logits are exact products of rounded numbers, so that 1e-2 leaves room for the rounding of
    gradients and of their sum over shards."""
    for loss in TYPICAL_LOSSES:
        assert_as_specified(
            TWO_BY_TWO,
            make_head_case(dtype=torch.bfloat16),
            True,
            loss,
            tolerance=1e-2,
            fp32_logits=True,
        )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_without_totals_the_documents_of_all_ranks_are_the_step(loss, aggregation):
    """Groups and trajectories are spread over data ranks, one of which has no document, and tokens
    over two sequence ranks."""
    cut = Cut((((0, 3, 5),), ((),), ((1,),), ((4, 2),)), (0, 0.33, 1))
    choice = Choice(loss, aggregation=aggregation, metrics="basic", trajectories=loss == "gspo")
    cuts.assert_matches_reference(cut, HEAD_CASE, choice, loss == "gspo", totals=None)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
def test_a_reducer_may_weight_the_tokens_of_a_document_differently(loss, fused, monkeypatch):
    """Two ranks give the loss and gradient of one process."""
    monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: 4)
    case = HEAD_CASE.case
    weights = torch.rand(
        len(case.labels), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )

    def loss_and_gradient(
        rows: slice, sequence_group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        options = {
            "reducer": lambda totals, tokens_per_document, **_: weights[rows] / totals.num_tokens,
            "loss": FAMILIES[loss],
            "temperature": TEMPERATURE,
            "num_documents": 6,
            "sequence_group": sequence_group,
        }
        tensors = [x[rows] for x in case.tensors[1:]]
        hidden = HEAD_CASE.hidden[rows].clone().requires_grad_()
        if fused:
            out = linear_policy_loss(
                hidden, HEAD_CASE.weight, *tensors, bias=HEAD_CASE.bias, **options
            )
        else:
            out = policy_loss(hidden @ HEAD_CASE.weight.T + HEAD_CASE.bias, *tensors, **options)
        out.loss.backward()
        return out.loss.detach(), hidden.grad

    def on_rank(rank: int) -> tuple[Tensor, Tensor]:
        rows = slice(0, 17) if rank == 0 else slice(17, None)
        return loss_and_gradient(rows, dist.group.WORLD)

    (loss_0, gradient_0), (loss_1, gradient_1) = on_ranks(2, on_rank)
    expected_loss, expected_gradient = loss_and_gradient(slice(None), None)
    assert_numbers_close(loss_0 + loss_1, expected_loss, 1e-12)
    assert_numbers_close(torch.cat([gradient_0, gradient_1]), expected_gradient, 1e-12)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
def test_an_empty_vocabulary_shard_has_no_maximum(loss, fused):
    """All logits are near -2000. If the empty shard's maximum were 0, the sums of the others would
    vanish beside it."""
    assert 0 in [high - low for low, high in pairwise(CUTS["vocabulary 4"].vocabulary)]
    low = replace(HEAD_CASE, bias=HEAD_CASE.bias - 2000)
    assert_as_specified(CUTS["vocabulary 4"], low, fused, loss, tolerance=1e-9, check_finite=False)


@pytest.mark.parametrize("cut", ["vocabulary 2", "sequence 2", "sequence x vocabulary"])
@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
def test_ranks_with_room_for_different_numbers_of_rows_make_the_same_chunks(cut, loss, monkeypatch):
    """So it is on GPUs of different memory, which decides where logits_memory_mb is not set."""
    monkeypatch.setattr(
        losses, "rows_within", lambda memory, columns, dtype: 3 + 4 * dist.get_rank()
    )
    assert_as_specified(CUTS[cut], HEAD_CASE, True, loss)


def num_collectives(
    monkeypatch: pytest.MonkeyPatch, cut: Cut, fused: bool, loss: str, rows: int = 100
) -> int:
    """Return how many collectives rank 0 makes in a step of one micro-batch, without those that
    merge the metrics."""
    monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: rows)
    calls = []
    with monkeypatch.context() as patch:
        for name in ("all_reduce", "all_gather"):
            actual = getattr(dist, name)

            def counted(*arguments, actual=actual, name=name, **keywords):
                if dist.get_rank() == 0:
                    calls.append(name)
                return actual(*arguments, **keywords)

            patch.setattr(dist, name, counted)
        assert_as_specified(cut, HEAD_CASE, fused, loss)
    merging = 2 * sum(size > 1 for axis, size in cut.sizes.items() if axis != "vocabulary")
    return len(calls) - merging


def test_a_call_makes_as_many_collectives_as_the_documentation_says(monkeypatch):
    sequence = Cut((ALL_DOCUMENTS,), (0, 0.5, 1))
    vocabulary = Cut((ALL_DOCUMENTS,), vocabulary=(0, 5, 12))
    data = Cut((((0, 1, 2),), ((3, 4, 5),)))
    for loss in TYPICAL_LOSSES:
        assert num_collectives(monkeypatch, data, False, loss) == 0
        assert num_collectives(monkeypatch, data, True, loss) == 0
        assert num_collectives(monkeypatch, vocabulary, False, loss) == 1
        # One for the size of chunks, one each for rows with a gradient and without, one for the
        # gradient of the hidden states.
        assert num_collectives(monkeypatch, vocabulary, True, loss) == 4
    assert num_collectives(monkeypatch, sequence, False, "grpo") == 1
    assert num_collectives(monkeypatch, sequence, True, "grpo") == 1
    assert num_collectives(monkeypatch, sequence, True, "grpo", rows=4) == 1
    assert num_collectives(monkeypatch, sequence, False, "gspo") == 2
    # One each for counts with advantages, for lengths, for the chunk, and for the step.
    assert num_collectives(monkeypatch, sequence, True, "gspo") == 4


def test_common_bins_hold_every_document_once_and_exceed_no_ranks_capacity():
    """But for bins of a single document."""
    generator = torch.Generator().manual_seed(0)
    for count, ranks, capacity in ((0, 2, 10), (1, 4, 10), (60, 2, 300), (40, 8, 120)):
        lengths = [
            tuple(x) for x in torch.randint(0, 130, (count, ranks), generator=generator).tolist()
        ]
        bins = common_bins(lengths, capacity)
        assert sorted(item for items in bins for item in items) == list(range(count))
        for items in bins:
            loads = [sum(lengths[item][rank] for item in items) for rank in range(ranks)]
            assert len(items) == 1 or max(loads) <= capacity
        assert len(bins) <= 2 + 1.5 * sum(map(max, lengths)) / capacity


def test_bad_data_on_one_rank_raises_an_error_on_all_of_them():
    case = HEAD_CASE.case
    old = case.old_log_probs.clone()
    old[20] = torch.nan

    def run(rank):
        rows = slice(0, 16) if rank == 0 else slice(16, None)
        tensors = case.labels[rows], old[rows], case.advantages[rows], case.document_index[rows]
        with pytest.raises(DataError, match="document 3" if rank else "another rank"):
            linear_policy_loss(
                HEAD_CASE.hidden[rows].clone().requires_grad_(),
                HEAD_CASE.weight,
                *tensors,
                num_documents=6,
                sequence_group=dist.group.WORLD,
            )

    on_ranks(2, run)


@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
@pytest.mark.parametrize("starts", [(0, 7), (0, 5)])
def test_a_label_that_no_shard_holds_or_that_two_hold_is_an_error(starts, loss):
    """Shards have six columns each: they leave a gap, or they overlap."""
    head_case = make_head_case(seed=12)
    case = head_case.case

    def run(rank):
        columns = slice(starts[rank], starts[rank] + 6)
        with pytest.raises(DataError, match=r"^logits needs .*, and no label outside the vocab"):
            policy_loss(
                case.logits[:, columns],
                *case.tensors[1:],
                loss=loss,
                vocabulary_group=dist.group.WORLD,
                vocabulary_start=starts[rank],
            )

    assert {5, 6} <= set(case.labels.tolist())  # 5 is in the overlap, 6 in the gap
    on_ranks(2, run)
