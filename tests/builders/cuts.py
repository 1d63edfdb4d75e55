"""One step of documents cut over micro-batches and ranks, for the tests of what must not depend on
it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from builders.losses import (
    TEMPERATURE,
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
    """Which rank holds what.

    documents: for each data rank its micro-batches, as lists of documents; all ranks have as many.
    sequence: where the token axis of each micro-batch is cut, as shares of its length. vocabulary:
        first column of
    each shard, and the end. padding: untrained positions holding NaN at the end of each
        micro-batch.
    """

    documents: tuple[tuple[tuple[int, ...], ...], ...]
    sequence: tuple[float, ...] = (0, 1)
    vocabulary: tuple[int, ...] | None = None
    padding: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        shards = 1 if self.vocabulary is None else len(self.vocabulary) - 1
        return {
            "data": len(self.documents),
            "sequence": len(self.sequence) - 1,
            "vocabulary": shards,
        }

    @property
    def world_size(self) -> int:
        return len(self.documents) * (len(self.sequence) - 1) * self.sizes["vocabulary"]


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
    """For each axis of a mesh over all ranks, the last axis fastest, this rank's group; None where
    it has one rank."""
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = {}
    for axis, name in enumerate(sizes):
        lines = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
        made = [dist.new_group(line) for line in lines]
        mine = next(number for number, line in enumerate(lines) if dist.get_rank() in line)
        groups[name] = made[mine] if ranks.shape[axis] > 1 else None
    return groups


def evaluate_on_rank(
    groups: dict, cut: Cut, problem: HeadCase, choice: Choice, fused: bool, **options
) -> Result:
    """On one rank: the step's loss and metrics, and the gradients of what this rank holds, 0
    elsewhere.

    groups: as `axis_groups(cut.sizes)` gives them. Gradients are of the whole step's shape.
        options: further keywords
    of the loss.
    """
    data, sequence, vocabulary = (0 if group is None else group.rank() for group in groups.values())
    case, totals = problem.case, count_totals(problem.case, choice.trajectories)
    columns = slice(*(cut.vocabulary or (0, len(problem.bias)))[vocabulary : vocabulary + 2])
    full = (problem.hidden, problem.weight, problem.bias) if fused else (problem.case.logits,)
    gradients = [torch.zeros_like(x) for x in full]
    loss_sum, sums = torch.zeros(()), None
    for documents in cut.documents[data]:
        rows = [(case.document_index == d).nonzero()[:, 0] for d in documents]
        rows = torch.cat([*rows, torch.full((cut.padding,), -1)])
        low, high = (round(share * len(rows)) for share in cut.sequence[sequence : sequence + 2])
        rows = rows[low:high]

        def padded(values, filler=torch.nan, rows=rows):
            chosen = torch.where(
                (rows < 0).view(-1, *[1] * (values.dim() - 1)), filler, values[rows]
            )
            return chosen.to(problem.dtype) if chosen.is_floating_point() else chosen

        local = torch.full((case.num_documents + 1,), len(documents))
        local[list(documents)] = torch.arange(len(documents))
        leaves = [padded(full[0])]
        leaves = leaves + [x[columns] for x in full[1:]] if fused else [leaves[0][:, columns]]
        leaves = [x.to(problem.dtype).clone().requires_grad_() for x in leaves]
        keywords = choice.keywords() | {
            name: padded(x) for name, x in choice.vectors(case, fused).items()
        }
        if fused:
            keywords |= {
                name: x.to(problem.dtype) for name, x in choice.ref_head(case, columns).items()
            }
        elif "ref_logits" in keywords:
            keywords["ref_logits"] = keywords["ref_logits"][:, columns]
        keywords |= {"bias": leaves[2]} if fused else {}
        if (
            groups["vocabulary"] is not None
            and len({b - a for a, b in pairwise(cut.vocabulary)}) > 1
        ):
            keywords["vocabulary_start"] = columns.start  # which equal shards do not need
        out = (linear_policy_loss if fused else policy_loss)(
            *leaves[:2],
            padded(case.labels, -1),
            padded(case.old_log_probs),
            padded(case.advantages),
            padded(local[case.document_index], len(documents)),
            **{name: x[list(documents)] for name, x in choice.of_documents(case).items()},
            num_documents=len(documents),
            temperature=TEMPERATURE,
            **{f"{axis}_group": group for axis, group in groups.items()},
            **{"totals": totals} | keywords | options,
        )
        out.loss.backward()
        loss_sum = loss_sum + out.loss.detach()
        sums = out.metric_sums if sums is None else sums.merge(out.metric_sums)
        real = rows >= 0
        if fused:
            gradients[0][rows[real]] += leaves[0].grad[real].double()
            for gradient, leaf in zip(gradients[1:], leaves[1:], strict=True):
                gradient[columns] += leaf.grad.double()
        else:
            gradients[0][rows[real], columns] += leaves[0].grad[real].double()
    for axis in ("data", "sequence"):
        loss_sum, sums = sums.all_reduce(loss_sum, groups[axis])
    return Result(float(loss_sum), as_floats(sums.finalize(totals)), gradients)


def assert_matches_reference(
    cut: Cut, problem: HeadCase, choice: Choice, fused: bool, tolerance: float = 1e-12, **options
) -> None:
    """A step spread so over threads is the specification's. options: further keywords of the
    loss."""

    def run(rank):
        return evaluate_on_rank(axis_groups(cut.sizes), cut, problem, choice, fused, **options)

    assert_ranks_match(
        on_ranks(cut.world_size, run), cut, problem.by_reference(choice, fused), fused, tolerance
    )


def assert_ranks_match(
    results: list[Result], cut: Cut, wanted: Result, fused: bool, tolerance: float
) -> None:
    """Every rank reports the step's loss and metrics, and the gradients of the ranks make up the
    step's."""
    for result in results:
        assert_numbers_close(result.loss, wanted.loss, tolerance)
        assert result.metrics.keys() == wanted.metrics.keys()
        for name, value in wanted.metrics.items():
            assert_numbers_close(result.metrics[name], value, tolerance, name)
    for number, gradient in enumerate(wanted.gradients):
        shares = torch.stack([result.gradients[number] for result in results])
        if fused and number == 0:
            # Each vocabulary shard has the whole gradient of the hidden states.
            for total in shares.view(-1, cut.sizes["vocabulary"], *gradient.shape).sum(0):
                assert_numbers_close(total, gradient, tolerance)
        else:
            assert_numbers_close(shares.sum(0), gradient, tolerance)
