"""One step of documents cut over micro-batches and ranks, for the tests of what must not depend on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from builders.losses import CORRECTIONS, PARAMETERS, TEMPERATURE, HeadCase, corrected, totals_of
from pgtoolkit import linear_policy_loss, policy_loss
from pgtoolkit.losses import reference


@dataclass(frozen=True)
class Cut:
    """Which rank holds what.

    documents: for each data rank its micro-batches, as lists of documents; all ranks have as many.
    sequence: where the token axis of each micro-batch is cut, as shares of its length. vocabulary: first column of
    each shard, and the end. padding: untrained positions holding NaN at the end of each micro-batch.
    """

    documents: tuple[tuple[tuple[int, ...], ...], ...]
    sequence: tuple[float, ...] = (0, 1)
    vocabulary: tuple[int, ...] | None = None
    padding: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        shards = 1 if self.vocabulary is None else len(self.vocabulary) - 1
        return {"data": len(self.documents), "sequence": len(self.sequence) - 1, "vocabulary": shards}

    @property
    def world_size(self) -> int:
        return len(self.documents) * (len(self.sequence) - 1) * self.sizes["vocabulary"]


ALL = ((0, 1, 2, 3, 4, 5),)
CUTS = {
    "micro-batches 2": Cut((((0, 1, 2), (3, 4, 5)),)),
    "micro-batches 5": Cut((((0,), (1, 5), (2,), (4,), (3,)),), padding=2),
    "one per document": Cut((((0,), (1,), (2,), (3,), (4,), (5,)),)),
    "data 2": Cut((((3, 1), ()), ((0, 5), (4, 2))), padding=1),
    "data 4": Cut((((3,), ()), ((0,), (5,)), ((4,), (2,)), ((1,), ()))),
    "sequence 2": Cut((ALL,), (0, 0.5, 1)),
    "sequence 4": Cut((((4, 3, 0), (2, 1, 5)),), (0, 0.4, 0.4, 0.9, 1), padding=3),
    "vocabulary 2": Cut((ALL,), vocabulary=(0, 6, 12)),
    "vocabulary 4": Cut((((5, 4, 3), (2, 1, 0)),), vocabulary=(0, 1, 8, 8, 12), padding=2),
    "data x vocabulary": Cut((((3, 1), ()), ((0, 5), (4, 2))), vocabulary=(0, 5, 12)),
    "data x sequence": Cut((((3, 1), ()), ((0, 5), (4, 2))), (0, 0.3, 1)),
    "sequence x vocabulary": Cut((((2, 0), (5, 3, 1, 4)),), (0, 0.6, 1), (0, 11, 12)),
    "data x sequence x vocabulary": Cut((((3, 1), ()), ((0, 5), (4, 2))), (0, 0.3, 1), (0, 5, 12), padding=1),
}


@dataclass
class Result:
    """loss, metrics: of the step. gradients: by logits (T, V), or by hidden (T, H), weight and bias."""

    loss: float
    metrics: dict[str, float]
    gradients: list[Tensor]


def expected(
    head_case: HeadCase,
    fused: bool,
    loss: str,
    aggregation: str,
    metrics: str,
    correction: str | None = None,
    **options,
) -> Result:
    """By the loops of the reference, from all logits at once. correction: of CORRECTIONS; with sampling log-probs.
    options: more of its keywords."""
    case = head_case.case
    found = reference.policy_loss(
        head_case.logits,
        *case.tensors[1:],
        loss=loss,
        aggregation=aggregation,
        divisor=8.0 if aggregation == "constant" else None,
        group_index=case.group_index,
        num_documents=case.num_documents,
        temperature=TEMPERATURE,
        metrics=metrics,
        **PARAMETERS[loss],
        **({} if correction is None else corrected(CORRECTIONS[correction], case.sampling_log_probs)),
        **options,
    )
    by_logits, gradients = found.gradient, [found.gradient]
    if fused:
        gradients = [by_logits @ head_case.weight, by_logits.T @ head_case.hidden, by_logits.sum(0)]
    return Result(found.loss, found.metrics, gradients)


def axis_groups(sizes: dict[str, int]) -> dict[str, dist.ProcessGroup | None]:
    """For each axis of a mesh over all ranks, the last axis fastest, this rank's group; None where it has one rank."""
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = {}
    for axis, name in enumerate(sizes):
        lines = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
        own = [dist.new_group(line) for line in lines]
        mine = next(number for number, line in enumerate(lines) if dist.get_rank() in line)
        groups[name] = own[mine] if ranks.shape[axis] > 1 else None
    return groups


