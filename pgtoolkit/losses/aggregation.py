"""Aggregations: the weight w_t of each token's surrogate in the loss of a step.

The loss is the sum over tokens of w_t l_t. Every weight is a function of the step's totals, so that
the pieces of a step add up to the same loss however it was cut. No torch is imported here, so that
`pgtk check` reads the equations without it; tensors bring their methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pgtoolkit.losses.checks import check_call, check_name, check_positive, shown, use_of_array

if TYPE_CHECKING:
    from torch import Tensor

    from pgtoolkit.batch import StepTotals
    from pgtoolkit.losses.documents import DocumentSums

Reducer = Callable[..., "Tensor"]
"""A custom reducer, which returns w_t, (T,).

It is called as `reducer(totals, mask=, document_index=, tokens_per_document=, group_index=)`, and
with trajectory_index= too where documents are parts of trajectories, which it must count by itself.
It also gets those of `ON_REQUEST` that are names of its parameters.
"""

REDUCER_KEYWORDS = ("mask", "document_index", "tokens_per_document", "group_index")
"""Keywords that a reducer is called with, after the step's totals."""

_BY_SIGN = ("completions_by_sign", "tokens_by_sign")
ON_REQUEST = ("advantages", *_BY_SIGN)
"""What a reducer gets if it has a parameter of this name: (T,), and the totals' (groups, 3)."""

_NEEDS_DIVISOR = "aggregation='constant' needs a finite divisor > 0"


@dataclass(frozen=True)
class Aggregation:
    """The base class of aggregations: w_t is 1 over a denominator of the token's document.

    D and N_d count trajectories; where the data names none, each document is one.
    name: as in `aggregation=`.
    equation, symbols: w_t, and the meaning of its symbols, for `pgtk check`.
    total: the sum of w_t over a step, for `pgtk check`.
    needs_groups: True if group_index is needed.
    equal_within_documents: True if the tokens of a document have the same weight, as with all
        aggregations but a custom reducer.
    """

    name: ClassVar[str]
    equation: ClassVar[str]
    symbols: ClassVar[str]
    total: ClassVar[str] = "1"
    needs_groups = False  # without an annotation, since it is a field of `Custom`
    equal_within_documents: ClassVar[bool] = True

    @property
    def by_sign(self) -> bool:
        """Return True if the totals by the sign of the advantage are needed."""
        return False

    @property
    def of_penalties(self) -> Aggregation:
        """Return the aggregation that weighs the penalties and the entropy bonus."""
        return self

    def weights(
        self,
        totals: StepTotals,
        documents: DocumentSums,
        mask: Tensor,
        group_index: Tensor | None,
        trajectory_index: Tensor | None,
        advantages: Tensor,
    ) -> Tensor:
        """Return w_t, (T,) float64, 0 where mask is False.

        group_index, trajectory_index: (documents,) each with the numbers of the totals, or None.
        advantages: (T,), read only where mask is True.
        """
        counts = documents.counts
        if trajectory_index is not None:
            assert totals.tokens_per_trajectory is not None
            counts = _beside(totals.tokens_per_trajectory, counts)[trajectory_index]
        denominator = documents.broadcast(self.denominators(totals, counts, group_index).double())
        return (1.0 / denominator.where(mask, 1.0)).where(mask, 0.0)

    def denominators(
        self, totals: StepTotals, counts: Tensor, group_index: Tensor | None
    ) -> Tensor:
        """Return (documents,) denominators.

        counts: N_d, (documents,) int64.
        group_index: (documents,) int64, or None.
        """
        raise NotImplementedError

    def weight_sum(self, totals: StepTotals) -> float | None:
        """Return the sum of w_t over a step with a trained token; None for a custom reducer.

        totals: with counts that are int.
        """
        return None


@dataclass(frozen=True)
class SampleMean(Aggregation):
    """The mean over trajectories of their mean over tokens, as in the papers of GRPO and GSPO."""

    name: ClassVar[str] = "sample_mean"
    equation: ClassVar[str] = "1 / (D N_d)"
    symbols: ClassVar[str] = "D documents in the step, N_d trained tokens in the document"

    def denominators(
        self, totals: StepTotals, counts: Tensor, group_index: Tensor | None
    ) -> Tensor:
        return counts * totals.num_trajectories

    def weight_sum(self, totals: StepTotals) -> float:
        return float(1 - totals.num_empty_trajectories / totals.num_trajectories)


