"""A step cut over micro-batches and ranks, compared with the reference, on which no cut has an
effect."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from builders.losses import (
    CORRECTIONS,
    TEMPERATURE,
    Case,
    Choice,
    HeadCase,
    Result,
    as_floats,
    assert_numbers_close,
    count_totals,
)
from builders.threads import on_ranks
from pgtoolkit import linear_policy_loss, policy_loss


@dataclass(frozen=True)
class Cut:
    """The part of a step that each rank holds.

    documents: for each data rank its micro-batches, as tuples of documents; all ranks have equally
        many micro-batches.
    sequence: where the token axis of each micro-batch is cut, as shares of its length.
    vocabulary: the first column of each shard, and the end.
    padding: the number of untrained tokens, which hold NaN, at the end of each micro-batch.
    """

    documents: tuple[tuple[tuple[int, ...], ...], ...]
    sequence: tuple[float, ...] = (0, 1)
    vocabulary: tuple[int, ...] | None = None
    padding: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "data": len(self.documents),
            "sequence": len(self.sequence) - 1,
            "vocabulary": 1 if self.vocabulary is None else len(self.vocabulary) - 1,
        }

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def has_unequal_shards(self) -> bool:
        return len({end - start for start, end in pairwise(self.vocabulary or (0, 1))}) > 1


ALL_DOCUMENTS = ((0, 1, 2, 3, 4, 5),)
CUTS = {
    "micro-batches 2": Cut((((0, 1, 2), (3, 4, 5)),)),
    "micro-batches 5": Cut((((0,), (1, 5), (2,), (4,), (3,)),), padding=2),
    "one per document": Cut((((0,), (1,), (2,), (3,), (4,), (5,)),)),
    "data 2": Cut((((3, 1), ()), ((0, 5), (4, 2))), padding=1),
    "data 4": Cut((((3,), ()), ((0,), (5,)), ((4,), (2,)), ((1,), ()))),
    "sequence 2": Cut((ALL_DOCUMENTS,), (0, 0.5, 1)),
    "sequence 4": Cut((((4, 3, 0), (2, 1, 5)),), (0, 0.4, 0.4, 0.9, 1), padding=3),
    "vocabulary 2": Cut((ALL_DOCUMENTS,), vocabulary=(0, 6, 12)),
    "vocabulary 4": Cut((((5, 4, 3), (2, 1, 0)),), vocabulary=(0, 1, 8, 8, 12), padding=2),
    "data x vocabulary": Cut((((3, 1), ()), ((0, 5), (4, 2))), vocabulary=(0, 5, 12)),
    "data x sequence": Cut((((3, 1), ()), ((0, 5), (4, 2))), (0, 0.3, 1)),
    "sequence x vocabulary": Cut((((2, 0), (5, 3, 1, 4)),), (0, 0.6, 1), (0, 11, 12)),
    "data x sequence x vocabulary": Cut(
        (((3, 1), ()), ((0, 5), (4, 2))), (0, 0.3, 1), (0, 5, 12), padding=1
    ),
}


def axis_groups(sizes: dict[str, int]) -> dict[str, dist.ProcessGroup | None]:
    """Return this rank's process group along each axis of a mesh over all ranks.

    The last axis varies fastest. An axis of one rank has None.
    """
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = {}
    for axis, name in enumerate(sizes):
        lines = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
        # Every rank creates all groups, in the same order.
        created = [dist.new_group(line) for line in lines]
        number = next(i for i, line in enumerate(lines) if dist.get_rank() in line)
        groups[name] = created[number] if ranks.shape[axis] > 1 else None
    return groups


def evaluate_on_rank(
    groups: dict[str, dist.ProcessGroup | None],
    cut: Cut,
    problem: HeadCase,
    choice: Choice,
    fused: bool,
    **options: object,
) -> Result:
    """Return the loss and metrics of the step, and this rank's share of the gradients.

    The gradients have the shape of the uncut step, with 0 where this rank holds nothing.
    groups: as from `axis_groups(cut.sizes)`. options: further keywords of the loss.
    """
    places = {axis: 0 if group is None else group.rank() for axis, group in groups.items()}
    case = problem.case
    totals = count_totals(case, choice.trajectories, CORRECTIONS.get(choice.correction))
    bounds = cut.vocabulary or (0, len(problem.bias))
    columns = slice(bounds[places["vocabulary"]], bounds[places["vocabulary"] + 1])
    inputs = (problem.hidden, problem.weight, problem.bias) if fused else (case.logits,)
    gradients = [torch.zeros_like(tensor) for tensor in inputs]
    loss_sum = torch.zeros(())
    sums = None
    for documents in cut.documents[places["data"]]:
        rows = _rows_of(case, documents, cut, places["sequence"])
        leaves = [_padded(inputs[0], rows, problem.dtype)]
        if fused:
            leaves += [tensor[columns] for tensor in inputs[1:]]
        else:
            leaves = [leaves[0][:, columns]]
        leaves = [leaf.to(problem.dtype).clone().requires_grad_() for leaf in leaves]

        out = (linear_policy_loss if fused else policy_loss)(
            *leaves[:2],
            **_arguments(case, choice, documents, rows, columns, fused, problem.dtype),
            **{"bias": leaves[2]} if fused else {},
            # Equal shards need no vocabulary_start.
            **{"vocabulary_start": columns.start} if cut.has_unequal_shards else {},
            **{f"{axis}_group": group for axis, group in groups.items()},
            **{"totals": totals} | options,
        )
        out.loss.backward()

        loss_sum = loss_sum + out.loss.detach()
        sums = out.metric_sums if sums is None else sums.merge(out.metric_sums)
        real = rows >= 0
        by_rows = leaves[0].grad[real].double()
        if fused:
            gradients[0][rows[real]] += by_rows
            for gradient, leaf in zip(gradients[1:], leaves[1:], strict=True):
                gradient[columns] += leaf.grad.double()
        else:
            gradients[0][rows[real], columns] += by_rows
    for axis in ("data", "sequence"):
        loss_sum, sums = sums.all_reduce(loss_sum, groups[axis])
    return Result(float(loss_sum), as_floats(sums.finalize(totals)), gradients)


def _rows_of(case: Case, documents: tuple[int, ...], cut: Cut, part: int) -> Tensor:
    """Return the rows of a micro-batch's tokens in one part of its sequence; -1 for padding."""
    rows = [(case.document_index == document).nonzero()[:, 0] for document in documents]
    rows = torch.cat([*rows, torch.full((cut.padding,), -1)])
    start = round(cut.sequence[part] * len(rows))
    end = round(cut.sequence[part + 1] * len(rows))
    return rows[start:end]