def evaluate(
    groups: dict,
    cut: Cut,
    head_case: HeadCase,
    fused: bool,
    loss: str,
    aggregation: str,
    metrics: str,
    by_token: dict[str, Tensor] | None = None,
    **options,
) -> Result:
    """On one rank: the step's loss and metrics, and the gradients of what this rank holds, 0 elsewhere.

    groups: as `axis_groups(cut.sizes)` gives them. by_token: more vectors of the whole step, by their keywords.
    Gradients are of the whole step's shape. options: a `correction` of CORRECTIONS, or None, and further keywords of
    the loss.
    """
    data, sequence, vocabulary = (0 if group is None else group.rank() for group in groups.values())
    case, dtype, totals = head_case.case, head_case.dtype, totals_of(head_case.case)
    columns = slice(*(cut.vocabulary or (0, len(head_case.bias)))[vocabulary : vocabulary + 2])
    full = (head_case.hidden, head_case.weight, head_case.bias) if fused else (head_case.logits,)
    gradients = [torch.zeros_like(x) for x in full]
    loss_sum, sums, correction = torch.zeros(()), None, options.pop("correction", None)
    for documents in cut.documents[data]:
        rows = [(case.document_index == d).nonzero()[:, 0] for d in documents]
        rows = torch.cat([*rows, torch.full((cut.padding,), -1)])
        low, high = (round(share * len(rows)) for share in cut.sequence[sequence : sequence + 2])
        rows = rows[low:high]

        def padded(values, filler, rows=rows):
            return torch.where((rows < 0).view(-1, *[1] * (values.dim() - 1)), filler, values[rows])

        numbers = torch.full((case.num_documents + 1,), len(documents))
        numbers[list(documents)] = torch.arange(len(documents))
        vectors = (
            padded(case.labels, -1),
            padded(case.old_log_probs, torch.nan).to(dtype),
            padded(case.advantages, torch.nan).to(dtype),
            padded(numbers[case.document_index], len(documents)),
        )
        leaves = [padded(full[0], torch.nan)]
        leaves = leaves + [x[columns] for x in full[1:]] if fused else [leaves[0][:, columns]]
        leaves = [x.to(dtype).clone().requires_grad_() for x in leaves]
        inputs = (*leaves[:2], *vectors) if fused else (leaves[0], *vectors)
        keywords = {"bias": leaves[2]} if fused else {}
        keywords |= {name: padded(values, torch.nan).to(dtype) for name, values in (by_token or {}).items()}
        out = (linear_policy_loss if fused else policy_loss)(
            *inputs,
            **keywords,
            loss=loss,
            aggregation=aggregation,
            divisor=8.0 if aggregation == "constant" else None,
            group_index=case.group_index[list(documents)],
            num_documents=len(documents),
            totals=totals,
            temperature=TEMPERATURE,
            metrics=metrics,
            vocabulary_group=groups["vocabulary"],
            vocabulary_start=columns.start if groups["vocabulary"] is not None else None,
            sequence_group=groups["sequence"],
            data_group=groups["data"],
            correction=CORRECTIONS.get(correction),
            sampling_log_probs=padded(case.sampling_log_probs, torch.nan).to(dtype) if correction else None,
            **PARAMETERS[loss],
            **options,
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
    return Result(float(loss_sum), {k: float(v) for k, v in sums.finalize(totals).items()}, gradients)


def assert_same(results: list[Result], cut: Cut, wanted: Result, fused: bool, tolerance: float) -> None:
    """Every rank reports the step's loss and metrics, and the gradients of the ranks make up the step's."""
    for result in results:
        close(result.loss, wanted.loss, tolerance)
        assert result.metrics.keys() == wanted.metrics.keys()
        for name, value in wanted.metrics.items():
            close(result.metrics[name], value, tolerance, name)
    for number, gradient in enumerate(wanted.gradients):
        shares = torch.stack([result.gradients[number] for result in results])
        if fused and number == 0:
            # Each vocabulary shard has the whole gradient of the hidden states.
            for total in shares.view(-1, cut.sizes["vocabulary"], *gradient.shape).sum(0):
                close(total, gradient, tolerance)
        else:
            close(shares.sum(0), gradient, tolerance)


def close(found, value, tolerance: float, name: str = "") -> None:
    found, value = (torch.as_tensor(x, dtype=torch.float64) for x in (found, value))
    error = float((found - value).norm() / value.norm().clamp(min=1e-3))
    assert error < tolerance, (name, error, found, value)
