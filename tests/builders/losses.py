"""Steps of random documents for the tests of losses and kernels, and their losses by the reference
(pgtoolkit/losses/reference.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import torch
from torch import Tensor
from torch.nn.functional import linear

from pgtoolkit import corrections, linear_policy_loss, policy_loss, top_entropy
from pgtoolkit.batch import StepTotals, Tokens
from pgtoolkit.kernels import torch_passes, triton_passes
from pgtoolkit.kernels.losses import PolicyLoss
from pgtoolkit.losses import reference, reference_terms
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.corrections import Correction
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.families import Cispo, Dppo, Grpo, Icepop, Reinforce, family_of
from pgtoolkit.losses.family import Family
from pgtoolkit.losses.kl import FULL_KINDS, KINDS, KL
from pgtoolkit.losses.make_objective import make_objective
from pgtoolkit.losses.objective import Loss, Objective
from pgtoolkit.losses.reference_terms import correction_names

IMPLEMENTATIONS = {"torch": torch_passes, "triton": triton_passes}
# The error of rounding the gradient to the dtype; the arithmetic is float32 in all but float64.
GRADIENT_ERROR = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEMPERATURE = 0.7
PARAMETERS = {
    "grpo": {"epsilon_low": 0.2, "epsilon_high": 0.25},
    "gspo": {"epsilon_low": 0.02, "epsilon_high": 0.03},
    "cispo": {"epsilon_low": 0.15, "epsilon_high": 0.2},
    "sapo": {"temperature_positive": 1.5, "temperature_negative": 2.0},
    "gmpo": {"epsilon_low": 0.1, "epsilon_high": 0.12},
    "dppo": {"delta_low": 0.01, "delta_high": 0.008, "ratio_cap": 1.1},
    "icepop": {"low": 0.85, "high": 1.2},
    "vespo": {
        "power_positive": 2.0,
        "decay_positive": 3.0,
        "power_negative": 3.0,
        "decay_negative": 2.0,
    },
    "kimi": {"tau": 0.1},
    "reinforce": {},
}
EVERY_LOSS = tuple(PARAMETERS)
TYPICAL_LOSSES = ("grpo", "gspo", "cispo")
"""A ratio of each token, a ratio of each document, and a weight without gradient.