def _padded(values: Tensor, rows: Tensor, dtype: torch.dtype, filler: float = torch.nan) -> Tensor:
    """Return these rows of `values`, the filler for padding; `dtype`: of floating-point numbers."""
    is_padding = (rows < 0).view(-1, *[1] * (values.dim() - 1))
    chosen = torch.where(is_padding, filler, values[rows])
    return chosen.to(dtype) if chosen.is_floating_point() else chosen


def _arguments(
    case: Case,
    choice: Choice,
    documents: tuple[int, ...],
    rows: Tensor,
    columns: slice,
    fused: bool,
    dtype: torch.dtype,
) -> dict[str, object]:
    """Return the arguments of the loss, by keyword, for some rows of a micro-batch."""
    # The number of each document in this micro-batch; of padding it is their count.
    numbers = torch.full((case.num_documents + 1,), len(documents))
    numbers[list(documents)] = torch.arange(len(documents))
    arguments = {
        "labels": _padded(case.labels, rows, dtype, -1),
        "old_log_probs": _padded(case.old_log_probs, rows, dtype),
        "advantages": _padded(case.advantages, rows, dtype),
        "document_index": _padded(numbers[case.document_index], rows, dtype, len(documents)),
        "num_documents": len(documents),
        "temperature": TEMPERATURE,
    }
    arguments |= choice.keywords()
    for name, vector in choice.token_vectors(case, fused).items():
        filler = torch.nan if vector.is_floating_point() else -1
        arguments[name] = _padded(vector, rows, dtype, filler)
    for name, vector in choice.document_vectors(case).items():
        arguments[name] = vector[list(documents)]
    if fused:
        for name, tensor in choice.ref_head(case, columns).items():
            arguments[name] = tensor.to(dtype)
    elif "ref_logits" in arguments:
        arguments["ref_logits"] = arguments["ref_logits"][:, columns]
    return arguments


def assert_matches_reference(
    cut: Cut,
    problem: HeadCase,
    choice: Choice,
    fused: bool,
    tolerance: float = 1e-12,
    **options: object,
) -> None:
    """Compute a step on ranks that are threads, and compare it with the reference.

    options: further keywords of the loss.
    """

    def evaluate(rank: int) -> Result:
        groups = axis_groups(cut.sizes)
        return evaluate_on_rank(groups, cut, problem, choice, fused, **options)

    results = on_ranks(cut.world_size, evaluate)
    assert_ranks_match(results, cut, problem.by_reference(choice, fused), fused, tolerance)


def assert_ranks_match(
    results: list[Result], cut: Cut, expected: Result, fused: bool, tolerance: float
) -> None:
    """Check that every rank reports the step's loss and metrics, and that the gradients of the
    ranks add up to the step's."""
    for result in results:
        assert_numbers_close(result.loss, expected.loss, tolerance)
        assert result.metrics.keys() == expected.metrics.keys()
        for name, value in expected.metrics.items():
            assert_numbers_close(result.metrics[name], value, tolerance, name)
    for number, gradient in enumerate(expected.gradients):
        shares = torch.stack([result.gradients[number] for result in results])
        if fused and number == 0:
            # Each vocabulary shard has the complete gradient of the hidden states.
            for total in shares.view(-1, cut.sizes["vocabulary"], *gradient.shape).sum(0):
                assert_numbers_close(total, gradient, tolerance)
        else:
            assert_numbers_close(shares.sum(0), gradient, tolerance)
