"""Ranks share the documents of a step, sum their gradients, gather parts of tensors, and notice a
rank that is lost.

Steps are compared with those of one process, sums with sums in float64.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from builders.documents import document_of
from builders.processes import layout, world
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pgtoolkit.document import Document
from pgtoolkit.errors import RankLost
from pgtoolkit.ranks import (
    collectives,  # noqa: F401  (replaces an operation of PyTorch's)
    gradients,
)
from pgtoolkit.ranks.agreement import largest, losing_ranks
from pgtoolkit.ranks.gradients import sum_gradients
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.steps import divide_among_ranks, make_step


def document(number: int, length: int) -> Document:
    return document_of(
        torch.full((length,), number),
        old_log_probs=number,
        advantages=number,
        group=number // 2,
        name=f"document {number}",
    )


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20), ranks=st.integers(1, 5))
@settings(max_examples=60)
def test_ranks_have_equally_many_micro_batches_and_together_each_document_once(lengths, ranks):
    documents = [document(number, length) for number, length in enumerate(lengths)]
    in_one_process = make_step(documents, 12, {})
    steps = [make_step(documents, 12, {}, rank, ranks) for rank in range(ranks)]
    assert len({len(step.micro_batches) for step in steps}) == 1
    micro_batches = [micro_batch for step in steps for micro_batch in step.micro_batches]
    assert max(len(micro_batch.tokens) for micro_batch in micro_batches) <= 12
    names = [name for micro_batch in micro_batches for name in micro_batch.names]
    assert sorted(names) == sorted(f"document {number}" for number in range(len(lengths)))
    for step in steps:
        totals = in_one_process.totals
        assert vars(step.totals).keys() == vars(totals).keys()
        assert step.totals.num_documents == len(lengths)
        assert step.totals.num_tokens == totals.num_tokens
        assert torch.equal(step.totals.tokens_per_group, totals.tokens_per_group)
        for micro_batch in step.micro_batches:
            groups = [int(name.split()[1]) // 2 for name in micro_batch.names]
            assert micro_batch.group_index.tolist() == groups  # numbered over all ranks
    tokens = [sum(lengths[i] for i in share) for share in divide_among_ranks(documents, ranks)]
    assert max(tokens) - min(tokens) <= max(lengths)


TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def gathered(shape: tuple[int, ...]) -> tuple[list[torch.Tensor], set[str]]:
    """Return parts of each type that `full_tensor` would gather, and the collectives that ran."""
    parts = [torch.full(shape, dist.get_rank() + 1).to(dtype) for dtype in TYPES]
    gather = torch.ops._c10d_functional.all_gather_into_tensor
    name = dist.group.WORLD.group_name
    shown = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # the profiler writes there that it has begun
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        whole = [torch.ops._c10d_functional.wait_tensor(gather(part, 4, name)) for part in parts]
    os.dup2(shown, 2)
    os.close(shown)
    events = {event.name for event in profile.function_events or ()}
    return whole, {name for name in events if name.startswith("c10d::")}


@pytest.mark.parametrize("shape", [(2, 3), (1,), (0, 2)])
def test_parts_are_gathered_by_an_operation_with_a_short_name(shape):
    """gloo's threads may free a long one twice: see `collectives._gather_parts`. PyTorch would call
    c10d::allgather_into_tensor_coalesced_."""
    expected = torch.cat([torch.full(shape, rank + 1) for rank in range(4)])
    for whole, operations in world(4).run(gathered, shape):
        for tensor, dtype in zip(whole, TYPES, strict=True):
            assert tensor.dtype == dtype
            assert torch.equal(tensor, expected.to(dtype))
        assert operations == {"c10d::_allgather_base_"}


def summed_gradients() -> list[torch.Tensor]:
    """Return the sums on this rank; the last parameter has no gradient anywhere."""
    ranks = layout(data_parallel=4)
    generator = torch.Generator().manual_seed(ranks.rank)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 5), (7,), (1,), (4, 4))]
    for parameter in parameters[:-1]:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    gradients.BUCKET_BYTES = {"cpu": 64}  # the first gradient fills a bucket alone
    sum_gradients(parameters, ranks.loss_group)
    assert parameters[-1].grad is None
    return [parameter.grad for parameter in parameters[:-1]]


def test_summed_gradients_are_bit_equal_on_all_ranks():
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


def largest_on_rank() -> int:
    ranks = layout(data_parallel=2)
    return largest(ranks.rank * 15, ranks)


def test_all_ranks_get_the_largest_number_of_any():
    assert world(2).run(largest_on_rank) == [15, 15]


def error_of_waiting() -> str | None:
    """Return the error of rank 0, which waits for rank 1 in vain."""
    ranks = Layout.of_world("cpu", 1, data_parallel=2)
    if ranks.rank == 1:
        return None
    with pytest.raises(RankLost) as raised, losing_ranks(ranks, 1):
        dist.all_reduce(torch.zeros(1), group=ranks.loss_group)
    return str(raised.value)


def test_a_rank_that_does_not_answer_is_reported_as_lost():
    try:
        message, _ = world(2).run(error_of_waiting)
    finally:
        world(2).stop()
    assert message.startswith(
        "rank 0 waited for another process, which ended or did not answer within parallelism.time"
    )
    assert ".cc:" not in message
