"""The documents of a step dealt out to ranks, the sum of their gradients, and their agreement."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from builders.processes import layout, world
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pgtoolkit.batch import Document
from pgtoolkit.errors import DataError, RankLost, StorageError
from pgtoolkit.ranks import gradients
from pgtoolkit.ranks.agreement import failing_together, largest, losing_ranks
from pgtoolkit.ranks.gradients import sum_gradients
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.steps import divide_among_ranks, make_step


def document(number: int, length: int) -> Document:
    values = torch.full((length - 1,), float(number))
    mask = torch.arange(length) > 0
    return Document(
        torch.full((length,), number), mask, values, values, number // 2, f"document {number}"
    )


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20), ranks=st.integers(1, 5))
@settings(max_examples=60)
def test_every_rank_gets_as_many_micro_batches_and_together_they_hold_the_step_once(lengths, ranks):
    documents = [document(number, length) for number, length in enumerate(lengths)]
    alone = make_step(documents, 12, {})
    steps = [make_step(documents, 12, {}, rank, ranks) for rank in range(ranks)]
    assert len({len(step.micro_batches) for step in steps}) == 1
    micro_batches = [micro_batch for step in steps for micro_batch in step.micro_batches]
    assert max(len(micro_batch.tokens) for micro_batch in micro_batches) <= 12
    names = [name for micro_batch in micro_batches for name in micro_batch.names]
    assert sorted(names) == sorted(f"document {number}" for number in range(len(lengths)))
    for step in steps:
        assert vars(step.totals).keys() == vars(alone.totals).keys()
        assert step.totals.num_documents == len(lengths)
        assert step.totals.num_tokens == alone.totals.num_tokens
        assert torch.equal(step.totals.tokens_per_group, alone.totals.tokens_per_group)
        for micro_batch in step.micro_batches:
            groups = [int(name.split()[1]) // 2 for name in micro_batch.names]
            assert micro_batch.group_index.tolist() == groups  # numbered over all ranks
    tokens = [sum(lengths[i] for i in share) for share in divide_among_ranks(documents, ranks)]
    assert max(tokens) - min(tokens) <= max(lengths)


def summed_gradients() -> tuple[list[torch.Tensor], list[int]]:
    ranks = layout(data_parallel=4)
    generator = torch.Generator().manual_seed(ranks.rank)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 5), (7,), (1,), (4, 4))]
    for parameter in parameters[:-1]:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    gradients.BUCKET_BYTES = {"cpu": 64}  # the first gradient fills a bucket alone
    sum_gradients(parameters, ranks.loss_group)
    assert parameters[-1].grad is None
    return [parameter.grad for parameter in parameters[:-1]]


def test_gradients_are_summed_bitwise_alike_on_all_ranks():
    sums = world(4).run(summed_gradients)
    expected = [torch.zeros(3, 5, dtype=torch.float64), torch.zeros(7), torch.zeros(1)]
    for rank in range(4):
        generator = torch.Generator().manual_seed(rank)
        expected = [
            total + torch.randn(total.shape, generator=generator).double() for total in expected
        ]
    for rank in range(4):
        for gradient, first, total in zip(sums[rank], sums[0], expected, strict=True):
            assert torch.equal(gradient, first)
            torch.testing.assert_close(gradient.double(), total, rtol=1e-6, atol=1e-6)


def decide() -> list:
    ranks = layout(data_parallel=2)
    outcomes = [largest(ranks.rank * 15, ranks)]
    for failing in ({1: DataError("torn")}, {0: StorageError("full"), 1: StorageError("full")}, {}):
        try:
            with failing_together(ranks):
                if ranks.rank in failing:
                    raise failing[ranks.rank]
            outcomes.append("no error")
        except (DataError, StorageError) as error:
            outcomes.append((type(error).__name__, str(error), error.on_all_ranks))
    return outcomes


def test_an_error_of_one_rank_is_raised_by_all():
    expected = [15, ("DataError", "rank 1: torn", True), ("StorageError", "full", True), "no error"]
    assert world(2).run(decide) == [expected] * 2


def wait_for_nobody() -> str | None:
    ranks = Layout.of_world("cpu", 1, data_parallel=2)
    if ranks.rank == 1:
        return None
    with pytest.raises(RankLost) as caught, losing_ranks(ranks, 1):
        dist.all_reduce(torch.zeros(1), group=ranks.loss_group)
    return str(caught.value)


def test_a_silent_rank_is_named_as_a_lost_one():
    try:
        message, _ = world(2).run(wait_for_nobody)
    finally:
        world(2).stop()
    assert message.startswith(
        "rank 0 waited for another process, which ended or did not answer within parallelism.time"
    )
    assert ".cc:" not in message
