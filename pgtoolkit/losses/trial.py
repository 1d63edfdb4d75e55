"""Tries losses of the user's own on made-up documents and on those of a step: whole, and in parts.

The result must not depend on how the step was cut.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals, Tokens
from pgtoolkit.losses.aggregation import Custom
from pgtoolkit.losses.documents import DocumentSums, counted_by_sign
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.losses.family import Family, clamped, over_scope, scope_mean
from pgtoolkit.losses.function import KNOWN_BEFORE, OF_DATA, FunctionFamily
from pgtoolkit.losses.function_values import check_results, evaluate, tried, without_gradient
from pgtoolkit.losses.make_objective import make_objective
from pgtoolkit.losses.objective import Loss
from pgtoolkit.losses.views import DocumentView, GroupView, StepView

_LENGTHS = (5, 1, 7, 3, 6, 4, 2, 8)
_GROUPS = (0, 1, 0, 1, 1, 0, 2, 2)
_SPREADS = (2e-4, 0.05, 0.6, 3.0)
"""Distances of the new log-probs from the old ones: within and outside of all usual clips."""

_MOST_LIKELY = -1e-6
"""The largest log-prob that noise makes, a little below 0."""

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


def has_own_code(loss: Loss) -> bool:
    """Return whether the loss has a function, a family or a reducer of the user's own."""
    return type(loss.family) not in FAMILIES.values() or isinstance(loss.aggregation, Custom)


def check_function(family: FunctionFamily) -> None:
    """Raise ValueError for a function whose numbers of a token depend on the cut of the step, for
    one that gives other numbers when it is called again, and for one without a gradient.

    It is called with made-up documents in float64, near to and far from their old log-probs, and
    with parts of them, divided between tokens or between documents by its level. A dependence that
    shows only for other numbers is not noticed: `check_on_step` tries those of a run.
    """
    has_gradient = False
    for seed, spread in enumerate(_SPREADS):
        generator = torch.Generator().manual_seed(seed)
        vectors = _vectors(generator, spread)
        made_up = _Numbers(vectors, _documents(), torch.tensor(_GROUPS))
        numbers = _of_function(family, made_up)
        log_ratio = vectors["log_probs"] - vectors["old_log_probs"]
        check_results(family.name, numbers["loss"], numbers["gradient"], log_ratio)
        for name, values in numbers.items():
            if not torch.isfinite(values).all():
                raise ValueError(
                    f"the {name} of the loss function {family.name} is not finite where "
                    f"log-ratios are about {spread:g}"
                )
        for name, values in _of_function(family, made_up).items():
            if not _are_equal(values, numbers[name]):
                raise ValueError(
                    f"the loss function {family.name} gives a token another {name} when it is "
                    "called again with the same arguments. It may draw no random numbers, keep no "
                    "state and change no tensor in place"
                )
        has_gradient |= bool((numbers["gradient"] != 0).any())
        _check_family(family, made_up, generator)
    if not has_gradient:
        raise without_gradient(family.name)


def trains_on_advantages_alone(family: Family, spread: float) -> bool:
    """Return whether a family has a gradient on made-up documents, and none once all of their
    advantages are 0.

    spread: the distance of the new log-probs from the old ones, 0 where the policy has sampled.
    """
    vectors = _vectors(torch.Generator().manual_seed(0), spread)
    return _has_gradient(family, vectors) and not _has_gradient(
        family, vectors | {"advantages": torch.zeros_like(vectors["advantages"])}
    )


def _has_gradient(family: Family, vectors: dict[str, Tensor]) -> bool:
    """Return whether a number of the documents of `_vectors` moves with its log-prob."""
    numbers = _Numbers(vectors, _documents(), torch.tensor(_GROUPS))
    if isinstance(family, FunctionFamily):
        return bool((_of_function(family, numbers)["gradient"] != 0).any())
    return bool((_of_class(family, numbers)["slope"] != 0).any())


