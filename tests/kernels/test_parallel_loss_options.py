"""What ranks exchange, what they refuse, and the keywords that have to work with groups besides."""

from dataclasses import replace
from itertools import pairwise

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
    assert_numbers_close,
    make_head_case,
)
from builders.threads import on_ranks

from pgtoolkit import linear_policy_loss, policy_loss
from pgtoolkit.errors import DataError
from pgtoolkit.kernels import losses
from pgtoolkit.kernels.chunks import common_bins

HEAD_CASE = make_head_case()
TWO_BY_TWO = CUTS["sequence x vocabulary"]


def check(cut, head_case, fused, loss, tolerance=1e-12, **options):
    cuts.assert_matches_reference(cut, head_case, Choice(loss), fused, tolerance, **options)


@pytest.mark.parametrize(
    "cut", ["vocabulary 2", "vocabulary 4", "sequence 4", "sequence x vocabulary"]
)
def test_the_head_with_all_logits_and_with_some(cut):
    # Hidden states of NaN reach the weight's gradient where all rows are multiplied, on one rank as
    # well.
    cut = replace(CUTS[cut], padding=0)
    for loss in TYPICAL_LOSSES:
        check(cut, HEAD_CASE, True, loss, impl="torch")
    for num_splits in (2, 5):
        check(cut, HEAD_CASE, True, "grpo", num_splits=num_splits)


def test_bfloat16_with_an_fp32_head():
    """Rounded operands, exact logits: what is left is the rounding of the gradients and their sum
    over shards."""
    for loss in TYPICAL_LOSSES:
        check(
            TWO_BY_TWO,
            make_head_case(dtype=torch.bfloat16),
            True,
            loss,
            tolerance=1e-2,
            fp32_logits=True,
        )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_without_totals_the_ranks_together_are_the_step(loss, aggregation):
    """Groups and trajectories spread over data ranks, one of them without a document, tokens cut in
    two."""
    cut = Cut((((0, 3, 5),), ((),), ((1,),), ((4, 2),)), (0, 0.33, 1))
    choice = Choice(loss, aggregation=aggregation, metrics="basic", trajectories=loss == "gspo")
    cuts.assert_matches_reference(cut, HEAD_CASE, choice, loss == "gspo", totals=None)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
def test_a_reducer_whose_weights_differ_within_a_document(loss, fused, monkeypatch):
    """Against one process."""
    monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: 4)
    case = HEAD_CASE.case
    weights = torch.rand(
        len(case.labels), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )

    def run(rank, rows, groups):
        options = {
            "reducer": lambda totals, tokens_per_document, **_: weights[rows] / totals.num_tokens,
            "loss": FAMILIES[loss],
            "temperature": TEMPERATURE,
            "num_documents": 6,
            "sequence_group": groups,
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

    def on_rank(rank):
        return run(rank, slice(0, 17) if rank == 0 else slice(17, None), dist.group.WORLD)

    (first, above), (second, below) = on_ranks(2, on_rank)
    value, gradient = run(0, slice(None), None)
    assert_numbers_close(first + second, value, 1e-12)
    assert_numbers_close(torch.cat([above, below]), gradient, 1e-12)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
def test_an_empty_vocabulary_shard_has_no_maximum(loss, fused):
    """With all logits near -2000, a shard that counted as one of zeros would leave nothing of the
    others' sums."""
    assert 0 in [high - low for low, high in pairwise(CUTS["vocabulary 4"].vocabulary)]
    low = replace(HEAD_CASE, bias=HEAD_CASE.bias - 2000)
    check(CUTS["vocabulary 4"], low, fused, loss, tolerance=1e-9, check_finite=False)


@pytest.mark.parametrize("cut", ["vocabulary 2", "sequence 2", "sequence x vocabulary"])
@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
def test_ranks_with_room_for_different_numbers_of_rows_make_the_same_chunks(cut, loss, monkeypatch):
    """As on GPUs of different memory, which without logits_memory_mb decides."""
    monkeypatch.setattr(
        losses, "rows_within", lambda memory, columns, dtype: 3 + 4 * dist.get_rank()
    )
    check(CUTS[cut], HEAD_CASE, True, loss)


def collectives(monkeypatch, cut, fused, loss, rows=100, **options):
    """The collectives that rank 0 makes in a step of one micro-batch, without those that merge the
    metrics."""
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
        check(cut, HEAD_CASE, fused, loss, **options)
    merging = 2 * sum(size > 1 for axis, size in cut.sizes.items() if axis != "vocabulary")
    return len(calls) - merging


def test_a_call_makes_as_many_collectives_as_the_documentation_says(monkeypatch):
    sequence = Cut((ALL_DOCUMENTS,), (0, 0.5, 1))
    vocabulary = Cut((ALL_DOCUMENTS,), vocabulary=(0, 5, 12))
    data = Cut((((0, 1, 2),), ((3, 4, 5),)))
    for loss in TYPICAL_LOSSES:
        assert collectives(monkeypatch, data, False, loss) == 0
        assert collectives(monkeypatch, data, True, loss) == 0
        assert collectives(monkeypatch, vocabulary, False, loss) == 1
        # Chunk sizes agreed upon, informative rows and others, the gradient of the hidden states.
        assert collectives(monkeypatch, vocabulary, True, loss) == 4
    assert collectives(monkeypatch, sequence, False, "grpo") == 1
    assert collectives(monkeypatch, sequence, True, "grpo") == 1
    assert collectives(monkeypatch, sequence, True, "grpo", rows=4) == 1
    assert collectives(monkeypatch, sequence, False, "gspo") == 2
    # Counts with advantages, lengths for the chunks, one chunk, the step.
    assert collectives(monkeypatch, sequence, True, "gspo") == 4


def test_bins_that_no_rank_overfills():
    generator = torch.Generator().manual_seed(0)
    for count, ranks, capacity in ((0, 2, 10), (1, 4, 10), (60, 2, 300), (40, 8, 120)):
        lengths = [
            tuple(x) for x in torch.randint(0, 130, (count, ranks), generator=generator).tolist()
        ]
        bins = common_bins(lengths, capacity)
        assert sorted(item for items in bins for item in items) == list(range(count))
        for items in bins:
            assert (
                len(items) == 1
                or max(sum(lengths[item][rank] for item in items) for rank in range(ranks))
                <= capacity
            )
        assert len(bins) <= 2 + 1.5 * sum(map(max, lengths)) / capacity


def test_bad_data_on_one_rank_ends_all_before_anything_is_multiplied():
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
def test_a_label_that_no_shard_holds_or_two_do(starts, loss):
    """Shards of six columns each that leave a gap, and that overlap."""
    head_case = make_head_case(seed=12)
    case = head_case.case

    def run(rank):
        columns = slice(starts[rank], starts[rank] + 6)
        with pytest.raises(DataError, match="label outside the vocabulary"):
            policy_loss(
                case.logits[:, columns],
                *case.tensors[1:],
                loss=loss,
                vocabulary_group=dist.group.WORLD,
                vocabulary_start=starts[rank],
            )

    assert {5, 6} <= set(case.labels.tolist())  # in the overlap, in the gap
    on_ranks(2, run)
