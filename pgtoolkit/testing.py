"""Compares a loss of the user's with the float64 reference, in one line of a test."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from pgtoolkit.api import step_coefficients
from pgtoolkit.batch import StepTotals
from pgtoolkit.losses import reference
from pgtoolkit.losses.aggregation import AggregationName, aggregation_of
from pgtoolkit.losses.checks import check_positive, check_switches, shown
from pgtoolkit.losses.corrections import Correction, CorrectionName, Factors, correction_of
from pgtoolkit.losses.documents import DocumentSums, counted_by_sign
from pgtoolkit.losses.families import Family, LossName, family_of
from pgtoolkit.losses.function import FunctionFamily, FunctionLoss
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.make_objective import mean_of_factors, sums_of_factors
from pgtoolkit.losses.reference_terms import correction_names
from pgtoolkit.losses.trial import check_function

LENGTHS = (5, 1, 7, 3, 6, 4)
"""Number of tokens of each document of a step, trained or not, before padding."""

GROUPS = (0, 1, 0, 1, 1, 0)
"""The prompt of each document."""

VOCABULARY = 11

_PADDED = frozenset({"logits", "labels", "mask", "totals", "group_index"})
"""What a function that is tried may ask for, and a loss may not."""

SPREADS = (0.0, 2e-4, 0.05, 0.6)
"""Distance between old and new log-probs, step by step.