def check_reducer(aggregation: Custom) -> None:
    """Raise ValueError for a reducer that weighs a token of made-up documents otherwise in a part
    of the step, with the same totals."""
    index = _documents()
    counts = torch.tensor(_LENGTHS)
    groups = torch.tensor(_GROUPS)
    of_groups = torch.zeros(max(_GROUPS) + 1, dtype=torch.int64).index_add(0, groups, counts)
    generator = torch.Generator().manual_seed(0)
    of_documents = _noise(len(counts), generator)
    by_sign = counted_by_sign(groups, of_documents.sign().long(), counts, len(of_groups))
    totals = StepTotals(len(_LENGTHS), len(index), 0, len(of_groups), of_groups, None, *by_sign)
    advantages = of_documents[index]
    _check_reducer(aggregation, index, (groups, None), advantages, totals, generator)


def check_on_step(
    loss: Loss, tokens: Tokens, log_probs: Tensor, totals: StepTotals, seed: int = 0
) -> None:
    """Raise ValueError for code of the user's own whose numbers of a token depend on the cut of
    this step.

    A function, or a class, is called in float64 with the step's own vectors, the new log-probs
    moved by noise, and with parts of them: random halves, and a single token or document with the
    rest. Numbers that are not finite are left to the step itself.

    tokens: of the whole step, all of them trained, document after document. log_probs: (T,).
    """
    generator = torch.Generator().manual_seed(seed)
    log_probs = log_probs.cpu().double()
    objective = make_objective(
        tokens.on_the_host(),
        totals,
        replace(loss, metrics="none", kl=None, correction=None),
        torch.float64,
        Ranks(),
        is_whole_step=True,
    )
    group_index = tokens.group_index
    documents = objective.documents
    if group_index is None:
        group_index = torch.arange(documents.num_documents)
    members = objective.members()
    rows, sums = documents.only(members)
    if not len(rows):
        return
    vectors = {name: values[rows] for name, values in objective.vectors_of_function().items()}
    if type(loss.family) not in FAMILIES.values():
        for spread in _SPREADS:
            moved = log_probs[rows] + spread * _noise(len(rows), generator)
            vectors["log_probs"] = moved.clamp(max=_MOST_LIKELY)
            numbers = _Numbers(vectors, sums.index, group_index[members])
            _check_family(loss.family, numbers, generator)
    if isinstance(loss.aggregation, Custom):
        indices = tokens.group_index, tokens.trajectory_index
        advantages = tokens.advantages
        _check_reducer(loss.aggregation, documents.index, indices, advantages, totals, generator)


def measured_by(family: FunctionFamily) -> tuple[bool, tuple[str, ...]]:
    """Return whether the function gives bounds, and the names of its metrics."""
    like = torch.empty(0, dtype=torch.float64)
    evaluated = tried(family, (*OF_DATA, *KNOWN_BEFORE), like)
    return evaluated.bounds is not None, tuple(sorted(evaluated.metrics))


@dataclass(frozen=True)
class _Numbers:
    """The vectors of T tokens, (T,) float64 by name, the document of each, and the group of each
    document."""

    vectors: dict[str, Tensor]
    document_index: Tensor
    group_index: Tensor

    def of(self, rows: Tensor) -> _Numbers:
        """Return those of some tokens. rows: (T,) bool."""
        present, index = self.document_index[rows].unique(return_inverse=True)
        vectors = {name: vector[rows] for name, vector in self.vectors.items()}
        return _Numbers(vectors, index, self.group_index[present])

    @property
    def documents(self) -> DocumentSums:
        return _sums(self.document_index)


def _sums(document_index: Tensor) -> DocumentSums:
    """Return the sums over documents that all have a token, numbered without a gap."""
    is_trained = torch.ones_like(document_index, dtype=torch.bool)
    return DocumentSums.of_tokens(document_index, is_trained, int(document_index.max()) + 1)


def _check_family(family: Family, numbers: _Numbers, generator: torch.Generator) -> None:
    """Raise ValueError where a token has other numbers in a part of the step than in all of it."""
    if isinstance(family, FunctionFamily):
        if family.level == "step":
            return
        of_part = functools.partial(_of_function, family)
        units = "document" if family.level == "document" else "token"
        subject = f"the loss function {family.name}"
        advice = _WHAT_TO_ASK_FOR[units]
    else:
        of_part = functools.partial(_of_class, family)
        units = "token" if family.scope == "token" else "document"
        subject = f"the loss family {family.name}"
        advice = f"other {units}s, and may depend on numbers of this {units} alone"
    index = numbers.document_index
    number_of = index if units == "document" else torch.arange(len(index))
    of_step = of_part(numbers)
    for part in _parts(number_of, generator):
        for name, values in of_part(numbers.of(part)).items():
            if not _are_equal(values, of_step[name][part]):
                raise ValueError(
                    f"{subject} gives a token another {name} where the step is cut: it depends on "
                    f"{advice}"
                )