Tests of what does not depend on the family take these three.
"""
FAMILIES = {name: family_of(name, **parameters) for name, parameters in PARAMETERS.items()} | {
    "grpo, dual clip": Grpo(epsilon_low=0.2, epsilon_high=0.25, dual_clip=1.3),
    "cispo, no lower bound": Cispo(epsilon_low=None, epsilon_high=0.2),
    "dppo, binary KL": Dppo(delta_low=1e-3, delta_high=5e-4, ratio_cap=1.1, divergence="binary_kl"),
    "dppo, square": Dppo(
        delta_low=0.012, delta_high=0.01, ratio_cap=1.1, divergence="squared_log_ratio"
    ),
    "dppo, both sides": Dppo(delta_low=0.01, delta_high=0.008, ratio_cap=1.1, sides="both"),
    "dppo, square, both sides": Dppo(
        delta_low=0.012,
        delta_high=0.01,
        ratio_cap=1.1,
        divergence="squared_log_ratio",
        sides="both",
    ),
}
CENTERED = {
    "reinforce, centered": Reinforce(score_centering=True),
    "cispo, centered": Cispo(epsilon_low=0.15, epsilon_high=0.2, score_centering=True),
    "cispo, centered, no lower bound": Cispo(epsilon_high=0.2, score_centering=True),
    "icepop, centered": Icepop(0.85, 1.2, score_centering=True),
}
"""Every family that has score centering, with it."""
AGGREGATIONS = ("sample_mean", "prompt_mean", "token_mean", "constant")
LEVELS = ("none", "basic", "with_entropy")
PENALTIES = (None, *KINDS, *FULL_KINDS)
OBJECTIVES = (
    ("grpo", "sample_mean", "basic"),
    ("grpo", "constant", "none"),
    ("gspo", "sample_mean", "none"),
    ("gspo", "prompt_mean", "with_entropy"),
    ("gspo", "token_mean", "basic"),
    ("cispo", "sample_mean", "with_entropy"),
    ("sapo", "token_mean", "none"),
    ("gmpo", "token_mean", "basic"),
    ("dppo", "constant", "basic"),
    ("icepop", "token_mean", "basic"),
    ("vespo", "prompt_mean", "basic"),
    ("kimi", "sample_mean", "basic"),
    ("reinforce", "token_mean", "none"),
)
"""Every family, aggregation and level of the metrics, but few of their pairs, for slow tests."""
CORRECTIONS = {
    "token truncated": corrections.TokenTruncate(low=0.8, high=1.2),
    "token masked": corrections.TokenMask(low=0.75, high=1.3),
    "product truncated": corrections.SequenceTruncate(low=0.95, high=1.5),
    "mean truncated": corrections.SequenceTruncate(mean="geometric", low=0.95, high=1.1),
    "product masked, V": corrections.SequenceMask(low=0.9, high=1.6),
    "mean masked, v": corrections.SequenceMask(mean="geometric", low=0.9, high=1.1, factor="token"),
    "mean masked, 1": corrections.SequenceMask(mean="geometric", high=1.1, factor="one"),
    "worst masked, 1": corrections.SequenceMask(mean="worst", low=0.7, high=1.5, factor="one"),
    "worst masked, v": corrections.SequenceMask(mean="worst", high=1.4, factor="token"),
    "token masked by k3": corrections.TokenMask(measure="k3", threshold=0.03),
    "sum of k2": corrections.SequenceMask(measure="k2", threshold=0.12),
    "mean of k3": corrections.SequenceMask(mean="geometric", measure="k3", threshold=0.02),
    "largest k2": corrections.SequenceMask(mean="worst", measure="k2", threshold=0.05),
    "token masked, over its mean": corrections.TokenMask(low=0.75, high=1.3, normalize="step"),
    "product masked, V over its mean": corrections.SequenceMask(
        low=0.9, high=1.6, normalize="step"
    ),
    "off policy": corrections.OffPolicyMask(threshold=0.01),
}
"""Each kind of correction, with bounds so tight that some tokens of the cases below lie beyond each
of them, and others between."""


def covering(*factors: Sequence) -> list[tuple]:
    """Return rows, each with a value of every factor, that contain every pair of values.

    They are about as many as the product of the two longest factors; all combinations would be the
    product of all factors.
    """
    cells = [
        [(axis, number) for number in range(len(factor))] for axis, factor in enumerate(factors)
    ]
    uncovered = {
        pair for first, second in combinations(cells, 2) for pair in product(first, second)
    }

    def newly_covered(cell: tuple[int, int], row: dict[int, int]) -> int:
        """Return the number of uncovered pairs of a cell with those that the row has."""
        return sum(tuple(sorted((cell, chosen))) in uncovered for chosen in row.items())

    rows = []
    while uncovered:
        row = dict(min(uncovered))
        for axis, candidates in enumerate(cells):
            if axis not in row:
                _, row[axis] = max(candidates, key=lambda cell: newly_covered(cell, row))
        uncovered -= {*combinations(sorted(row.items()), 2)}
        rows.append(tuple(factor[row[axis]] for axis, factor in enumerate(factors)))
    return rows


@dataclass(frozen=True)
class Case:
    """The positional arguments of policy_loss, the group of each document, and the number of
    documents."""

    logits: Tensor
    labels: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    document_index: Tensor
    group_index: Tensor
    num_documents: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.logits, self.labels, self.old_log_probs, self.advantages, self.document_index

    @property
    def trajectory_index(self) -> Tensor:
        """(documents,) The trajectory of each document.

        Some trajectories have two documents; the last document, all masked, is alone in its own.
        """
        return torch.tensor([0, 1, 0, 2, 1, 3])[torch.arange(self.num_documents) % 6]

    @property
    def sampling_log_probs(self) -> Tensor:
        """(T,) The old log-probs plus noise of each token and of each document."""
        generator = torch.Generator().manual_seed(4)
        noise = 0.2 * _normal(generator, len(self.labels))
        drift = 0.05 * _normal(generator, self.num_documents)
        return (self.old_log_probs + noise + drift[self.document_index]).clamp(max=0)

    @property
    def sampling_top(self) -> dict[str, Tensor]:
        """The four likeliest tokens of a sampler, (T, 4) each by the keyword of the loss.

        The sampler is the policy plus noise, and gives each label its old log-prob. The last place
        of some positions is not used. At masked tokens the numbers are out of range.
        """
        generator = torch.Generator().manual_seed(5)
        logits = self.logits.nan_to_num() + 0.5 * _normal(generator, *self.logits.shape)
        log_probs = (logits / TEMPERATURE).log_softmax(-1)
        labels = self.labels.clamp(min=0)[:, None]
        # Those of the other tokens add up to what the label's old probability leaves.
        old = self.old_log_probs[:, None].nan_to_num().clamp(max=-1e-3)
        others = log_probs.scatter(-1, labels, -torch.inf).log_softmax(-1) + (-old.expm1()).log()
        log_probs = others.scatter(-1, labels, self.old_log_probs[:, None])
        top, ids = log_probs.topk(4)
        unused = torch.zeros_like(ids, dtype=torch.bool)
        unused[::3, -1] = True
        masked = self.labels[:, None] < 0
        top = torch.where(unused, -torch.inf, torch.where(masked, torch.nan, top))
        ids = torch.where(unused, -1, torch.where(masked, 10**6, ids))
        return {"sampling_top_ids": ids, "sampling_top_log_probs": top}

    @property
    def sampling_kept_ids(self) -> Tensor:
        """(T, 5) The tokens that a sampler near the policy has kept, with the label: five, three,
        the label alone, or at every fifth position all of the vocabulary (-1). At masked tokens the
        numbers are out of range.
        """
        generator = torch.Generator().manual_seed(6)
        scores = self.logits.nan_to_num() + 0.5 * _normal(generator, *self.logits.shape)
        labels = self.labels.clamp(min=0)[:, None]
        ids = scores.scatter(-1, labels, torch.inf).topk(5).indices
        sizes = torch.tensor([5, 3, 1, 5, 0])[torch.arange(len(ids)) % 5]
        ids = torch.where(torch.arange(5) < sizes[:, None], ids, -1)
        return torch.where(self.labels[:, None] < 0, 10**6, ids.flip(-1))

    def over_kept(self) -> Case:
        """Return the case with old log-probs that are over `sampling_kept_ids`, as far from the new
        ones as before."""
        ids = self.sampling_kept_ids
        log_probs = (self.logits.nan_to_num() / TEMPERATURE).log_softmax(-1)
        of_ids = log_probs.gather(-1, ids.clamp(0, self.logits.shape[1] - 1))
        mass = torch.where(ids >= 0, of_ids, -torch.inf).logsumexp(-1)
        mass = torch.where((ids >= 0).any(-1), mass, 0.0)
        return replace(self, old_log_probs=(self.old_log_probs - mass).clamp(max=0))

    @property
    def ref_log_probs(self) -> Tensor:
        """(T,) The old log-probs plus noise; NaN at masked tokens."""
        noise = 0.3 * _normal(torch.Generator().manual_seed(8), len(self.labels))
        log_probs = (self.old_log_probs + noise).clamp(max=0)
        return torch.where(self.labels < 0, torch.nan, log_probs)

    @property
    def ref_logits(self) -> Tensor:
        """(T, V) The logits plus noise; NaN at masked tokens."""
        noise = _normal(torch.Generator().manual_seed(9), *self.logits.shape)
        return torch.where(self.labels[:, None] < 0, torch.nan, self.logits + noise)

    def on_device(self, dtype: torch.dtype) -> list[Tensor]:
        """Return all tensors but the logits, on the device."""
        return [on_device(tensor, dtype) for tensor in self.tensors[1:]]


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Return normal random numbers in float64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def on_device(tensor: Tensor, dtype: torch.dtype, device: str = DEVICE) -> Tensor:
    """Move a tensor to the device; give it the dtype if it is of floating-point numbers."""
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)


@dataclass(frozen=True)
class Choice:
    """The loss of a step, by names in FAMILIES or CENTERED, CORRECTIONS, PENALTIES, AGGREGATIONS
    and LEVELS."""

    family: str
    correction: str | None = None
    kl: str | None = None
    aggregation: str = "sample_mean"
    metrics: str = "with_entropy"
    entropy: float = 0.0
    trajectories: bool = False
    top_fraction: float | None = None
    kept: bool = False

    def __str__(self) -> str:
        return ", ".join(str(value) for value in vars(self).values())

    @property
    def loss(self) -> Family:
        return (FAMILIES | CENTERED)[self.family]

    @property
    def beta(self) -> float | None:
        return 0.3 if self.kl == "full_jsd" else None

    @property
    def divisor(self) -> float | None:
        return 8.0 if self.aggregation == "constant" else None

    def token_vectors(self, case: Case, fused: bool = False) -> dict[str, Tensor]:
        """Return further tensors with a row for each token, by keyword of the loss.

        fused: of `linear_policy_loss`.
        """
        vectors = {}
        if self.top_fraction is not None:
            log_softmax = (case.logits / TEMPERATURE).log_softmax(-1)
            entropy = -(log_softmax.exp() * log_softmax).sum(-1)
            vectors["factors"] = top_entropy(entropy, case.labels >= 0, self.top_fraction).factors
        if self.family in CENTERED:
            vectors |= case.sampling_top
        if self.kept:
            vectors["sampling_kept_ids"] = case.sampling_kept_ids
        if self.correction is not None:
            vectors["sampling_log_probs"] = case.sampling_log_probs
        if self.kl in FULL_KINDS and fused:
            vectors["ref_hidden"] = case.ref_logits - 0.5
        elif self.kl in FULL_KINDS:
            vectors["ref_logits"] = case.ref_logits
        elif self.kl is not None:
            vectors["ref_log_probs"] = case.ref_log_probs
        return vectors

    def document_vectors(self, case: Case) -> dict[str, Tensor]:
        """Return the group, and the trajectory if asked for, of each document, by keyword."""
        vectors = {"group_index": case.group_index}
        if self.trajectories:
            vectors["trajectory_index"] = case.trajectory_index
        return vectors

    def ref_head(self, case: Case, columns: slice = slice(None)) -> dict[str, Tensor]:
        """Return the reference's head: with `ref_hidden` of `token_vectors` it gives these columns
        of the case's ref_logits."""
        if self.kl not in FULL_KINDS:
            return {}
        identity = torch.eye(case.logits.shape[1], dtype=torch.float64)[columns]
        return {
            "ref_lm_head_weight": identity,
            "ref_bias": torch.full((len(identity),), 0.5, dtype=torch.float64),
        }

    def keywords(self) -> dict[str, object]:
        """Return the keywords of `policy_loss` that are the same in every step."""
        keywords: dict[str, object] = {
            "loss": self.loss,
            "aggregation": self.aggregation,
            "divisor": self.divisor,
            "correction": CORRECTIONS.get(self.correction),
            "metrics": self.metrics,
        }
        if self.entropy:
            keywords["entropy_coefficient"] = self.entropy
        if self.kl is not None:
            keywords["kl"] = KL(self.kl, coefficient=0.4, beta=self.beta)
        return keywords

    def step(
        self,
        case: Case,
        dtype: torch.dtype = torch.float64,
        fused: bool = False,
        device: str = "cpu",
    ) -> dict[str, object]:
        """Return the keywords of `policy_loss` (fused: of `linear_policy_loss`) for the case as a
        step, with tensors on the device."""
        vectors = self.token_vectors(case, fused) | self.document_vectors(case)
        if fused:
            vectors |= self.ref_head(case)
        moved = {name: on_device(vector, dtype, device) for name, vector in vectors.items()}
        return self.keywords() | moved | {"num_documents": case.num_documents}

    def by_reference(
        self, case: Case, logits: Tensor | None = None, temperature: float = TEMPERATURE
    ) -> reference.Reference:
        """Return loss, metrics and gradient by the loops of the reference.

        logits: in place of the case's.
        """
        family = self.loss
        aggregation = aggregation_of(self.aggregation, self.divisor)
        penalty = {}
        if self.kl is not None:
            penalty = {"kl": self.kl, "kl_coefficient": 0.4, "kl_beta": self.beta}
        needs_entropy = self.metrics == "basic" and self.entropy
        vectors = self.token_vectors(case)
        vectors.pop("factors", None)  # The reference chooses by itself.
        return reference.policy_loss(
            case.logits if logits is None else logits,
            *case.tensors[1:],
            **reference.names(family, aggregation),
            **correction_names(CORRECTIONS.get(self.correction)),
            **vectors,
            **penalty,
            **self.document_vectors(case),
            num_documents=case.num_documents,
            temperature=temperature,
            metrics="with_entropy" if needs_entropy else self.metrics,
            entropy_coefficient=self.entropy,
            entropy_top_fraction=self.top_fraction,
        )