The steps are on-policy, within the clip of gspo, within that of grpo, and outside of both.
"""


def assert_conforms(
    function: Callable[..., Tensor | tuple],
    loss: LossName | Family | Callable,
    *,
    aggregation: AggregationName,
    divisor: float | None = None,
    correction: CorrectionName | Correction | None = None,
    kl: KL | None = None,
    micro_batches: bool = True,
    tolerance: float = 1e-5,
    **parameters: float | str | None,
) -> None:
    """Raise AssertionError unless the function computes this loss: value, gradient, denominators.

        def test_my_loss():
            pgtoolkit.testing.assert_conforms(my_loss, "grpo", aggregation="token_mean")

    The function returns the loss to minimise, a scalar, or a tuple that begins with it. It is given
    what the names of its parameters ask for, of B documents padded to the length T:

    log_probs: (B, T) float64, of each token under the policy in training.
    logits, labels: (B, T, V) and (B, T) int64, in the place of log_probs: labels[b, t] is the token
        that logits[b, t] predict, and the gradient is compared by the logits.
    old_log_probs, advantages: (B, T) float64; an advantage is the same at all tokens of a document.
    mask: (B, T) bool, True where a token is trained. One document has no trained token.
    totals: the `pgtoolkit.StepTotals` of the step that the documents are a part of.
    group_index: (B,) int64, the prompt of each document.
    divisor: the argument below.
    sampling_log_probs, ref_log_probs: (B, T) float64, where a correction or kl needs them.

    A parameter of another name keeps its default. A `lambda` adapts other names.

    The arguments of this function:

    loss, aggregation, divisor, correction, kl, parameters: as in `pgtoolkit.policy_loss`, without a
        full KL. A loss that is a function, such as "tpo" or one of your own, is compared with the
        result of `pgtoolkit.step_coefficients`, in float64; its whole step is then needed where
        it asks for groups or step, so give micro_batches=False.
    micro_batches: True if the function may be called on pieces of a step, whose gradients are added
        up. With totals, the step's loss must be the sum over its pieces. Without, the function is
        called on two pieces of equally many documents, and the step's loss must be their mean, as
        gradient accumulation computes it.
    tolerance: the largest error of value and gradient, relative to the reference's.

    The error lists all differences: on complete steps that are on-policy, near, and clipped on both
    sides; on their pieces; and with NaN and infinity in all but the logits of every token that is
    not trained. Raises ValueError where the arguments cannot be right.
    """
    if kl is not None and kl.full:
        raise ValueError(
            f"assert_conforms needs a loss of single log-probs, and {kl.kind} is one of whole rows"
        )
    check_switches(micro_batches=micro_batches)
    check_positive("tolerance", tolerance)
    _refuse_swapped(function, loss)
    _refuse_unknown_inputs(family_of(loss, **parameters), kl)
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
        expected = definition.compute(step)
        problem = subject.difference(step, [slice(None)], expected, tolerance)
        if problem:
            also = _other_aggregation(definition, subject, step, expected, tolerance)
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


def _refuse_swapped(function: object, loss: LossName | Family | Callable) -> None:
    """Raise ValueError where the loss stands before the function that is compared with it."""
    asked = {*inspect.signature(loss).parameters} if callable(loss) else set()
    if isinstance(function, str | Family) or asked & _PADDED:
        first, second = (getattr(each, "__name__", shown(each)) for each in (function, loss))
        raise ValueError(
            "assert_conforms needs first the function that is tried, and then the loss that it "
            f"should be (got {first}, {second}). Use assert_conforms({second}, {first}, ...)"
        )


def _refuse_unknown_inputs(family: Family, kl: KL | None) -> None:
    """Raise ValueError for a loss that reads what the made-up steps do not have, and for a function
    whose numbers depend on the cut of a step."""
    if not isinstance(family, FunctionFamily):
        return
    if kl is not None:
        raise ValueError("assert_conforms compares a loss that is a function without kl")
    lacking = sorted(family.asked & {"rewards", "group_rewards", "ref_log_probs"} - family.may_lack)
    if lacking:
        raise ValueError(
            f"assert_conforms has no {', '.join(lacking)}, for which {family.name} asks"
        )
    check_function(family)


@dataclass(frozen=True)
class _Step:
    """A made-up step of B documents, padded to the length T.

    tensors: (B, T), and for logits (B, T, V), by the names that `assert_conforms` lists.
    groups: (B,) int64.
    """

    tensors: dict[str, Tensor]
    groups: Tensor

    @classmethod
    def make(cls, seed: int, spread: float) -> _Step:
        """Draw a step.

        spread: the standard deviation of the old log-probs from the new ones, by token and, half as
            large, by document.
        """
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
        # The first token of a longer document belongs to its prompt.
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

    def totals(self, correction: Correction | None) -> StepTotals:
        """Return the totals of the whole step, which hold for pieces of it, too."""
        trained = self.mask.sum(1)
        groups = int(self.groups.max()) + 1
        per_group = torch.zeros(groups, dtype=torch.int64).index_add(0, self.groups, trained)
        signs = self.tensors["advantages"][:, 0].sign().long().where(trained > 0, 0)
        by_sign = counted_by_sign(self.groups, signs, trained, groups)
        return StepTotals(
            len(trained),
            int(trained.sum()),
            int((trained == 0).sum()),
            groups,
            per_group,
            None,
            *by_sign,
            mean_factor=None if correction is None else self._mean_factor(correction),
        )

    def _mean_factor(self, correction: Correction) -> Tensor | None:
        """Return the mean of the factors, if they are divided by it."""
        if correction.normalize == "none":
            return None
        documents, length = self.mask.shape
        index = torch.arange(documents).repeat_interleave(length)
        mask = self.mask.flatten()
        of_tokens = self.tensors["old_log_probs"] - self.tensors["sampling_log_probs"]
        log_ratio = torch.where(mask, of_tokens.flatten(), 0.0)
        sums = DocumentSums.of_tokens(index, mask, documents)
        factors = Factors.of(correction, log_ratio, log_ratio, sums)
        return mean_of_factors(*sums_of_factors(correction, factors, sums))

    def poisoned(self, filler: float) -> _Step:
        """Return the step with `filler` in the (B, T) numbers of tokens that are not trained."""

        def fill(tensor: Tensor) -> Tensor:
            by_token = tensor.is_floating_point() and tensor.dim() == 2
            return torch.where(self.mask, tensor, filler) if by_token else tensor

        return _Step({name: fill(tensor) for name, tensor in self.tensors.items()}, self.groups)


@dataclass(frozen=True)
class _Expected:
    """The reference's results for a step. gradients: by logits (B, T, V), by log_probs (B, T)."""

    value: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class _Definition:
    """The loss that a function is compared with."""

    family: Family
    aggregation: AggregationName
    divisor: float | None
    correction: Correction | None
    kl: KL | None

    def __str__(self) -> str:
        divisor = "" if self.divisor is None else f", divisor={self.divisor:g}"
        terms = [str(term) for term in (self.correction, self.kl) if term is not None]
        family = str(self.family)
        if isinstance(self.family, FunctionLoss):
            options = "".join(f", {name}={value}" for name, value in self.family.options.items())
            family = f"{self.family.name}{options}"
        return " with ".join([f"{family}, aggregation={self.aggregation}{divisor}", *terms])

    def compute(self, step: _Step) -> _Expected:
        """Return the results of the reference for a complete step."""
        documents, length = step.mask.shape
        index = torch.arange(documents)[:, None].expand(documents, length)
        flat = {name: tensor.flatten(0, 1) for name, tensor in step.tensors.items()}
        if isinstance(self.family, FunctionFamily):
            return self._by_function(step, flat, index.flatten())
        options = {}
        if self.correction is not None:
            options["sampling_log_probs"] = flat["sampling_log_probs"]
        if self.kl is not None:
            options |= {"kl": self.kl.kind, "kl_coefficient": self.kl.coefficient}
            options["ref_log_probs"] = flat["ref_log_probs"]
        result = reference.policy_loss(
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
        by_logits = result.gradient.view_as(step.tensors["logits"])
        by_label = by_logits.gather(-1, step.tensors["labels"][..., None])[..., 0]
        # The derivative of a log-prob by its label's logit is 1 - p.
        by_log_probs = by_label / -step.tensors["log_probs"].expm1()
        return _Expected(result.loss, {"logits": by_logits, "log_probs": by_log_probs})

    def _by_function(
        self, step: _Step, flat: dict[str, Tensor], document_index: Tensor
    ) -> _Expected:
        """Return the results of a loss that is a function, from its coefficients."""
        is_corrected = self.correction is not None
        made = step_coefficients(
            flat["log_probs"],
            flat["old_log_probs"],
            flat["advantages"],
            document_index,
            flat["mask"],
            loss=self.family,
            aggregation=self.aggregation,
            divisor=self.divisor,
            correction=self.correction,
            num_documents=len(step.mask),
            group_index=step.groups,
            sampling_log_probs=flat["sampling_log_probs"] if is_corrected else None,
        )
        by_log_probs = made.coefficients.view_as(step.tensors["log_probs"])
        # The derivative of a log-prob by the logits is the label's indicator less the softmax.
        by_logits = -by_log_probs[..., None] * step.tensors["logits"].softmax(-1)
        by_logits.scatter_add_(-1, step.tensors["labels"][..., None], by_log_probs[..., None])
        return _Expected(float(made.loss), {"logits": by_logits, "log_probs": by_log_probs})


@dataclass(frozen=True)
class _Subject:
    """The function that is compared with the reference.

    names: the parameters that it is given.
    leaf: the one by which its gradient is taken, logits or log_probs.
    """

    function: Callable[..., Tensor | tuple]
    names: frozenset[str]
    leaf: str
    divisor: float | None
    correction: Correction | None

    @classmethod
    def of(cls, function: Callable[..., Tensor | tuple], definition: _Definition) -> _Subject:
        """Read the parameters of the function; raises ValueError for one that is not known."""
        known = {
            "log_probs",
            "old_log_probs",
            "advantages",
            *_PADDED,
        }
        if definition.divisor is not None:
            known.add("divisor")
        if definition.correction is not None:
            known.add("sampling_log_probs")
        if definition.kl is not None:
            known.add("ref_log_probs")
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = [
            parameter
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind in by_name
        ]
        unknown = [
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty and parameter.name not in known
        ]
        if unknown:
            raise ValueError(
                "assert_conforms gives a function what its parameters ask for by name, and does "
                f"not know {', '.join(unknown)}. It knows {', '.join(sorted(known))}. Adapt other "
                "names with a lambda"
            )
        names = known & {parameter.name for parameter in parameters}
        leaves = names & {"log_probs", "logits"}
        if len(leaves) != 1:
            raise ValueError(
                f"assert_conforms needs a function of log_probs or of logits (got {sorted(names)})"
            )
        return cls(
            function, frozenset(names), leaves.pop(), definition.divisor, definition.correction
        )

    def result(self, step: _Step, pieces: list[slice]) -> tuple[float, Tensor]:
        """Return (value, gradient by the leaf) of a step in pieces.

        They are the sums over the pieces, or without totals their means.
        """
        leaf = step.tensors[self.leaf].clone().requires_grad_()
        tensors = step.tensors | {self.leaf: leaf, "group_index": step.groups}
        total = torch.zeros((), dtype=torch.float64)
        for piece in pieces:
            arguments: dict[str, Tensor | StepTotals | float | None] = {
                name: tensors[name][piece] for name in self.names & tensors.keys()
            }
            if "totals" in self.names:
                arguments["totals"] = step.totals(self.correction)
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
        """Return the difference of value or gradient in words; empty if there is none."""
        value, gradient = self.result(step, pieces)
        if not _relative_error(value, expected.value) < tolerance:
            return f"its value is {value:.6g}, not {expected.value:.6g}"
        expected_gradient = expected.gradients[self.leaf]
        norm = expected_gradient.norm().clamp(min=1e-3)
        error = float((gradient - expected_gradient).norm() / norm)
        if error < tolerance:
            return ""
        errors = (gradient - expected_gradient).abs().nan_to_num(nan=math.inf)
        row = int((errors.amax(-1) if self.leaf == "logits" else errors).argmax())
        document, token = divmod(row, expected_gradient.shape[1])
        wrong = f"wrong by {error:.2g} of its norm" if math.isfinite(error) else "not finite"
        return f"its gradient is {wrong}, most at document {document}, token {token}"


def _problems_of_pieces(
    subject: _Subject, step: _Step, expected: _Expected, tolerance: float
) -> Iterator[str]:
    """Yield the differences of a step that comes as micro-batches."""
    count = len(step.groups)
    if "totals" in subject.names:
        for cuts in ((1,), (2, 5), range(1, count)):
            edges = [0, *cuts, count]
            pieces = [slice(start, end) for start, end in pairwise(edges)]
            problem = subject.difference(step, pieces, expected, tolerance)
            if problem:
                yield (
                    f"as the sum over micro-batches of a step {problem}: divide by totals, not "
                    "by the counts of a piece"
                )
                return
        return
    halves = [slice(0, count // 2), slice(count // 2, count)]
    problem = subject.difference(step, halves, expected, tolerance)
    if problem:
        yield (
            f"as the mean of two micro-batches of a step {problem}: take a parameter `totals` and "
            "divide by its numbers of the whole step, or give micro_batches=False if it never "
            "sees a piece of one"
        )


def _other_aggregation(
    definition: _Definition, subject: _Subject, step: _Step, expected: _Expected, tolerance: float
) -> str:
    """Return a sentence on the one aggregation of which the function has the value; empty if there
    is none, or several, or if it is the expected value, as 0 may be under each of them."""
    value, _ = subject.result(step, [slice(None)])
    if _relative_error(value, expected.value) < tolerance:
        return ""
    fitting = [
        name
        for name in ("sample_mean", "prompt_mean", "token_mean")
        if _relative_error(
            value, replace(definition, aggregation=name, divisor=None).compute(step).value
        )
        < tolerance
    ]
    return f". That is the value of aggregation={fitting[0]}" if len(fitting) == 1 else ""


def _relative_error(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-3)


def _described(spread: float) -> str:
    return "on-policy" if spread == 0 else f"with log-ratios of about {spread:g}"