def _check_reducer(
    aggregation: Custom,
    document_index: Tensor,
    indices: tuple[Tensor | None, Tensor | None],
    advantages: Tensor,
    totals: StepTotals,
    generator: torch.Generator,
) -> None:
    """Raise ValueError where a reducer weighs a token otherwise in a part of the step.

    indices: group_index and trajectory_index, (documents,) each. advantages: (T,).
    """

    def weights(part: Tensor) -> Tensor:
        present, index = document_index[part].unique(return_inverse=True)
        groups, trajectories = (
            None if numbers is None else numbers[present] for numbers in indices
        )
        mask = torch.ones_like(index, dtype=torch.bool)
        return aggregation.weights(
            totals, _sums(index), mask, groups, trajectories, advantages[part]
        )

    of_step = weights(torch.ones_like(document_index, dtype=torch.bool))
    for part in _parts(document_index, generator):
        if not _are_equal(weights(part), of_step[part]):
            raise ValueError(
                "the reducer gives a token another weight where the step is cut: it depends on "
                "other documents. Numbers of the whole step are those of `totals`"
            )


def _parts(number_of: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Return the parts of two random cuts, (T,) bool each: halves, and a single unit with the rest.

    number_of: (T,) int64, the unit of each token, a token or a document.
    """
    numbers = number_of.unique()
    single = numbers[torch.randint(len(numbers), (1,), generator=generator)]
    halves = (torch.rand(int(numbers.max()) + 1, generator=generator) < 0.5)[number_of]
    parts = (halves, ~halves, number_of == single, number_of != single)
    return [part for part in parts if part.any() and not part.all()]


def _are_equal(values: Tensor, expected: Tensor) -> bool:
    """Return whether numbers of a token are the same but for rounding."""
    return torch.allclose(values, expected, rtol=1e-8, atol=1e-8, equal_nan=True)


def _of_function(family: FunctionFamily, numbers: _Numbers) -> dict[str, Tensor]:
    """Return what the function computes for each token, by name, (T,) each."""
    vectors = dict(numbers.vectors)
    log_probs = vectors.pop("log_probs")
    groups, group_index = numbers.group_index.unique(return_inverse=True)
    evaluated = evaluate(
        family,
        log_probs,
        torch.ones_like(log_probs),
        vectors,
        DocumentView(numbers.documents),
        GroupView(group_index, len(groups)),
        StepView(len(log_probs), len(numbers.group_index), len(groups)),
    )
    named = {"loss": evaluated.losses, "gradient": evaluated.coefficients}
    return named | {f"metric {name}": values for name, values in evaluated.metrics.items()}


def _of_class(family: Family, numbers: _Numbers) -> dict[str, Tensor]:
    """Return what the methods of a family give each token, by name, (T,) each."""
    documents = numbers.documents
    log_probs = numbers.vectors["log_probs"]
    advantages = scope_mean(family.scope, numbers.vectors["advantages"], documents)
    x, derivative = family.token(log_probs - numbers.vectors["old_log_probs"], advantages)
    log_ratio = clamped(over_scope(family.scope, x, documents))
    losses, slope = family.surrogate(log_ratio, advantages, log_probs)
    named = {"term": x, "loss": losses, "slope": slope}
    if derivative is not None:
        named["derivative"] = derivative
    return named


def _noise(size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator, dtype=torch.float64)


def _documents() -> Tensor:
    """Return (T,) int64, the document of each token."""
    return torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))


def _vectors(generator: torch.Generator, spread: float) -> dict[str, Tensor]:
    """Return all vectors that a function may ask for, (T,) float64."""
    index = _documents()
    noise = functools.partial(_noise, generator=generator)

    def moved(log_probs: Tensor, by: float) -> Tensor:
        return (log_probs + by * noise(len(index))).clamp(max=_MOST_LIKELY)

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
    }
