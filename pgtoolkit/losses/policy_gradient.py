"""The front door: policy-gradient losses from logits, or from hidden states and the LM head's weight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import StepTotals
from pgtoolkit.kernels.linear import Head, linear_loss
from pgtoolkit.kernels.logits import IMPLEMENTATIONS, choose_implementation, logits_loss
from pgtoolkit.kernels.parallel import SumGradient, largest
from pgtoolkit.kernels.plan import DocumentCounts, default_logits_memory_mb, rows_within
from pgtoolkit.kernels.products import linear
from pgtoolkit.losses import reference
from pgtoolkit.losses.aggregation import Reducer
from pgtoolkit.losses.arguments import (
    check_choices,
    check_counts,
    check_groups,
    check_head,
    check_name,
    check_positive,
    check_tensors,
    check_whole,
)
from pgtoolkit.losses.metrics import MetricSums
from pgtoolkit.losses.objective import NEEDS_WHOLE_DOCUMENTS, make_objective


@dataclass(frozen=True)
class PolicyLoss:
    """What `policy_loss` returns.

    loss: 0-dim, differentiable. log_probs: (T,) log-prob of each label, 0 where nothing is trained; detached.
    metric_sums: the metrics before division, to merge over the pieces of a step. totals: the step's.
    With a sequence_group or data_group, loss and metric_sums are this rank's share: they add up over the groups.
    """

    loss: Tensor
    log_probs: Tensor
    metric_sums: MetricSums
    totals: StepTotals

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        """Name -> 0-dim tensor, over the tokens of this call on this rank and divided by the step's totals."""
        return self.metric_sums.finalize(self.totals)


def policy_loss(
    logits: Tensor,
    labels: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    document_index: Tensor,
    *,
    loss: str = "gspo",
    epsilon_low: float | None = None,
    epsilon_high: float | None = None,
    aggregation: str = "sample_mean",
    divisor: float | None = None,
    reducer: Reducer | None = None,
    group_index: Tensor | None = None,
    num_documents: int | None = None,
    totals: StepTotals | None = None,
    temperature: float = 1.0,
    metrics: str = "none",
    impl: str = "auto",
    check_finite: bool = True,
    overwrite_logits: bool = False,
    vocabulary_group: ProcessGroup | None = None,
    vocabulary_start: int | None = None,
    sequence_group: ProcessGroup | None = None,
    data_group: ProcessGroup | None = None,
) -> PolicyLoss:
    """Clipped policy-gradient loss of packed documents, from their logits.

    logits: (T, V) floating. labels: (T,) int64, the token to predict at each position, negative where not trained.
    old_log_probs, advantages: (T,) floating, read only where trained. document_index: (T,) int64, 0-based.
    loss: "grpo" (arXiv 2402.03300; asymmetric clip 2503.14476) or "gspo" (2507.18071).
    epsilon_low, epsilon_high: the clip; by default 0.2 and 0.2 for "grpo", 3e-4 and 4e-4 for "gspo".
    aggregation: "sample_mean", "prompt_mean" (needs group_index, (documents,) int64), "token_mean", or
        "constant" (needs divisor, Dr. GRPO's L, 2503.20783 eq. 2); a reducer takes the place of all of them.
    totals: the step's totals when this call is a piece of a step; then group_index counts as totals.tokens_per_group
        does. Without totals the call is a whole step of num_documents documents (default: largest index + 1, padding
        included; give num_documents where padding carries a number of its own, or a document has no token: without
        it a number that is left out is refused).
    temperature: log-probs are log_softmax(logits / temperature).
    metrics: "none", "basic" or "with_entropy". impl: "torch", "triton" (a GPU, or a CPU under Triton's interpreter),
        "auto" (by device) or "reference" (plain float64 loops, for tests).
    check_finite: look for non-finite numbers, and documents outside num_documents, at trained positions; costs one
        synchronisation on a GPU. Without it they make the loss NaN, infinities included.
    overwrite_logits: write the gradient over the logits, which saves its memory; they hold no logits afterwards, and
        the loss can be backpropagated once.

    On several ranks, each of which makes the same calls (see "Pieces and ranks" in docs/losses.md):
    vocabulary_group: logits hold this rank's columns, from vocabulary_start on (by default rank times columns, all
        ranks having as many); labels are numbers of the whole vocabulary, and the rest is the same on every rank.
    sequence_group: the tokens of a document may lie on several ranks. document_index, num_documents (which must be
        given) and group_index are common to them; T may differ between ranks, and be 0.
    data_group: ranks with other documents of the step; only asked for its totals where these are not given.

    Raises ValueError for arguments that cannot be right and DataError for non-finite data, naming the document.
    """
    switches = {"check_finite": check_finite, "overwrite_logits": overwrite_logits}
    epsilon_low, epsilon_high = check_choices(loss, metrics, epsilon_low, epsilon_high, temperature, **switches)
    check_name("impl", impl, ("auto", *IMPLEMENTATIONS, "reference"))
    tensors = check_tensors("logits", logits, labels, old_log_probs, advantages, document_index)
    check_groups(impl, num_documents, vocabulary_group, vocabulary_start, sequence_group, data_group)
    shard = _shard(vocabulary_group, vocabulary_start, logits.shape[1])
    implementation = None if impl == "reference" else choose_implementation(impl, logits, shard)
    objective = make_objective(
        *tensors,
        loss=loss,
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        aggregation=aggregation,
        divisor=divisor,
        reducer=reducer,
        group_index=group_index,
        num_documents=num_documents,
        totals=totals,
        dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32,
        sequence_group=sequence_group,
        data_group=data_group,
        settle=getattr(implementation, "settle", None),
    )
    if impl == "reference":
        if totals is not None or reducer is not None:
            raise ValueError("impl='reference' computes whole steps under the four aggregations: no totals, no reducer")
        value, log_probs, entropy = _by_reference(
            logits,
            *tensors,
            loss=loss,
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
            aggregation=aggregation,
            divisor=divisor,
            group_index=group_index,
            num_documents=num_documents,
            temperature=temperature,
        )
        sums = objective.metrics(metrics, log_probs, entropy)
    else:
        value, log_probs, sums = logits_loss(
            logits, tensors[0], objective, temperature, metrics, implementation, overwrite_logits
        )
    if check_finite:
        objective.check_finite(log_probs)
    return PolicyLoss(value, log_probs, sums, objective.totals)


