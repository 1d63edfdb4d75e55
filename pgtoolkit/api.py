"""The public functions of the library: keyword arguments, checked and passed on as objects."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgtoolkit.batch import DocumentCounts, StepTotals, Tokens
from pgtoolkit.kernels import arguments
from pgtoolkit.kernels.given_logits import IMPLEMENTATIONS
from pgtoolkit.kernels.losses import (
    Computation,
    LMHead,
    LossOfStep,
    PolicyLoss,
    loss_of_hidden,
    loss_of_log_probs,
    loss_of_logits,
)
from pgtoolkit.losses.aggregation import AggregationName, Reducer, aggregation_of
from pgtoolkit.losses.arrays import Array, mask_of_tokens
from pgtoolkit.losses.checks import check_name, check_switches, shown
from pgtoolkit.losses.corrections import Correction, CorrectionName, correction_of
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.families import FAMILIES, Family, LossName, family_of
from pgtoolkit.losses.function import FunctionFamily
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.objective import Loss

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_TAKES = {
    "logits": "policy_loss",
    "hidden": "linear_policy_loss",
    "log_probs": "log_prob_loss or step_coefficients",
}
"""The model's output -> the functions that take it."""

_OF_LOGITS = (
    *("entropy_coefficient", "vocabulary_group"),
    *("sampling_top_ids", "sampling_top_log_probs", "sampling_kept_ids"),
)
"""Keywords that mean something only where there are logits, and that no family has."""


