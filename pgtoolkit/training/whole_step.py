"""Gathers what a loss reads of the whole step, on all ranks: rewards of groups, and for a loss of
groups or of the step, and where only the tokens of the largest entropies count, the first of two
passes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from pgtoolkit.batch import MicroBatch, Step, Tokens
from pgtoolkit.document import trajectories_of
from pgtoolkit.errors import DataError
from pgtoolkit.kernels.losses import LossOfStep
from pgtoolkit.losses.corrections import Correction, Factors
from pgtoolkit.losses.documents import DocumentSums, counted_by_sign
from pgtoolkit.losses.function import FunctionFamily, reads_rewards
from pgtoolkit.losses.make_objective import mean_of_factors, sums_of_factors
from pgtoolkit.losses.objective import Loss
from pgtoolkit.losses.step_documents import by_document, documents_of, tokens_of_step
from pgtoolkit.losses.top_entropy import has_weight, top_entropy
from pgtoolkit.ranks.agreement import gather_objects
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.advantages import Shape

_Value = TypeVar("_Value")
_UNCHANGED = Shape()

_MOST_NAMES = 8
"""Documents that a message names."""


@dataclass(frozen=True)
class FirstPass:
    """The results of the first pass over a step, the same on all ranks.

    of_loss: the loss of the whole step; None where the second pass has it.
    of_choice: metrics of the choice of tokens, 0-dim tensors by name.
    """

    of_loss: LossOfStep | None
    of_choice: dict[str, Tensor]

    def measured(self) -> tuple[float | None, dict[str, float]]:
        """Return (loss or None, metrics by name), without what a penalty or the entropy gives."""
        loss, metrics = (None, {}) if self.of_loss is None else self.of_loss.measured()
        numbers = {name: value.item() for name, value in (metrics | self.of_choice).items()}
        return None if loss is None else loss.item(), numbers


@dataclass(frozen=True)
class WholeStep:
    """The trained tokens of a step, document after document in their order in the step.

    places: of the documents in the step.
    lengths: the trained tokens of each of them.
    log_probs: (T,), the new ones.
    entropy: (T,), or None where it was not asked for.
    """

    places: list[int]
    lengths: list[int]
    tokens: Tokens
    log_probs: Tensor
    entropy: Tensor | None = None


def with_rewards(step: Step, loss: Loss, layout: Layout, shape: Shape = _UNCHANGED) -> Step:
    """Return the step with the rewards of its documents and groups, if the loss asks for them.

    shape: makes rewards what estimators get.

    A group's is the mean over its attempts that have a score, the baseline of advantage=dr_grpo:
    also of those that have weight 0 or no trained token. The reward of the others is NaN. Where a
    document has none, though one should have been made, the step has none.
    """
    if not reads_rewards(loss.family):
        return step
    here = {}
    for micro_batch in step.micro_batches:
        for place, group in zip(micro_batch.step_places, _groups(micro_batch), strict=True):
            document = step.documents[place]
            reward = math.nan if document.is_excluded else shape.reward_of(document)
            here[place] = group, reward, not document.is_excluded
    everywhere = _of_all_ranks(here, layout)
    if any(reward is None for _, reward, _ in everywhere.values()):
        return step
    of_groups: dict[int, dict[tuple[bool, int], float]] = {}
    attempts = trajectories_of(step.documents)
    for place, (group, reward, is_scored) in everywhere.items():
        of_attempts = of_groups.setdefault(group, {})
        if is_scored:
            of_attempts[attempts[place]] = reward
    means = {
        group: math.fsum(rewards.values()) / max(1, len(rewards))
        for group, rewards in of_groups.items()
    }
    micro_batches = []
    for micro_batch in step.micro_batches:
        rewards = [everywhere[place][1] for place in micro_batch.step_places]
        of_group = [means[group] for group in _groups(micro_batch)]
        micro_batches.append(
            replace(
                micro_batch,
                rewards=torch.tensor(rewards, dtype=torch.float64),
                group_rewards=torch.tensor(of_group, dtype=torch.float64),
            )
        )
    return replace(step, micro_batches=micro_batches)


def with_signs(step: Step, loss: Loss, layout: Layout) -> Step:
    """Return the step with totals by the sign of the advantage, if the aggregation asks for them.

    Raises DataError, on every rank, for a document whose tokens have different advantages, and for
    documents that are parts of one attempt.
    """
    if not loss.aggregation.by_sign:
        return step
    here = {}
    for micro_batch in step.micro_batches:
        for place, group in zip(micro_batch.step_places, _groups(micro_batch), strict=True):
            advantages = step.documents[place].advantages
            signs = set(advantages.sign().long().tolist()) or {0}
            is_one = not len(advantages) or bool((advantages == advantages[0]).all())
            here[place] = group, signs.pop() if is_one else None, len(advantages)
    everywhere = _of_all_ranks(here, layout)
    for place, (_, sign, _) in everywhere.items():
        document = step.documents[place]
        problem = None
        if sign is None:
            problem = "one advantage for all tokens of a document (got several"
        elif document.trajectory is not None:
            problem = "attempts of one document each (got a trajectory"
        if problem is not None:
            raise DataError(
                f"aggregation={loss.aggregation.name} needs {problem} in {document.name}). It "
                "counts completions by the sign of their advantage. Use aggregation=prompt_mean, "
                "in Python aggregation_of('prompt_mean')."
            )
    numbers = torch.tensor([everywhere[place] for place in sorted(everywhere)]).view(-1, 3)
    num_groups = step.totals.num_groups
    assert num_groups is not None
    groups, signs, counts = numbers.unbind(1)
    completions, tokens = counted_by_sign(groups, signs, counts, int(num_groups))
    totals = replace(step.totals, completions_by_sign=completions, tokens_by_sign=tokens)
    return replace(step, totals=totals)


def with_mean_factor(step: Step, correction: Correction | None, layout: Layout) -> Step:
    """Return the step with the mean of the correction's factors in its totals, if they are divided
    by it.

    It is made in float64 of the documents in their order, the same on every rank. Raises DataError
    for documents without the log-probs that the factors are made of.
    """
    if correction is None or correction.normalize == "none":
        return step
    here = {}
    for micro_batch in step.micro_batches:
        sums, counts = _of_factors(correction, micro_batch)
        numbers = zip(sums.tolist(), counts.tolist(), strict=True)
        here |= dict(zip(micro_batch.step_places, numbers, strict=True))
    everywhere = _of_all_ranks(here, layout)
    numbers = [everywhere[place] for place in sorted(everywhere)]
    sums = torch.tensor([of_document for of_document, _ in numbers], dtype=torch.float64)
    counts = torch.tensor([count for _, count in numbers], dtype=torch.float64)
    mean = float(mean_of_factors(sums, counts))
    return replace(step, totals=replace(step.totals, mean_factor=mean))


def _of_factors(correction: Correction, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return `sums_of_factors` of the documents of a micro-batch."""
    mask = micro_batch.labels >= 0
    old = micro_batch.old_log_probs
    sampling = micro_batch.sampling_log_probs
    if not micro_batch.num_documents:
        return torch.zeros(0), torch.zeros(0)
    if old is None or sampling is None:
        raise DataError(
            f"correction={correction.name} needs old_log_probs and sampling_log_probs of every "
            f"document (got some without, of {', '.join(micro_batch.names[:_MOST_NAMES])}). Its "
            "factors are made of both. Use documents with both, or correction=None."
        )
    log_ratio = torch.where(mask, old.double() - sampling.double(), 0.0)
    documents = DocumentSums.of_tokens(
        micro_batch.document_index, mask, micro_batch.num_documents, None
    )
    factors = Factors.of(correction, log_ratio, torch.zeros_like(log_ratio), documents)
    return sums_of_factors(correction, factors, documents)


