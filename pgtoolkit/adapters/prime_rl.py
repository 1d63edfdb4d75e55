"""A custom loss of prime-rl: [trainer.loss] type = "custom", import_path =
"pgtoolkit.adapters.prime_rl.policy_loss".

prime-rl calls it with one document, adds up what it returns over micro-batches and ranks, and
divides by the sum of the weights of the whole step, which is its trained tokens where there are no
weights: the aggregation is token_mean, and a step does not depend on how it was cut.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from pgtoolkit.api import log_prob_loss
from pgtoolkit.batch import StepTotals
from pgtoolkit.losses.aggregation import AggregationName
from pgtoolkit.losses.checks import check_name, check_positive
from pgtoolkit.losses.families import Family, family_of
from pgtoolkit.losses.function import FunctionFamily
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.trial import check_function


class LossInputs(Protocol):
    """prime-rl's numbers of one document, (T,) each.

    inference_logprobs: of the policy that sampled.
    loss_mask: bool.
    ref_logprobs, loss_weights: None where there are none.
    """

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None


class LossOutputs(Protocol):
    """prime-rl's result of a loss."""

    loss: Tensor
    metrics: dict[str, Tensor]


def policy_loss(
    inputs: LossInputs,
    loss: str,
    aggregation: AggregationName = "token_mean",
    kl: str | None = None,
    kl_coefficient: float | None = None,
    kl_reference: str = "sampler",
    **parameters: float | str | None,
) -> LossOutputs:
    """Return prime-rl's LossOutputs of one document: the sum over its trained tokens, and metrics.

    inputs: prime-rl's LossInputs; its inference_logprobs are the old log-probs.
    loss, parameters: a family by name, or the dotted path of a function of your own, at the level
        of tokens or documents, with the values that are to differ from its paper's or its own.
    aggregation: only "token_mean".
    kl, kl_coefficient: a penalty, against "sampler" (inference_logprobs) or "reference"
        (ref_logprobs), as kl_reference says. k2 with twice the kl_tau is prime-rl's own pull
        towards the sampler.

    Raises ValueError for another aggregation, for options of a penalty without kl, and for a loss
    of groups or of the step.
    """
    if aggregation != "token_mean":
        raise ValueError(
            f"aggregation={aggregation} needs totals of the step that prime-rl does not tell a "
            "loss: it divides its sum by the step's weights. Use aggregation=token_mean."
        )
    references = {"sampler": inputs.inference_logprobs, "reference": inputs.ref_logprobs}
    check_name("kl_reference", kl_reference, references)
    penalty = _penalty(kl, kl_coefficient, kl_reference)
    family = _family(loss, *sorted(parameters.items()))
    asked = family.asked if isinstance(family, FunctionFamily) else frozenset()
    reference = None
    if kl is not None:
        reference = references[kl_reference]
    elif "ref_log_probs" in asked:
        reference = inputs.ref_logprobs
    mask = inputs.loss_mask
    weights = inputs.loss_weights
    out = log_prob_loss(
        inputs.trainer_logprobs,
        inputs.inference_logprobs,
        inputs.advantages,
        torch.zeros_like(mask, dtype=torch.int64),
        mask,
        loss=family,
        reducer=lambda totals, **_: (
            torch.ones_like(inputs.advantages) if weights is None else weights
        ),
        num_documents=1,
        totals=StepTotals(num_documents=1, num_tokens=mask.sum(), num_empty_documents=0),
        kl=penalty,
        sampling_log_probs=inputs.inference_logprobs if "sampling_log_probs" in asked else None,
        ref_log_probs=reference,
        metrics="basic",
    )
    metrics = _shown(out.metrics, mask)
    return importlib.import_module("prime_rl.trainer.rl.loss").LossOutputs(out.loss, metrics)


@cache
def _family(loss: str, *parameters: tuple[str, float | str | None]) -> Family:
    """Return the family of a name, or of the function at a dotted path, which is tried.

    parameters: pairs of name and value. Raises ValueError for a loss that prime-rl cannot compute.
    """
    module, _, name = loss.rpartition(".")
    function = getattr(importlib.import_module(module), name) if module else loss
    family = family_of(function, **dict(parameters))
    if not isinstance(family, FunctionFamily):
        return family
    if family.level == "step":
        needs = "each document's prompt" if "groups" in family.asked else "the whole step"
        raise ValueError(
            f"loss={loss} needs {needs}: prime-rl does not tell a loss which prompt a document "
            "belongs to, and calls it with one document at a time. Use a loss of tokens or "
            "documents."
        )
    missing = sorted(family.asked & {"rewards", "group_rewards"} - family.may_lack)
    if missing:
        raise ValueError(
            f"loss={loss} asks for {', '.join(missing)}, which prime-rl does not give a loss. Use "
            "a loss that does not ask for it."
        )
    check_function(family)
    return family


def _shown(metrics: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Return the metrics of a document under the names that prime-rl shows.

    It shows each metric's mean, median and extrema over documents, and exchanges them between ranks
    one name after the other: so each document has all of them. One without a trained token has no
    extrema and no sample size, and gets 0, as in prime-rl's own losses.
    """
    has_tokens = mask.any()
    return {
        f"pgtk/{name}": torch.where(has_tokens, value.float(), 0.0)
        for name, value in metrics.items()
        if not name.startswith("num_")
    }


def _penalty(kl: str | None, kl_coefficient: float | None, kl_reference: str) -> KL | None:
    """Return the penalty that these options of `policy_loss` describe."""
    if kl is None:
        if kl_coefficient is not None or kl_reference != "sampler":
            raise ValueError(
                "kl_coefficient and kl_reference have no effect without kl. Use kl=k3, or leave "
                "them out."
            )
        return None
    check_positive("kl_coefficient", kl_coefficient)
    assert kl_coefficient is not None
    return KL(kl, kl_coefficient)