def linear_policy_loss(
    hidden: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    document_index: Tensor,
    *,
    bias: Tensor | None = None,
    loss: str = "gspo",
    epsilon_low: float | None = None,
    epsilon_high: float | None = None,
    aggregation: str = "sample_mean",
    divisor: float | None = None,
    reducer: Reducer | None = None,
    group_index: Tensor | None = None,
    num_documents: int | None = None,
    totals: StepTotals | None = None,
    temperature: float = 1.0,
    metrics: str = "none",
    impl: str = "auto",
    check_finite: bool = True,
    fp32_logits: bool = False,
    num_splits: int = 1,
    logits_memory_mb: float | None = None,
    weight_gradient: Tensor | None = None,
    counts: DocumentCounts | None = None,
    vocabulary_group: ProcessGroup | None = None,
    vocabulary_start: int | None = None,
    sequence_group: ProcessGroup | None = None,
    data_group: ProcessGroup | None = None,
) -> PolicyLoss:
    """`policy_loss` of the logits hidden @ lm_head_weight.T + bias, which need never exist in full.

    hidden: (T, H). lm_head_weight: (V, H), cast to hidden's dtype if it has another. bias: (V,) or None. The other
    tensors and keywords are those of `policy_loss`; what follows is what is different.

    impl: "fused_linear" takes the trained tokens in chunks of whole documents whose logits fit logits_memory_mb (MiB;
        by default a sixty-fourth of the GPU's memory and at least 512, on a CPU 512) and computes loss and gradients
        in one pass; a document longer than a chunk takes a second product for its logits. Rows that are not trained
        are not multiplied, and rows of zero advantage only forward. "torch", "triton" and "reference" materialise all
        logits; with num_splits > 1 (grpo only) those of one of num_splits contiguous cuts at a time. "auto" is
        "fused_linear", or by device where num_splits > 1.
    fp32_logits: logits in float32 from hidden and weight in half precision (the fp32 LM head).
    weight_gradient: (V, H) float32 (float64 for float64 hidden), to which the weight's gradient is added during the
        call itself, so that it adds up in float32 over micro-batches; autograd then sees the weight as a constant,
        and the loss must be backpropagated as it is: a backward of a scaled loss is an error. "fused_linear" only.
    counts: the documents' numbers of tokens, where the caller knows them on the host: with check_finite=False,
        "fused_linear" then reads nothing from a GPU before its last product.
    vocabulary_group: lm_head_weight, bias and weight_gradient hold this rank's rows, hidden is the same on every rank;
        so is its gradient, summed over the group, while those of weight and bias are of the rows here.

    The gradients are computed in the forward call, where grad mode is on, and handed out by the first backward.
    """
    switches = {"check_finite": check_finite, "fp32_logits": fp32_logits}
    epsilon_low, epsilon_high = check_choices(loss, metrics, epsilon_low, epsilon_high, temperature, **switches)
    check_name("impl", impl, ("auto", "fused_linear", *IMPLEMENTATIONS, "reference"))
    tensors = check_tensors("hidden", hidden, labels, old_log_probs, advantages, document_index)
    check_head(hidden, lm_head_weight, bias, weight_gradient)
    check_whole("num_splits", num_splits, 1)
    if num_splits > 1 and NEEDS_WHOLE_DOCUMENTS[loss]:
        raise ValueError(f"num_splits={num_splits} needs loss='grpo' (got {loss!r}): its ratio is a whole document's")
    if num_splits > 1 and impl in ("fused_linear", "reference"):
        raise ValueError(f"num_splits={num_splits} has no effect with impl={impl!r}; it cuts materialised logits")
    fused = impl == "fused_linear" or (impl == "auto" and num_splits == 1)
    if weight_gradient is not None and not fused:
        raise ValueError(f"weight_gradient needs impl='fused_linear' (got {impl!r})")
    if logits_memory_mb is not None:
        check_positive("logits_memory_mb", logits_memory_mb)
        if not fused:
            raise ValueError(f"logits_memory_mb={logits_memory_mb!r} needs impl='fused_linear' (got {impl!r})")
    check_groups(impl, num_documents, vocabulary_group, vocabulary_start, sequence_group, data_group)
    keywords = {
        "loss": loss,
        "epsilon_low": epsilon_low,
        "epsilon_high": epsilon_high,
        "aggregation": aggregation,
        "divisor": divisor,
        "reducer": reducer,
        "group_index": group_index,
        "num_documents": num_documents,
        "totals": totals,
        "sequence_group": sequence_group,
        "data_group": data_group,
    }
    if not fused and num_splits == 1:
        if vocabulary_group is not None:
            hidden = SumGradient.apply(hidden, vocabulary_group)
            keywords |= {"vocabulary_group": vocabulary_group, "vocabulary_start": vocabulary_start}
        logits = linear(hidden, lm_head_weight, bias, fp32_logits)
        keywords |= {"temperature": temperature, "metrics": metrics, "impl": impl, "check_finite": check_finite}
        return policy_loss(logits, *tensors, **keywords, overwrite_logits=True)

    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    shard = _shard(vocabulary_group, vocabulary_start, lm_head_weight.shape[0])
    implementation = choose_implementation("auto" if fused else impl, hidden, shard)
    objective = make_objective(*tensors, **keywords, dtype=wide, settle=getattr(implementation, "settle", None))
    if counts is not None:
        check_counts(counts, objective.segments.num_documents)
    max_rows = -(-len(hidden) // num_splits)
    if fused:
        memory = default_logits_memory_mb(hidden.device) if logits_memory_mb is None else logits_memory_mb
        max_rows = rows_within(memory, max(1, lm_head_weight.shape[0]), wide if fp32_logits else hidden.dtype)
        if vocabulary_start is not None or logits_memory_mb is None:
            # Shards differ in size, and GPUs may: the same rows on every rank. Else all is the same already.
            max_rows = -largest(-max_rows, vocabulary_group, hidden.device)
    head = Head(
        implementation=implementation,
        max_rows=max(1, max_rows),
        temperature=temperature,
        level=metrics,
        fp32_logits=fp32_logits,
        check_finite=check_finite,
        weight_gradient=weight_gradient,
        counts=counts,
        vocabulary_group=vocabulary_group,
    )
    value, log_probs, sums, is_bad = linear_loss(hidden, lm_head_weight, bias, tensors[0], objective, head)
    if check_finite and is_bad:
        objective.check_finite(log_probs)
    return PolicyLoss(value, log_probs, sums, objective.totals)


def _by_reference(logits, *tensors, **options):
    """(loss, log_probs, entropy) by the specification, differentiable with respect to the logits."""
    found = reference.policy_loss(logits.detach(), *tensors, metrics="none", **options)
    log_probs, entropy = logits.new_tensor([found.log_probs, found.entropy], dtype=torch.float64)
    # The gradient is known in closed form: this has the value and the derivative of the loss.
    shift = logits.double() - logits.detach().double()
    loss = found.loss + (torch.nan_to_num(shift) * found.gradient.to(logits.device)).sum()
    return loss, log_probs, entropy


def _shard(group: ProcessGroup | None, start: int | None, columns: int) -> tuple[ProcessGroup, int] | None:
    if group is None:
        return None
    return group, group.rank() * columns if start is None else start