CHOICES = [
    Choice(*row)
    for row in covering(
        [*FAMILIES],
        [None, *CORRECTIONS],
        PENALTIES,
        AGGREGATIONS,
        LEVELS,
        (0.0, 0.3),
        (False, True),
        (None, 0.3),
    )
]
"""Every pair of a family, a correction, a penalty, an aggregation, a level, an entropy bonus,
trajectories, and a share of tokens that counts."""


@dataclass(frozen=True)
class Result:
    """Loss, metrics and gradients of a step.

    gradients: by logits (T, V), or by hidden states (T, H), weight (V, H) and bias (V,).
    """

    loss: float
    metrics: dict[str, float]
    gradients: list[Tensor]


def result_of(out: PolicyLoss, leaves: list[Tensor], factor: float = 1.0) -> Result:
    """Differentiate `factor` times the loss, and return the loss, its metrics and its gradients.

    The gradients are divided by the factor again.
    """
    (factor * out.loss).backward()
    gradients = [leaf.grad.cpu().double() / factor for leaf in leaves]
    return Result(out.loss.item(), as_floats(out.metrics), gradients)


def assert_results_close(
    result: Result,
    expected: Result,
    tolerance: float,
    gradient_tolerance: float | None = None,
) -> None:
    assert_numbers_close(result.loss, expected.loss, tolerance, "loss")
    assert result.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert_numbers_close(result.metrics[name], value, tolerance, name)
    for gradient, expected_gradient in zip(result.gradients, expected.gradients, strict=True):
        assert_numbers_close(
            gradient, expected_gradient, gradient_tolerance or tolerance, "gradient"
        )