def needs_first_pass(loss: Loss) -> bool:
    """Return True if a step's loss depends on all of its log-probs, or of its entropies."""
    return of_whole_step(loss) or loss.entropy_top_fraction is not None


def of_whole_step(loss: Loss) -> bool:
    """Return True if a document's loss depends on other documents of the step."""
    return isinstance(loss.family, FunctionFamily) and loss.family.level == "step"


def after_first_pass(
    step: Step,
    loss: Loss,
    passes: Sequence[tuple[Tensor, Tensor | None]],
    layout: Layout,
) -> tuple[Step, FirstPass]:
    """Return the step for its second pass: with the tokens that are kept, as factors, and the
    coefficients of a loss of the whole step.

    passes: (log-probs, entropies or None) of all tokens of each micro-batch, (T,) each.
    The documents of all ranks are put into their order in the step, and all is computed once on
    them, the same on each rank. Every rank calls this.
    """
    with _one_thread():
        return _from_first_pass(step, loss, passes, layout)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread of the CPU: vectors of a step are so short that handing pieces of them
    to sixteen threads takes longer than their arithmetic."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _from_first_pass(
    step: Step, loss: Loss, passes: Sequence[tuple[Tensor, Tensor | None]], layout: Layout
) -> tuple[Step, FirstPass]:
    log_probs = [of_tokens for of_tokens, _ in passes]
    entropies = [entropy for _, entropy in passes if entropy is not None]
    of_step = whole_step(step, log_probs, layout, entropies or None)
    of_choice = {}
    if loss.entropy_top_fraction is not None:
        step, of_step, of_choice = with_kept_tokens(step, of_step, loss)
    if not of_whole_step(loss):
        return step, FirstPass(None, of_choice)
    # A surrogate alone: penalties and entropy are known to the second pass.
    surrogate = replace(loss, kl=None, entropy_coefficient=0.0)
    if loss.metrics == "with_entropy":
        surrogate = replace(surrogate, metrics="basic")
    of_loss = LossOfStep(of_step.log_probs, of_step.tokens, surrogate, False)
    step = _with_vector(step, "coefficients", of_loss.coefficients(), of_step)
    return step, FirstPass(of_loss, of_choice)