@dataclass(frozen=True)
class PromptMean(Aggregation):
    """The mean over prompts of the mean over all tokens of a prompt's completions (arXiv
    2510.13786, section 3.2)."""

    name: ClassVar[str] = "prompt_mean"
    equation: ClassVar[str] = "1 / (G N_g)"
    symbols: ClassVar[str] = "G prompts in the step, N_g trained tokens of the prompt's completions"
    needs_groups: ClassVar[bool] = True

    def denominators(
        self, totals: StepTotals, counts: Tensor, group_index: Tensor | None
    ) -> Tensor:
        assert totals.tokens_per_group is not None
        assert totals.num_groups is not None
        assert group_index is not None
        of_group = _beside(totals.tokens_per_group, group_index)
        return of_group[group_index] * totals.num_groups

    def weight_sum(self, totals: StepTotals) -> float:
        assert totals.tokens_per_group is not None
        assert totals.num_groups is not None
        return float(int((totals.tokens_per_group > 0).sum()) / totals.num_groups)


@dataclass(frozen=True)
class TokenMean(Aggregation):
    """The mean over all tokens of the step (DAPO, arXiv 2503.14476)."""

    name: ClassVar[str] = "token_mean"
    equation: ClassVar[str] = "1 / N"
    symbols: ClassVar[str] = "N trained tokens in the step"

    def denominators(
        self, totals: StepTotals, counts: Tensor, group_index: Tensor | None
    ) -> Tensor:
        return counts * 0 + totals.num_tokens

    def weight_sum(self, totals: StepTotals) -> float:
        return 1.0


@dataclass(frozen=True)
class Constant(Aggregation):
    """The sum over tokens divided by trajectories and a constant L, the divisor (Dr. GRPO,
    2503.20783, eq. 2)."""

    divisor: float

    name: ClassVar[str] = "constant"
    equation: ClassVar[str] = "1 / (D L)"
    symbols: ClassVar[str] = "D documents in the step, L = {divisor}"
    total: ClassVar[str] = "trained tokens of a document on average / {divisor}"

    def __post_init__(self):
        check_positive("divisor", self.divisor, _NEEDS_DIVISOR)

    def denominators(
        self, totals: StepTotals, counts: Tensor, group_index: Tensor | None
    ) -> Tensor:
        return (counts.double() * 0 + self.divisor) * totals.num_trajectories

    def weight_sum(self, totals: StepTotals) -> float:
        return float(totals.num_tokens / (totals.num_trajectories * self.divisor))


@dataclass(frozen=True)
class Balanced(PromptMean):
    """Averages, in each prompt, over the tokens of completions with A > 0 and over those with
    A < 0, and joins both means by their numbers of completions (Balanced Aggregation, arXiv
    2605.04077)."""

    name: ClassVar[str] = "balanced"
    equation: ClassVar[str] = "(G_gs / G_g) / (N_gs G), s the sign of the document's advantage"
    symbols: ClassVar[str] = (
        "G prompts in the step, G_g completions of the prompt, G_gs of this sign, N_gs trained "
        "tokens of these; 0 where A = 0; penalties and the entropy bonus have 1 / (G N_g)"
    )
    total: ClassVar[str] = "the share of a prompt's completions with A != 0, on average"

    @property
    def by_sign(self) -> bool:
        return True

    @property
    def of_penalties(self) -> Aggregation:
        return PromptMean()

    def weights(
        self,
        totals: StepTotals,
        documents: DocumentSums,
        mask: Tensor,
        group_index: Tensor | None,
        trajectory_index: Tensor | None,
        advantages: Tensor,
    ) -> Tensor:
        """Return w_t, NaN in documents whose tokens have different advantages."""
        assert group_index is not None
        assert totals.completions_by_sign is not None
        assert totals.tokens_by_sign is not None
        assert totals.num_groups is not None
        signs, differs = signs_of(documents, advantages, mask)
        place = group_index, signs + 1
        of_group = _beside(totals.completions_by_sign, signs)
        completions = of_group[place].double()
        tokens = _beside(totals.tokens_by_sign, signs)[place].double()
        share = completions / of_group.sum(1)[group_index]
        of_document = share / (tokens.clamp(min=1) * totals.num_groups)
        of_document = of_document.where(signs != 0, 0.0).where(~differs, float("nan"))
        return documents.broadcast(of_document).where(mask, 0.0)

    def weight_sum(self, totals: StepTotals) -> float | None:
        if totals.completions_by_sign is None or totals.tokens_by_sign is None:
            return None
        assert totals.num_groups is not None
        counted = totals.completions_by_sign.where(totals.tokens_by_sign > 0, 0)[:, [0, 2]].sum(1)
        shares = counted.double() / totals.completions_by_sign.sum(1)
        return float(shares.sum() / totals.num_groups)