def assert_numbers_close(
    value: float | Tensor, expected: float | Tensor, tolerance: float, name: str = ""
) -> None:
    """Compare by the norm of the difference over that of `expected`; NaN must be at the same
    places."""
    value = torch.as_tensor(value, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert torch.equal(value.isnan(), expected.isnan()), (name, value, expected)
    difference = (value - expected).nan_to_num(posinf=torch.inf).norm()
    error = float(difference / expected.nan_to_num().norm().clamp(min=1e-3))
    assert error < tolerance, (name, error, value, expected)


def make_case(
    seed: int = 0,
    vocabulary: int = 13,
    lengths: Sequence[int] = (7, 1, 5, 12, 3, 4),
    temperature: float = 1.0,
) -> Case:
    """Return documents of these lengths in three uneven, interleaved groups.

    The first token of each document of more than two is masked, and all tokens of the last
    document. Old log-probs are the new ones plus noise: some tokens clip on each side, most do not.
    The tokens of a document have one advantage.
    """
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    count = len(lengths)
    document_index = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths))
    logits = _normal(generator, total, vocabulary)
    labels = torch.randint(0, vocabulary, (total,), generator=generator)
    noise = 0.15 * _normal(generator, total)
    # A drift of each document makes sequence ratios leave GSPO's range on both sides.
    drift = 0.03 * _normal(generator, count)
    old = (_log_probs(logits, labels, temperature) + noise + drift[document_index]).clamp(max=0)
    advantages = _normal(generator, count)[document_index]
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    for start, length in zip(starts.tolist(), lengths, strict=True):
        if length > 2:
            labels[start] = -1
    labels[document_index == count - 1] = -1
    groups = torch.tensor([0, 1, 0, 2, 1, 2])
    group_index = groups[torch.arange(count) % len(groups)]
    return Case(logits, labels, old, advantages, document_index, group_index, count)