def with_kept_tokens(
    step: Step, of_step: WholeStep, loss: Loss
) -> tuple[Step, WholeStep, dict[str, Tensor]]:
    """Return both with factors, 1 for the tokens of the largest entropies, of which alone the
    surrogate counts, and 0 for the others; and the metrics of that choice.

    of_step: with entropies. Documents of weight 0 are not counted.
    """
    assert of_step.entropy is not None
    assert loss.entropy_top_fraction is not None
    counted = has_weight(of_step.tokens, loss.masks_truncated)[of_step.tokens.document_index]
    factors, threshold = top_entropy(of_step.entropy, counted, loss.entropy_top_fraction)
    kept = factors.double().sum() / counted.sum().clamp(min=1)
    return (
        _with_vector(step, "factors", factors, of_step),
        replace(of_step, tokens=replace(of_step.tokens, factors=factors)),
        {"entropy_kept_fraction": kept, "entropy_threshold": threshold},
    )


def _with_vector(step: Step, name: str, values: Tensor, of_step: WholeStep) -> Step:
    """Return the step whose micro-batches have a vector of this name, 0 where nothing is trained.

    values: (T,), of the trained tokens of the whole step.
    """
    of_documents = dict(zip(of_step.places, values.split(of_step.lengths), strict=True))
    micro_batches = []
    for micro_batch in step.micro_batches:
        of_tokens = values.new_zeros(len(micro_batch.labels))
        vectors = [of_documents[place] for place in micro_batch.step_places]
        of_tokens[micro_batch.labels >= 0] = torch.cat([of_tokens[:0], *vectors])
        micro_batches.append(replace(micro_batch, **{name: of_tokens}))
    return replace(step, micro_batches=micro_batches)


def whole_step(
    step: Step,
    log_probs: Sequence[Tensor],
    layout: Layout,
    entropies: Sequence[Tensor] | None = None,
) -> WholeStep:
    """Return the trained tokens of a step, of all its micro-batches on all ranks.

    log_probs, entropies: of each micro-batch, (T,).
    """
    here = {}
    for micro_batch in step.micro_batches:
        here |= dict(zip(micro_batch.step_places, documents_of(micro_batch), strict=True))
    documents = _of_all_ranks(here, layout)
    # Here the host waits for the forward passes.
    new = list(_of_documents(log_probs, step, layout).values())
    entropy = None
    if entropies is not None:
        entropy = torch.cat([*_of_documents(entropies, step, layout).values()])
    tokens = tokens_of_step([*documents.values()], new)
    return WholeStep(
        [*documents], [len(of_document) for of_document in new], tokens, torch.cat(new), entropy
    )


def _of_documents(vectors: Sequence[Tensor], step: Step, layout: Layout) -> dict[int, Tensor]:
    """Return the numbers of the trained tokens of each document of the step, on the CPU, by its
    place in the step.

    vectors: of each micro-batch of this rank, (T,).
    """
    here = {}
    for micro_batch, vector in zip(step.micro_batches, vectors, strict=True):
        split = by_document(micro_batch, vector.cpu())
        here |= dict(zip(micro_batch.step_places, split, strict=True))
    return _of_all_ranks(here, layout)


def _groups(micro_batch: MicroBatch) -> list[int]:
    """Return the number of each document's group within the step."""
    assert micro_batch.group_index is not None
    return micro_batch.group_index.tolist()


def _of_all_ranks(here: dict[int, _Value], layout: Layout) -> dict[int, _Value]:
    """Return the values of the documents of all data-parallel ranks by their places in the step, in
    this order."""
    everywhere: dict[int, _Value] = {}
    for of_rank in gather_objects(here, layout.world_group):
        for place, value in of_rank.items():
            # Ranks that share a model have the same documents; those of the first are taken.
            everywhere.setdefault(place, value)
    return dict(sorted(everywhere.items()))
