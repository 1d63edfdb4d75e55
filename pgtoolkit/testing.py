"""Hold a loss of somebody's own against the float64 reference, in one line of their test."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from pgtoolkit.batch import StepTotals
from pgtoolkit.losses import reference
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.checks import shown
from pgtoolkit.losses.corrections import Correction, correction_of
from pgtoolkit.losses.families import Family, family_of
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.reference_terms import correction_names

LENGTHS = (5, 1, 7, 3, 6, 4)
"""Trained and masked tokens of each document of a step, before padding."""

GROUPS = (0, 1, 0, 1, 1, 0)
"""The prompt of each document."""

VOCABULARY = 11

SPREADS = (0.0, 2e-4, 0.05, 0.6)
"""How far the old log-probs of each step lie from the new: on-policy, within the clip of gspo, of
grpo, of neither."""


def assert_conforms(
    function: Callable[..., Tensor | tuple],
    loss: str | Family,
    *,
    aggregation: str,
    divisor: float | None = None,
    correction: str | Correction | None = None,
    kl: KL | None = None,
    micro_batches: bool = True,
    tolerance: float = 1e-5,
    **parameters: float | None,
) -> None:
    """Raise AssertionError unless the function computes this loss: its value, its gradient, and its
    denominators.

    def test_my_loss(): pgtoolkit.testing.assert_conforms(my_loss, "grpo", aggregation="token_mean")

    function: returns the loss to minimise, a scalar, or a tuple that begins with it. Its parameters
        say by name what it takes, of B documents padded to the length T: log_probs, (B, T) float64,
        of each token under the policy in training; or logits, (B, T, V), with labels, (B, T) int64,
        where labels[b, t] is the token that logits[b, t] predict; the gradient is compared by the
        logits; old_log_probs, advantages: (B, T) float64; an advantage is the same at all tokens of
        a document; mask: (B, T) bool, True where a token is trained. One document has no trained
        token; totals: the `pgtoolkit.StepTotals` of the step that the documents are a part of;
        group_index: (B,) int64, the prompt of each document; divisor: as given here;
        sampling_log_probs, ref_log_probs: (B, T) float64, which a correction and kl need. A
        parameter of another name keeps its default. `lambda` adapts what is called otherwise.
    loss, aggregation, divisor, correction, kl, parameters: as in `pgtoolkit.policy_loss`, without a
        full KL.
    micro_batches: whether the function is called on pieces of a step, whose gradients are added up.
        One that takes totals has to give the step's loss as the sum over its pieces. One that does
        not is called on two pieces of equally many documents, and has to give it as their mean,
        which is what gradient accumulation makes of it.
    tolerance: the largest error of value and gradient, relative to the reference's.

    All that differs is said at once: on whole steps that are on-policy, near, and clipped on both
    sides; on their pieces; and with NaN and infinity in all but the logits of every token that is
    not trained. Raises ValueError where the question itself cannot be right.
    """
    if kl is not None and kl.full:
        raise ValueError(
            f"assert_conforms needs a loss of single log-probs, and {kl.kind} is one of whole rows"
        )
    definition = _Definition(
        family=family_of(loss, **parameters),
        aggregation=aggregation,
        divisor=divisor,
        correction=correction_of(correction),
        kl=kl,
    )
    subject = _Subject.of(function, definition)
    problems: list[str] = []
    for seed, spread in enumerate(SPREADS):
        step = _Step.make(seed, spread)
        expected = definition.specified(step)
        problem = subject.difference(step, [slice(None)], expected, tolerance)
        if problem:
            also = _other_aggregation(definition, subject, step, tolerance)
            problems.append(f"on a whole step, {_described(spread)}, {problem}{also}")
            continue
        if micro_batches:
            problems += _problems_of_pieces(subject, step, expected, tolerance)
        for filler in (math.nan, math.inf):
            problem = subject.difference(step.poisoned(filler), [slice(None)], expected, tolerance)
            if problem:
                remedy = "select by mask with torch.where before any exp, and never multiply by it"
                problems.append(f"with {filler} wherever mask is False {problem}: {remedy}")
    if problems:
        name = getattr(function, "__name__", type(function).__name__)
        raise AssertionError(
            "\n  ".join([f"{name} is not {definition}:", *dict.fromkeys(problems)])
        )


@dataclass(frozen=True)
class _Step:
    """A made-up step of B documents, padded to the length T.

    tensors: (B, T), and for logits (B, T, V), by the names that `assert_conforms` lists. groups:
        (B,).
    """

    tensors: dict[str, Tensor]
    groups: Tensor

    @classmethod
    def make(cls, seed: int, spread: float) -> _Step:
        """spread: the deviation of the old log-probs from the new ones, by token and, half as wide,
        by document."""
        generator = torch.Generator().manual_seed(seed)
        documents = len(LENGTHS)
        size = documents, max(LENGTHS)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        logits = noise(*size, VOCABULARY)
        labels = torch.randint(0, VOCABULARY, size, generator=generator)
        new = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        old = (new + spread * noise(*size) + spread / 2 * noise(documents, 1)).clamp(max=-1e-6)
        position = torch.arange(size[1])
        lengths = torch.tensor(LENGTHS)[:, None]
        # a prompt's token is not trained
        mask = (position < lengths) & ((position > 0) | (lengths < 3))
        mask[-1] = False
        tensors = {
            "logits": logits,
            "labels": labels,
            "log_probs": new,
            "mask": mask,
            "old_log_probs": old,
            "advantages": noise(documents, 1).expand(size).clone(),
            "sampling_log_probs": (old + 0.3 * noise(*size)).clamp(max=-1e-6),
            "ref_log_probs": (new + 0.3 * noise(*size)).clamp(max=-1e-6),
        }
        return cls(tensors, torch.tensor(GROUPS))

    @property
    def mask(self) -> Tensor:
        return self.tensors["mask"]

    def totals(self) -> StepTotals:
        """Return the totals of the whole step, which hold for pieces of it, too."""
        trained = self.mask.sum(1)
        groups = int(self.groups.max()) + 1
        per_group = torch.zeros(groups, dtype=torch.int64).index_add(0, self.groups, trained)
        return StepTotals(
            len(trained), int(trained.sum()), int((trained == 0).sum()), groups, per_group
        )

    def poisoned(self, filler: float) -> _Step:
        """Return the step with `filler` as every number (B, T) of a token that is not trained."""

        def fill(tensor: Tensor) -> Tensor:
            by_token = tensor.is_floating_point() and tensor.dim() == 2
            return torch.where(self.mask, tensor, filler) if by_token else tensor

        return _Step({name: fill(tensor) for name, tensor in self.tensors.items()}, self.groups)


@dataclass(frozen=True)
class _Expected:
    """What the reference has for a step. gradients: by logits (B, T, V) and by log_probs (B, T)."""

    value: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class _Definition:
    """The loss that a function is held against."""

    family: Family
    aggregation: str
    divisor: float | None
    correction: Correction | None
    kl: KL | None

    def __str__(self) -> str:
        divisor = "" if self.divisor is None else f", divisor={self.divisor:g}"
        terms = [str(term) for term in (self.correction, self.kl) if term is not None]
        return " with ".join([f"{self.family}, aggregation={self.aggregation}{divisor}", *terms])

    def specified(self, step: _Step) -> _Expected:
        """Return what the loops of the reference have for a whole step."""
        documents, length = step.mask.shape
        index = torch.arange(documents)[:, None].expand(documents, length)
        flat = {name: tensor.flatten(0, 1) for name, tensor in step.tensors.items()}
        options = {}
        if self.correction is not None:
            options["sampling_log_probs"] = flat["sampling_log_probs"]
        if self.kl is not None:
            options |= {"kl": self.kl.kind, "kl_coefficient": self.kl.coefficient}
            options["ref_log_probs"] = flat["ref_log_probs"]
        specified = reference.policy_loss(
            flat["logits"],
            torch.where(flat["mask"], flat["labels"], -1),
            flat["old_log_probs"],
            flat["advantages"],
            index.flatten(),
            **reference.names(self.family, aggregation_of(self.aggregation, self.divisor)),
            **correction_names(self.correction),
            **options,
            group_index=step.groups,
            num_documents=documents,
            metrics="none",
        )
        by_logits = specified.gradient.view_as(step.tensors["logits"])
        by_label = by_logits.gather(-1, step.tensors["labels"][..., None])[..., 0]
        # a label's logit moves its log-prob by 1 - p
        by_log_probs = by_label / -step.tensors["log_probs"].expm1()
        return _Expected(specified.loss, {"logits": by_logits, "log_probs": by_log_probs})


@dataclass(frozen=True)
class _Subject:
    """The function that is held against the reference, and how it is called.

    names: the parameters that it is given. leaf: that by which its gradient is taken, logits or
        log_probs.
    """

    function: Callable[..., Tensor | tuple]
    names: frozenset[str]
    leaf: str
    divisor: float | None

    @classmethod
    def of(cls, function: Callable[..., Tensor | tuple], definition: _Definition) -> _Subject:
        """Read which arguments the function takes; ValueError for one that it needs and nobody
        has."""
        known = {
            "log_probs",
            "logits",
            "labels",
            "old_log_probs",
            "advantages",
            "mask",
            "totals",
            "group_index",
        }
        known |= {"divisor"} if definition.divisor is not None else set()
        known |= {"sampling_log_probs"} if definition.correction is not None else set()
        known |= {"ref_log_probs"} if definition.kl is not None else set()
        parameters = inspect.signature(function).parameters.values()
        named = [x for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
        unknown = [x.name for x in named if x.default is x.empty and x.name not in known]
        if unknown:
            raise ValueError(
                "assert_conforms gives a function what its parameters ask for by name, and does "
                f"not know {', '.join(unknown)}. It knows {', '.join(sorted(known))}. Adapt other "
                "names with a lambda"
            )
        names = known & {x.name for x in named}
        leaves = names & {"log_probs", "logits"}
        if len(leaves) != 1:
            raise ValueError(
                f"assert_conforms needs a function of log_probs or of logits (got {sorted(names)})"
            )
        return cls(function, frozenset(names), leaves.pop(), definition.divisor)

    def result(self, step: _Step, pieces: list[slice]) -> tuple[float, Tensor]:
        """Return (value, gradient by the leaf) of a step in pieces: the pieces' sum, or without
        totals their mean."""
        leaf = step.tensors[self.leaf].clone().requires_grad_()
        tensors = step.tensors | {self.leaf: leaf, "group_index": step.groups}
        total = torch.zeros((), dtype=torch.float64)
        for piece in pieces:
            arguments: dict[str, Tensor | StepTotals | float | None] = {
                name: tensors[name][piece] for name in self.names & tensors.keys()
            }
            if "totals" in self.names:
                arguments["totals"] = step.totals()
            if "divisor" in self.names:
                arguments["divisor"] = self.divisor
            value = self.function(**arguments)
            value = value[0] if isinstance(value, tuple) else value
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise ValueError(
                    f"the function needs to return its loss, a scalar tensor (got {shown(value)})"
                )
            total = total + value.reshape(())
        if "totals" not in self.names:
            total = total / len(pieces)
        gradient = torch.zeros_like(leaf)
        if total.requires_grad:
            (gradient,) = torch.autograd.grad(total, leaf)
        return float(total.detach()), gradient

    def difference(
        self, step: _Step, pieces: list[slice], expected: _Expected, tolerance: float
    ) -> str:
        """Return how value or gradient differ from what is expected; empty where they do not."""
        value, gradient = self.result(step, pieces)
        if not _relative_error(value, expected.value) < tolerance:
            return f"its value is {value:.6g}, not {expected.value:.6g}"
        wanted = expected.gradients[self.leaf]
        error = float((gradient - wanted).norm() / wanted.norm().clamp(min=1e-3))
        if not error < tolerance:
            errors = (gradient - wanted).abs().nan_to_num(nan=math.inf)
            row = int((errors.amax(-1) if self.leaf == "logits" else errors).argmax())
            document, token = divmod(row, wanted.shape[1])
            wrong = f"wrong by {error:.2g} of its norm" if math.isfinite(error) else "not finite"
            return f"its gradient is {wrong}, most at document {document}, token {token}"
        return ""


def _problems_of_pieces(
    subject: _Subject, step: _Step, expected: _Expected, tolerance: float
) -> Iterator[str]:
    """Yield what differs where the step comes as micro-batches."""
    count = len(step.groups)
    if "totals" in subject.names:
        for cuts in ((1,), (2, 5), range(1, count)):
            edges = [0, *cuts, count]
            pieces = [slice(start, end) for start, end in pairwise(edges)]
            if problem := subject.difference(step, pieces, expected, tolerance):
                yield (
                    f"as the sum over micro-batches of a step {problem}: divide by totals, not "
                    "by what a piece holds"
                )
                return
    elif problem := subject.difference(
        step, [slice(0, count // 2), slice(count // 2, count)], expected, tolerance
    ):
        yield (
            f"as the mean of two micro-batches of a step {problem}: take a parameter `totals` and "
            "divide by what it says of the whole step, or give micro_batches=False if it never "
            "sees a piece of one"
        )


def _other_aggregation(
    definition: _Definition, subject: _Subject, step: _Step, tolerance: float
) -> str:
    """Return a sentence on the aggregation whose value the function has instead; empty if it has
    none of them."""
    value, _ = subject.result(step, [slice(None)])
    for name in ("sample_mean", "prompt_mean", "token_mean"):
        other = replace(definition, aggregation=name, divisor=None).specified(step).value
        if name != definition.aggregation and _relative_error(value, other) < tolerance:
            return f". That is the value of aggregation={name}"
    return ""


def _relative_error(value: float, wanted: float) -> float:
    return abs(value - wanted) / max(abs(wanted), 1e-3)


def _described(spread: float) -> str:
    return "on-policy" if spread == 0 else f"with log-ratios of about {spread:g}"