def signs_of(documents: DocumentSums, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sign of each document's advantage, whether its tokens have different ones).

    Both are (documents,), int64 and bool. The sign is 0 where no token is trained.
    """
    known = advantages.where(mask, 0.0)
    mean = documents.mean(known)
    distance = documents.sum((known - documents.broadcast(mean)).abs()) / documents.counts.clamp(1)
    # A mean of equal numbers may round.
    return mean.nan_to_num(0.0).sign().long(), distance > 1e-4 * mean.abs()


@dataclass(frozen=True)
class Custom(Aggregation):
    """A reducer of the user's own; see `Reducer`.

    needs_groups: True if each step is to hold whole groups, as beside aggregation="prompt_mean".
    """

    reducer: Reducer
    needs_groups: bool = False

    name: ClassVar[str] = "custom"
    equal_within_documents: ClassVar[bool] = False

    @property
    def asked(self) -> list[str]:
        return asked_by(self.reducer)

    @property
    def by_sign(self) -> bool:
        return bool({*_BY_SIGN} & {*self.asked})

    def weights(
        self,
        totals: StepTotals,
        documents: DocumentSums,
        mask: Tensor,
        group_index: Tensor | None,
        trajectory_index: Tensor | None,
        advantages: Tensor,
    ) -> Tensor:
        options = {
            "mask": mask,
            "document_index": documents.index,
            "tokens_per_document": documents.counts,
            "group_index": group_index,
        }
        of_request = {
            "advantages": advantages,
            "completions_by_sign": totals.completions_by_sign,
            "tokens_by_sign": totals.tokens_by_sign,
        }
        options |= {name: of_request[name] for name in self.asked}
        if trajectory_index is not None:
            options["trajectory_index"] = trajectory_index
        check_call("reducer", self.reducer, ("totals",), [*options])
        weights = self.reducer(totals, **options)
        # The command line knows the aggregations without torch.
        from torch import Tensor

        if not isinstance(weights, Tensor) or weights.shape != mask.shape:
            is_tensor = isinstance(weights, Tensor)
            got = shown(weights) if is_tensor else f"a {type(weights).__name__}: {shown(weights)}"
            raise ValueError(
                f"reducer needs to return a tensor with one weight per token, "
                f"{tuple(mask.shape)} (got {got}){use_of_array('weights', weights)}"
            )
        return weights.double().where(mask, 0.0)


def asked_by(reducer: Reducer) -> list[str]:
    """Return the names in ON_REQUEST that a reducer has as parameters."""
    parameters = inspect.signature(reducer).parameters
    return [name for name in ON_REQUEST if name in parameters]


AGGREGATIONS: dict[str, type[Aggregation]] = {
    aggregation.name: aggregation
    for aggregation in (SampleMean, PromptMean, Balanced, TokenMean, Constant)
}
"""Name in `aggregation=` -> aggregation."""

AggregationName = Literal["sample_mean", "prompt_mean", "balanced", "token_mean", "constant"]
"""The names of AGGREGATIONS, for type checkers."""


def aggregation_of(
    mode: str, divisor: float | None = None, reducer: Reducer | None = None
) -> Aggregation:
    """Return the aggregation of this name, or the reducer in its place.

    Raises ValueError for an unknown name, for a divisor of `constant` that is not finite and
    positive, and for a divisor of the others, or a mode beside a reducer, which would have no
    effect. The default mode stands for none there, and "prompt_mean" for whole groups.
    """
    if not isinstance(mode, str):
        name = getattr(mode, "name", None)
        use = f"aggregation={name!r}" if name in AGGREGATIONS else "reducer= for one of your own"
        raise ValueError(f"aggregation needs a name (got {shown(mode)}). Use {use}")
    check_name("aggregation", mode, AGGREGATIONS)
    if reducer is not None and not callable(reducer):
        raise ValueError(f"reducer needs a function or None (got {shown(reducer)})")
    if mode != "constant" and divisor is not None:
        raise ValueError(
            f"divisor={shown(divisor)} has no effect with aggregation={mode!r}; it belongs to "
            "'constant'"
        )
    if reducer is not None:
        return _beside_mode(reducer, mode)
    if mode != "constant":
        return AGGREGATIONS[mode]()
    check_positive("divisor", divisor, _NEEDS_DIVISOR)
    assert divisor is not None
    return Constant(divisor)


def _beside_mode(reducer: Reducer, mode: str) -> Custom:
    """Return the aggregation of a reducer; raises ValueError for a mode that it replaces."""
    if mode not in ("sample_mean", "prompt_mean"):
        raise ValueError(
            f"aggregation={mode!r} has no effect beside reducer=, which returns the weights in its "
            "place. Use reducer= alone, or aggregation='prompt_mean' beside it for whole groups in "
            "each step"
        )
    return Custom(reducer, needs_groups=mode == "prompt_mean")


def _beside(counts: Tensor, other: Tensor) -> Tensor:
    """Return the counts of a step's totals on the other tensor's device, without waiting for it."""
    # The command line knows the aggregations without torch.
    from pgtoolkit.batch import without_waiting

    return without_waiting(counts, other.device)