def _log_probs(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the log-probs (T,) of the labels; of token 0 at masked tokens."""
    log_probs = (logits / temperature).log_softmax(-1)
    return log_probs.gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)


@dataclass(frozen=True)
class HeadCase:
    """A step as hidden states and a head, whose logits are the case's.

    dtype: of hidden states, weight and bias in a call.
    """

    case: Case
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    dtype: torch.dtype

    @property
    def vector_dtype(self) -> torch.dtype:
        """The dtype of log-probs and advantages."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the case but the logits, as a call takes them."""
        return self.case.on_device(self.vector_dtype)

    def leaves(self) -> list[Tensor]:
        """Return hidden states, weight and bias on the device, which require gradients."""
        return [
            tensor.clone().to(DEVICE, self.dtype).requires_grad_()
            for tensor in (self.hidden, self.weight, self.bias)
        ]

    def by_reference(self, choice: Choice, fused: bool = True) -> Result:
        """Return the step by the reference, with gradients by hidden states, weight and bias if
        fused, else by the logits."""
        result = choice.by_reference(self.case)
        gradients = [result.gradient]
        if fused:
            by_logits = result.gradient
            gradients = [by_logits @ self.weight, by_logits.T @ self.hidden, by_logits.sum(0)]
        return Result(result.loss, result.metrics, gradients)

    def by_fused_head(self, choice: Choice, factor: float = 1.0, **options: object) -> Result:
        """Return the step by `linear_policy_loss`.

        options: more of its keywords.
        """
        leaves = self.leaves()
        hidden, weight, bias = leaves
        keywords = {"temperature": TEMPERATURE, "bias": bias}
        keywords |= choice.step(self.case, self.vector_dtype, fused=True, device=DEVICE)
        keywords |= options
        out = linear_policy_loss(hidden, weight, *self.tensors, **keywords)
        return result_of(out, leaves, factor)

    def by_all_logits(
        self, factor: float = 1.0, **options: object
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """Return (loss, gradients, metrics) in float64, from all logits at once.

        The gradients are those of `factor` times the loss by hidden states, weight and bias.
        """
        leaves = [x.clone().requires_grad_() for x in (self.hidden, self.weight, self.bias)]
        out = policy_loss(
            linear(*leaves),
            *self.case.tensors[1:],
            temperature=TEMPERATURE,
            impl="torch",
            **options,
        )
        (factor * out.loss).backward()
        return out.loss.detach(), [leaf.grad for leaf in leaves], out.metrics


def make_head_case(
    seed: int = 6,
    lengths: Sequence[int] = (7, 1, 5, 12, 3, 4),
    vocabulary: int = 12,
    dtype: torch.dtype = torch.float64,
    hidden_size: int | None = None,
) -> HeadCase:
    """Return a case like that of `make_case` with a head, and with advantages that differ within a
    document; those of the third document are zero.

    With the seeds 6 and 11 clips act on both sides, and with 6 the two longest documents keep a
    gradient under grpo and gspo. All numbers are exact in `dtype`, and stored in float64.
    hidden_size: None: three more than the vocabulary. With fewer than the vocabulary no head gives
    the logits of `make_case`: they change, and the old log-probs by as much.
    """
    case = make_case(seed, vocabulary, lengths, TEMPERATURE)
    generator = torch.Generator().manual_seed(seed)
    weight = _normal(generator, vocabulary, hidden_size or vocabulary + 3)
    bias = 0.1 * _normal(generator, vocabulary)
    hidden = (case.logits - bias) @ torch.linalg.pinv(weight).T
    noise = 0.2 * _normal(generator, len(case.labels))
    advantages = torch.where(case.document_index == 2, 0.0, case.advantages + noise)

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(dtype).double()

    hidden = rounded(hidden)
    weight = rounded(weight)
    bias = rounded(bias)
    logits = linear(hidden, weight, bias)
    before = _log_probs(case.logits, case.labels, TEMPERATURE)
    after = _log_probs(logits, case.labels, TEMPERATURE)
    case = replace(
        case,
        logits=logits,
        old_log_probs=rounded(case.old_log_probs + after - before),
        advantages=rounded(advantages),
    )
    return HeadCase(case, hidden, weight, bias, dtype)


def mean_factor(case: Case, correction: Correction) -> float:
    """Return the mean of the factors of a step by the loops of the reference."""
    vectors = (case.old_log_probs, case.old_log_probs, case.sampling_log_probs, case.advantages)
    settings = vars(correction) | {"normalize": "none"}
    rho = []
    for document in range(case.num_documents):
        trained = (case.labels >= 0) & (case.document_index == document)
        tokens = trained.nonzero().flatten().tolist()
        if not tokens:
            continue
        factors = reference_terms.corrections(
            correction.name, settings, tokens, *(vector.tolist() for vector in vectors)
        )
        of_document = [factors[t][0] for t in tokens]
        rho += of_document[:1] if correction.mean_over_documents else of_document
    return sum(rho) / len(rho)


def count_totals(
    case: Case, trajectories: bool = False, correction: Correction | None = None
) -> StepTotals:
    """Count the totals of a step by loops, without the code that the tests are about.

    correction: one whose factors may be divided by their mean.
    """
    counts = [
        int((case.labels[case.document_index == document] >= 0).sum())
        for document in range(case.num_documents)
    ]

    def tokens_per(index: Tensor) -> Tensor:
        """Return the number of trained tokens of each group, or of each trajectory."""
        sums = [0] * (int(index.max()) + 1)
        for count, number in zip(counts, index.tolist(), strict=True):
            sums[number] += count
        return torch.tensor(sums)

    group_tokens = tokens_per(case.group_index)
    trajectory_tokens = tokens_per(case.trajectory_index) if trajectories else None
    return StepTotals(
        case.num_documents,
        sum(counts),
        counts.count(0),
        len(group_tokens),
        group_tokens,
        trajectory_tokens,
        mean_factor=None
        if correction is None or correction.normalize == "none"
        else mean_factor(case, correction),
    )


def objective_of(
    tensors: Sequence[Tensor],
    loss: str,
    aggregation: tuple = ("sample_mean",),
    num_documents: int | None = None,
    group_index: Tensor | None = None,
    ranks: Ranks | None = None,
    dtype: torch.dtype = torch.float64,
) -> Objective:
    """Return the objective of a step in one piece.

    tensors: labels, old log-probs, advantages and document index. loss: a name in FAMILIES.
    aggregation: the arguments of `aggregation_of`.
    """
    labels, old_log_probs, advantages, document_index = tensors
    tokens = Tokens(
        labels=labels,
        old_log_probs=old_log_probs,
        advantages=advantages,
        document_index=document_index,
        num_documents=int(document_index.max()) + 1 if num_documents is None else num_documents,
        group_index=group_index,
    )
    step_loss = Loss(FAMILIES[loss], aggregation_of(*aggregation))
    return make_objective(tokens, None, step_loss, dtype, ranks or Ranks())


def as_floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def relative_error(value: float | Tensor, expected: float | Tensor) -> float:
    """Return the norm of the difference over the norm of `expected`, in float64."""
    expected = torch.as_tensor(expected).double().cpu()
    difference = (torch.as_tensor(value).double().cpu() - expected).norm()
    return float(difference / expected.norm().clamp(min=1e-30))
