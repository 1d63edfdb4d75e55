"""Tries a loss function of the user's own on made-up documents: whole, and cut in two.

The result must not depend on how the step was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pgtoolkit.losses.documents import DocumentSums
from pgtoolkit.losses.function import KNOWN_BEFORE, OF_DATA, FunctionFamily
from pgtoolkit.losses.function_values import evaluate
from pgtoolkit.losses.views import DocumentView, GroupView, StepView

_LENGTHS = (5, 1, 7, 3, 6, 4, 2, 8)
_GROUPS = (0, 1, 0, 1, 1, 0, 2, 2)
_SPREADS = (2e-4, 0.05, 0.6, 3.0)
"""Distances of the new log-probs from the old ones: within and outside of all usual clips."""

_WHAT_TO_ASK_FOR = {
    "token": (
        "other tokens. Ask for `documents` (documents.sum, documents.mean) for numbers of the "
        "document, or for `step` (step.sum, step.mean, step.quantile) for those of the step"
    ),
    "document": (
        "other documents. Ask for `groups` (groups.sum, groups.mean, groups.softmax) for numbers "
        "of the prompt's completions, or for `step` (step.sum, step.mean) for those of the step"
    ),
}


def check_function(family: FunctionFamily) -> None:
    """Raise ValueError for a function whose numbers of a token depend on the cut of the step.

    It is called with made-up documents in float64, near to and far from their old log-probs, and
    with two parts of them, divided between tokens or between documents by its level. A dependence
    that shows only for other numbers is not noticed.
    """
    for seed, spread in enumerate(_SPREADS):
        generator = torch.Generator().manual_seed(seed)
        vectors = _vectors(generator, spread)
        whole = _evaluate(family, vectors)
        for values in whole.values():
            if not torch.isfinite(values).all():
                raise ValueError(
                    f"the loss function {family.name} returns a number that is not finite where "
                    f"log-ratios are about {spread:g}. `ratio(x)` is exp(x) without an overflow"
                )
        if family.level == "step":
            continue
        size = len(_LENGTHS) if family.level == "document" else len(vectors["log_probs"])
        chosen = torch.rand(size, generator=generator) < 0.5
        is_first = chosen[_documents()] if family.level == "document" else chosen
        for part in (is_first, ~is_first):
            of_part = _evaluate(family, {name: vector[part] for name, vector in vectors.items()})
            for name, values in of_part.items():
                if not torch.allclose(values, whole[name][part], rtol=1e-9, atol=1e-12):
                    raise ValueError(
                        f"the loss function {family.name} gives a token another {name} where the "
                        "step is cut: it depends on "
                        f"{_WHAT_TO_ASK_FOR[family.level]}"
                    )


def measured_by(family: FunctionFamily) -> tuple[bool, tuple[str, ...]]:
    """Return whether the function gives bounds, and the names of its metrics."""
    log_probs = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64)
    sums = DocumentSums.of_tokens(torch.tensor([0, 0, 1]), log_probs < 0, 2)
    evaluated = evaluate(
        family,
        log_probs,
        torch.ones_like(log_probs),
        dict.fromkeys((*OF_DATA, *KNOWN_BEFORE), log_probs),
        DocumentView(sums),
        GroupView(torch.zeros(2, dtype=torch.int64), 1),
        StepView(3, 2, 1),
    )
    return evaluated.bounds is not None, tuple(sorted(evaluated.metrics))


def _evaluate(family: FunctionFamily, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what the function computes for each of these tokens, by name, (T,) each."""
    vectors = dict(vectors)
    log_probs = vectors.pop("log_probs")
    numbers = vectors.pop("documents").long()
    present, index = numbers.unique(return_inverse=True)
    documents = DocumentView(
        DocumentSums.of_tokens(index, torch.ones_like(log_probs, dtype=torch.bool), len(present))
    )
    of_documents = torch.tensor(_GROUPS)[present]
    group_numbers, group_index = of_documents.unique(return_inverse=True)
    evaluated = evaluate(
        family,
        log_probs,
        torch.ones_like(log_probs),
        vectors,
        documents,
        GroupView(group_index, len(group_numbers)),
        StepView(len(log_probs), len(present), len(group_numbers)),
    )
    named = {"loss": evaluated.losses, "gradient": evaluated.coefficients}
    return named | {f"metric {name}": values for name, values in evaluated.metrics.items()}


def _documents() -> Tensor:
    """Return (T,) int64, the document of each token."""
    return torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))


def _vectors(generator: torch.Generator, spread: float) -> dict[str, Tensor]:
    """Return all vectors that a function may ask for, (T,) float64, and the documents."""
    index = _documents()

    def noise(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def moved(log_probs: Tensor, by: float) -> Tensor:
        return (log_probs + by * noise(len(index))).clamp(max=-1e-6)

    old = moved(torch.full((len(index),), -1.5, dtype=torch.float64), 1.0)
    rewards = noise(len(_LENGTHS))
    groups = torch.tensor(_GROUPS)
    of_group = torch.stack([rewards[groups == group].mean() for group in _GROUPS])
    lengths = torch.tensor(_LENGTHS, dtype=torch.float64)
    position = torch.cat([torch.arange(length) for length in _LENGTHS]).double()
    return {
        "log_probs": moved(old, spread),
        "old_log_probs": old,
        "advantages": noise(len(_LENGTHS))[index],
        "sampling_log_probs": moved(old, 0.1),
        "ref_log_probs": moved(old, 0.3),
        "rewards": rewards[index],
        "group_rewards": of_group[index],
        "lengths": lengths[index],
        "position": position,
        "documents": index.double(),
    }