def _refusing_others(
    function: Callable[_Arguments, _Result],
) -> Callable[_Arguments, _Result]:
    """Return the function, which refuses keywords that only another function of this page has.

    Python would say which argument is missing, and the family that it has no such parameter. A loss
    function may have a parameter of this name.
    """
    known = inspect.signature(function).parameters
    name = function.__name__

    @functools.wraps(function)
    def checked(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        for key in keywords.keys() - known.keys():
            if key in _TAKES:
                wanted = next(output for output in _TAKES if output in known)
                raise ValueError(
                    f"{name} needs {wanted} (got {key}). Use from_padded({wanted}=...), or call "
                    f"{_TAKES[key]}"
                )
            if key == "temperature":
                raise ValueError(_of_the_loss(name, keywords.get("loss"), keywords[key]))
            if key in _OF_LOGITS and not callable(keywords.get("loss")):
                raise ValueError(
                    f"{name} has no {key}, which needs logits. Use policy_loss or "
                    "linear_policy_loss"
                )
        return function(*arguments, **keywords)

    return checked


def _of_the_loss(function: str, loss: object, value: object) -> str:
    """Refuse `temperature` beside log-probs: elsewhere the word is that of the logits, and here it
    could only be that of the loss."""
    if isinstance(loss, str) and "temperature" in {
        field.name for field in fields(FAMILIES.get(loss, Family))
    }:
        made = f"pgtoolkit.families.{FAMILIES[loss].__name__}(temperature={shown(value)})"
        use = f"Use loss={made} for that of {loss}'s target"
    elif callable(loss):
        use = f"Use loss=functools.partial(..., temperature={shown(value)}) for that of the loss"
    else:
        use = "Use log_probs of logits / temperature"
    return f"{function} has no temperature: the logits' one is in the log-probs already. {use}"


@_refusing_others
def policy_loss(
    logits: Tensor,
    labels: Array,
    old_log_probs: Array | None,
    advantages: Array,
    document_index: Array,
    *,
    loss: LossName | Family | Callable = "gspo",
    aggregation: AggregationName = "sample_mean",
    divisor: float | None = None,
    reducer: Reducer | None = None,
    group_index: Array | None = None,
    trajectory_index: Array | None = None,
    num_documents: int | None = None,
    totals: StepTotals | None = None,
    correction: CorrectionName | Correction | None = None,
    sampling_log_probs: Array | None = None,
    rewards: Array | None = None,
    coefficients: Array | None = None,
    factors: Array | None = None,
    sampling_top_ids: Array | None = None,
    sampling_top_log_probs: Array | None = None,
    sampling_kept_ids: Array | None = None,
    temperature: float = 1.0,
    entropy_coefficient: float = 0.0,
    kl: KL | None = None,
    ref_log_probs: Array | None = None,
    ref_logits: Tensor | None = None,
    metrics: str = "none",
    impl: str = "auto",
    check_finite: bool = True,
    overwrite_logits: bool = False,
    vocabulary_group: ProcessGroup | None = None,
    vocabulary_start: int | None = None,
    sequence_group: ProcessGroup | None = None,
    data_group: ProcessGroup | None = None,
    **parameters: float | str | None,
) -> PolicyLoss:
    """Return the policy-gradient loss of packed documents, differentiable by their logits.

    T is the number of positions of all documents, V the size of the vocabulary. What comes beside
    the model's output may be lists or numpy's arrays, too, which go to its device. All of it is
    constant: no gradient flows into it, also where old_log_probs are the log-probs themselves.

    logits: (T, V) floating.
    labels: (T,) int64, the token that the logits at each position predict, negative where not
        trained: labels[t] is token t + 1 of the document, not token t. `from_padded` makes all
        of these vectors from (B, T).
    old_log_probs, advantages: (T,) floating, of that same token, read only where trained. A loss
        and metrics that read no old log-probs, as "reinforce" does not, take None.
    document_index: (T,) int64, 0-based.

    loss: the name of a family (a key of pgtoolkit.families.FAMILIES) with the values of its paper,
        a family object, such as pgtoolkit.families.Cispo(epsilon_high=2.0), or a function of your
        own (see "A loss of your own" in docs/losses.md). One that compares documents, such as "tpo"
        and "lpo", needs coefficients.
    parameters: other values than the paper's for a family given by name, such as epsilon_low and
        epsilon_high; or than the defaults of the function's own parameters.
    rewards: (documents,) floating, each document's reward, for a function that asks for it.
    coefficients: (T,) floating, from `step_coefficients`, of a loss that depends on other documents
        of the step. The surrogate then counts by them alone, and adds nothing to the value.
    factors: (T,) floating, without gradient on each token's loss, and not on penalties: from
        `top_entropy`, or a correction that a trainer has computed by itself.
    aggregation: "sample_mean", "prompt_mean" or "balanced" (need group_index, (documents,) int64),
        "token_mean", or "constant" (needs divisor, Dr. GRPO's L, arXiv 2503.20783, equation 2).
    reducer: a function of your own in the place of an aggregation, which is left out. Beside it
        aggregation="prompt_mean" says that steps hold whole groups.
    trajectory_index: (documents,) int64, not negative: documents that share a number are parts of
        one attempt at a prompt (a trajectory), which the aggregation counts once. None: each
        document is an attempt by itself.
    totals: the step's totals when this call is a piece of a step; group_index and trajectory_index
        then number the entries of totals.tokens_per_group and totals.tokens_per_trajectory. Its
        counts are whole numbers. Without totals the call is a complete step of num_documents
        documents, as impl="reference" needs it.
    num_documents: by default the largest index + 1, and each number up to it must occur. Give it
        where padding carries a number of its own, or a document has no token.
    correction: a factor without gradient on each token's loss, for the gap between the sampler's
        log-probs and old_log_probs: a name (a key of pgtoolkit.corrections.CORRECTIONS) with its
        defaults, or an object such as pgtoolkit.corrections.TokenMask(low=0.2). It needs
        sampling_log_probs; "off_policy_mask" takes old_log_probs where there are none, and reads
        none where there are sampling_log_probs.
    sampling_log_probs: (T,) floating, as the sampler gave them, read only where trained. Their
        distance from old_log_probs is among the basic metrics.
    sampling_top_ids, sampling_top_log_probs: (T, k) integers and floating, for score centering (a
        field of pgtoolkit.families.Reinforce, Cispo and Icepop): the k likeliest tokens of the
        sampler at each position, each once, and their log-probs at `temperature`; -1 and -inf where
        unused. old_log_probs are then the sampler's.
    sampling_kept_ids: (T, k) integers, the tokens that sampling by top_p or top_k has kept at each
        position, each once, the label among them; -1 where unused, and in all of a row where every
        token was kept. The log-prob of a label is then log_softmax over these tokens alone, and all
        other log-probs need to be over them, too: old_log_probs, those of the sampler and of the
        reference. The entropy and a full KL stay those of the whole vocabulary.
    temperature: log-probs are log_softmax(logits / temperature). That of the target of tpo and lpo
        is a parameter of the object: loss=pgtoolkit.families.Tpo(temperature=0.5).
    entropy_coefficient: of the entropy bonus: the loss has minus this number times the sum of
        w_t H_t, H_t the entropy of the softmax at each trained position. The metrics then have
        `entropy` from "basic" on.
    kl: a penalty on the distance from a reference, such as pgtoolkit.kl.KL("k3", coefficient=0.05),
        or a full KL, over the full vocabulary at each trained position: "full_reverse",
        KL(policy || reference), or "full_forward", KL(reference || policy), which is distillation
        where the reference is a teacher.
    ref_log_probs: (T,) floating, log-prob of each label under the reference, read only where
        trained; with them the metrics have `kl_ref` from "basic" on.
    ref_logits: for a full KL, in the place of ref_log_probs: logits of the reference, shaped like
        logits, under the same temperature. They get no gradient. The metric `kl_ref` is then the
        full KL.

    metrics: "none", "basic" or "with_entropy".
    impl: "torch", "triton" (a GPU, or a CPU under Triton's interpreter), "auto" (by device) or
        "reference" (plain float64 loops, for tests, of complete steps on one rank).
    check_finite: refuse non-finite numbers, log-probs above 0.001 and documents outside
        num_documents at trained positions, totals of fewer tokens than are here, and a function of
        your own whose value or slope is not finite; costs one synchronisation on a GPU, with a
        function two. With False, numbers that are not finite make the loss NaN, infinities
        included.
    overwrite_logits: write the gradient over the logits, which saves its memory; the loss can then
        be backpropagated once, and the logits are lost.

    On several ranks, each of which makes the same calls (see "Pieces and ranks" in docs/losses.md):

    vocabulary_group: logits hold this rank's columns; labels number the full vocabulary, and all
        else is the same on every rank.
    vocabulary_start: the first of these columns; by default rank times columns, if all ranks have
        equally many.
    sequence_group: the tokens of a document may lie on several ranks. document_index, num_documents
        (which must be given), group_index and trajectory_index are common to them; T may differ
        between ranks, and be 0.
    data_group: ranks with other documents of the step, used for its totals where these are not
        given. group_index and trajectory_index then count the groups of the whole step, not of a
        rank. Each gets its share of the loss, and the gradients of all are to be summed.
        DistributedDataParallel and FSDP average them: multiply the loss by the number of ranks
        before its backward pass.

    Raises ValueError for arguments that cannot be right and DataError for non-finite data, naming
    the document.
    """
    definition = Loss(
        family_of(loss, **parameters),
        aggregation_of(aggregation, divisor, reducer),
        temperature,
        metrics,
        correction_of(correction),
        entropy_coefficient,
        kl,
    )
    arguments.check_sampling(definition, sampling_log_probs, coefficients)
    arguments.check_reference(definition, ref_log_probs, coefficients, ref_logits=ref_logits)
    ranks = Ranks(vocabulary_group, vocabulary_start, sequence_group, data_group)
    check_name("impl", impl, ("auto", *IMPLEMENTATIONS, "reference"))
    check_switches(check_finite=check_finite, overwrite_logits=overwrite_logits)
    arguments.check_rewards(definition, rewards)
    arguments.check_coefficients(definition, coefficients)
    arguments.check_rows("logits", logits)
    if ref_logits is not None:
        shape = tuple(logits.shape)
        arguments.check_tensor(
            "ref_logits", ref_logits, logits, shape, f"the shape of logits, {shape}"
        )
    arguments.check_ranks(ranks, impl, num_documents)
    old_log_probs = arguments.old_or_zeros(
        "logits", logits, definition, old_log_probs, sampling_log_probs, sampling_kept_ids
    )
    vectors = labels, old_log_probs, advantages, document_index, sampling_log_probs, ref_log_probs
    top = arguments.check_top(definition, sampling_top_ids, sampling_top_log_probs)
    tokens = arguments.tokens_of(
        "logits",
        logits,
        (*vectors, factors, coefficients),
        num_documents,
        (group_index, trajectory_index),
        totals,
        rewards=rewards,
        top=top,
        kept_ids=sampling_kept_ids,
    )
    method = Computation(impl, check_finite, overwrite_logits=overwrite_logits)
    return loss_of_logits(logits, tokens, totals, definition, ranks, method, ref_logits)


@_refusing_others
def linear_policy_loss(
    hidden: Tensor,
    lm_head_weight: Tensor,
    labels: Array,
    old_log_probs: Array | None,
    advantages: Array,
    document_index: Array,
    *,
    bias: Tensor | None = None,
    loss: LossName | Family | Callable = "gspo",
    aggregation: AggregationName = "sample_mean",
    divisor: float | None = None,
    reducer: Reducer | None = None,
    group_index: Array | None = None,
    trajectory_index: Array | None = None,
    num_documents: int | None = None,
    totals: StepTotals | None = None,
    correction: CorrectionName | Correction | None = None,
    sampling_log_probs: Array | None = None,
    rewards: Array | None = None,
    coefficients: Array | None = None,
    factors: Array | None = None,
    sampling_top_ids: Array | None = None,
    sampling_top_log_probs: Array | None = None,
    sampling_kept_ids: Array | None = None,
    temperature: float = 1.0,
    entropy_coefficient: float = 0.0,
    kl: KL | None = None,
    ref_log_probs: Array | None = None,
    ref_hidden: Tensor | None = None,
    ref_lm_head_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
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
    **parameters: float | str | None,
) -> PolicyLoss:
    """Return `policy_loss` of the logits hidden @ lm_head_weight.T + bias.

    "fused_linear" never makes these logits in full.

    T is the number of positions, V the size of the vocabulary, H the width of the hidden states.

    hidden: (T, H). "fused_linear" makes the products in its dtype, also under torch.autocast: there
        float32 states need hidden.bfloat16() for products in bfloat16.
    lm_head_weight: (V, H), cast to hidden's dtype if it has another.
    bias: (V,) or None.

    The other tensors and keywords are those of `policy_loss`, but for:

    impl: "fused_linear" takes the trained tokens in chunks of complete documents whose logits fit
        logits_memory_mb, and computes loss and gradients in one pass; a document longer than a
        chunk takes a second product for its logits. Rows that are not trained are not multiplied,
        and rows of zero advantage only forward. "torch", "triton" and "reference" materialise all
        logits; with num_splits > 1, which needs a family whose scope is the token, one of
        num_splits contiguous cuts at a time. "auto" is "fused_linear", or by device where
        num_splits > 1.
    logits_memory_mb: in MiB; by default a sixty-fourth of the GPU's memory and at least 512, on a
        CPU 512.
    ref_hidden, ref_lm_head_weight, ref_bias: (T, H'), (V, H'), and (V,) or None, of the reference,
        whose H' may differ: for a full KL, in the place of ref_logits, which then need never exist
        in full either; logits_memory_mb is for those of both models. They get no gradient.
    fp32_logits: logits in float32 from hidden and weight in half precision (the fp32 LM head).
    weight_gradient: (V, H) float32 (float64 for float64 hidden), to which the weight's gradient is
        added during the call itself: over micro-batches it adds up in float32. Autograd then sees
        the weight as a constant, and backward of a scaled loss is an error. "fused_linear" only.
    counts: the documents' numbers of tokens, where the caller knows them on the host: with
        check_finite=False, "fused_linear" then reads nothing from a GPU before its last product.
    vocabulary_group: lm_head_weight, bias and weight_gradient hold this rank's rows, and so do
        their gradients; hidden and its gradient, which is summed over the group, are the same on
        every rank.

    With "fused_linear" the gradients are computed in the forward call, and handed out by the first
    backward.
    """
    definition = Loss(
        family_of(loss, **parameters),
        aggregation_of(aggregation, divisor, reducer),
        temperature,
        metrics,
        correction_of(correction),
        entropy_coefficient,
        kl,
    )
    arguments.check_sampling(definition, sampling_log_probs, coefficients)
    arguments.check_reference(
        definition,
        ref_log_probs,
        coefficients,
        ref_hidden=ref_hidden,
        ref_lm_head_weight=ref_lm_head_weight,
        ref_bias=ref_bias,
    )
    ranks = Ranks(vocabulary_group, vocabulary_start, sequence_group, data_group)
    check_name("impl", impl, ("auto", "fused_linear", *IMPLEMENTATIONS, "reference"))
    check_switches(check_finite=check_finite, fp32_logits=fp32_logits)
    arguments.check_rewards(definition, rewards)
    arguments.check_coefficients(definition, coefficients)
    reference = None
    if ref_hidden is not None:
        assert ref_lm_head_weight is not None
        reference = ref_hidden, LMHead(ref_lm_head_weight, ref_bias, fp32_logits=fp32_logits)
    head = LMHead(lm_head_weight, bias, weight_gradient, fp32_logits, reference)
    method = Computation(impl, check_finite, num_splits, logits_memory_mb)
    arguments.check_rows("hidden", hidden)
    arguments.check_head(hidden, head, definition, method)
    arguments.check_ranks(ranks, impl, num_documents)
    old_log_probs = arguments.old_or_zeros(
        "hidden", hidden, definition, old_log_probs, sampling_log_probs, sampling_kept_ids
    )
    vectors = labels, old_log_probs, advantages, document_index, sampling_log_probs, ref_log_probs
    top = arguments.check_top(definition, sampling_top_ids, sampling_top_log_probs)
    indices = group_index, trajectory_index
    tokens = arguments.tokens_of(
        "hidden",
        hidden,
        (*vectors, factors, coefficients),
        num_documents,
        indices,
        totals,
        counts,
        rewards,
        top,
        sampling_kept_ids,
    )
    return loss_of_hidden(hidden, head, tokens, totals, definition, ranks, method)


@_refusing_others
def log_prob_loss(
    log_probs: Tensor,
    old_log_probs: Array | None,
    advantages: Array,
    document_index: Array,
    mask: Array,
    *,
    loss: LossName | Family | Callable = "gspo",
    aggregation: AggregationName = "sample_mean",
    divisor: float | None = None,
    reducer: Reducer | None = None,
    group_index: Array | None = None,
    trajectory_index: Array | None = None,
    num_documents: int | None = None,
    totals: StepTotals | None = None,
    correction: CorrectionName | Correction | None = None,
    sampling_log_probs: Array | None = None,
    rewards: Array | None = None,
    coefficients: Array | None = None,
    factors: Array | None = None,
    kl: KL | None = None,
    ref_log_probs: Array | None = None,
    metrics: str = "none",
    check_finite: bool = True,
    **parameters: float | str | None,
) -> PolicyLoss:
    """Return `policy_loss` of log-probs that the caller has computed, differentiable by them.

    log_probs: (T,) floating, of each token under the policy in training; any layout flattened to
        one axis, padding included.
    mask: (T,) bool, or 0 and 1, where a token is trained; other positions are not read.
    metrics: "none" or "basic". Entropy needs the logits, and so there is no bonus for it either.

    The other tensors and keywords are those of `policy_loss`.
    """
    definition = Loss(
        family_of(loss, **parameters),
        aggregation_of(aggregation, divisor, reducer),
        metrics=metrics,
        correction=correction_of(correction),
        kl=kl,
    )
    check_switches(check_finite=check_finite)
    arguments.check_rewards(definition, rewards)
    arguments.check_coefficients(definition, coefficients)
    old_log_probs = arguments.old_or_zeros(
        "log_probs", log_probs, definition, old_log_probs, sampling_log_probs
    )
    vectors = old_log_probs, advantages, document_index, sampling_log_probs, ref_log_probs
    indices = group_index, trajectory_index
    tokens = _tokens_of_log_probs(
        log_probs,
        mask,
        (*vectors, factors),
        num_documents,
        indices,
        totals,
        definition,
        rewards,
        coefficients,
    )
    return loss_of_log_probs(log_probs, tokens, totals, definition, Ranks(), check_finite)


class StepCoefficients(NamedTuple):
    """The result of `step_coefficients`.

    loss: 0-dim float64, of the whole step.
    coefficients: (T,) float64, c_t, the derivative of the loss without its penalties by each
        log-prob; 0 where nothing is trained.
    metrics: 0-dim tensors by name.
    """

    loss: Tensor
    coefficients: Tensor
    metrics: dict[str, Tensor]


@_refusing_others
def step_coefficients(
    log_probs: Tensor,
    old_log_probs: Array | None,
    advantages: Array,
    document_index: Array,
    mask: Array,
    *,
    loss: LossName | Family | Callable,
    aggregation: AggregationName = "sample_mean",
    divisor: float | None = None,
    reducer: Reducer | None = None,
    group_index: Array | None = None,
    num_documents: int | None = None,
    correction: CorrectionName | Correction | None = None,
    sampling_log_probs: Array | None = None,
    rewards: Array | None = None,
    factors: Array | None = None,
    kl: KL | None = None,
    ref_log_probs: Array | None = None,
    metrics: str = "none",
    check_finite: bool = True,
    **parameters: float | str | None,
) -> StepCoefficients:
    """Return the loss of a whole step, and the coefficients of its log-probs.

    This is the first of the two passes of a loss that depends on groups or on the step. The second
    one hands the coefficients to `policy_loss`, in pieces as they fit the memory, and takes its
    gradient:

        with torch.no_grad():
            log_probs = ...  # of all documents of the step
        loss, coefficients, metrics = step_coefficients(log_probs, ..., loss=of_groups)
        for piece in pieces:
            of_piece = {"coefficients": coefficients[piece], "totals": totals}
            policy_loss(..., loss=of_groups, **of_piece).loss.backward()

    log_probs: (T,) floating, of each token of the step under the policy in training.
    mask: (T,) bool, or 0 and 1, where a token is trained; other positions are not read.

    The other tensors and keywords are those of `policy_loss`. All is computed in float64 on the
    CPU, so that each of several ranks that call it with the same numbers gets the same bits. The
    loss and the metrics include a penalty `kl`; the coefficients do not, since the second pass
    knows it by itself.
    """
    definition = Loss(
        family_of(loss, **parameters),
        aggregation_of(aggregation, divisor, reducer),
        metrics=metrics,
        correction=correction_of(correction),
        kl=kl,
    )
    check_switches(check_finite=check_finite)
    arguments.check_rewards(definition, rewards)
    old_log_probs = arguments.old_or_zeros(
        "log_probs", log_probs, definition, old_log_probs, sampling_log_probs
    )
    vectors = old_log_probs, advantages, document_index, sampling_log_probs, ref_log_probs
    tokens = _tokens_of_log_probs(
        log_probs,
        mask,
        (*vectors, factors),
        num_documents,
        (group_index, None),
        None,
        definition,
        rewards,
    )
    if isinstance(definition.family, FunctionFamily) and torch.is_inference_mode_enabled():
        raise ValueError(
            "step_coefficients takes the gradient of a function, and torch.inference_mode() makes "
            "all gradients 0. Use torch.no_grad()"
        )
    of_step = LossOfStep(log_probs, tokens, definition, check_finite)
    value, measured = of_step.measured()
    device = log_probs.device
    return StepCoefficients(value.to(device), of_step.coefficients().to(device), measured)


def _tokens_of_log_probs(
    log_probs: Tensor,
    mask: Array,
    vectors: tuple[Array | None, ...],
    num_documents: int | None,
    indices: tuple[Array | None, Array | None],
    totals: StepTotals | None,
    loss: Loss,
    rewards: Array | None,
    coefficients: Array | None = None,
) -> Tokens:
    """Return the tokens of log-probs that the caller has computed.

    vectors: those of `arguments.VECTORS` after the labels, up to the factors.
    """
    if loss.metrics == "with_entropy":
        raise ValueError("metrics='with_entropy' needs logits; use 'basic' with log-probs")
    arguments.tensor_of_rank("log_probs", log_probs)
    if isinstance(mask, Tensor):
        arguments.tensor_of_rank("mask", mask)
    if log_probs.dim() != 1 or not log_probs.is_floating_point():
        use = ". Use log_probs.float()" if log_probs.dim() == 1 else ""
        raise ValueError(
            f"log_probs needs one floating number per token (got {shown(log_probs)}){use}"
        )
    arguments.check_sampling(loss, vectors[3], coefficients)
    arguments.check_reference(loss, vectors[4], coefficients)
    labels = mask_of_tokens(mask, log_probs).long() - 1
    vectors = labels, *vectors, coefficients
    return arguments.tokens_of(
        "log_probs", log_probs, vectors, num_documents, indices, totals, rewards=rewards
    )
