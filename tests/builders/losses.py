"""Made-up steps of documents for the tests of losses and kernels, and what their losses are by the
specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import torch
from torch import Tensor
from torch.nn.functional import linear

from pgtoolkit import corrections, linear_policy_loss, policy_loss
from pgtoolkit.batch import StepTotals, Tokens
from pgtoolkit.kernels import torch_passes, triton_passes
from pgtoolkit.kernels.losses import PolicyLoss
from pgtoolkit.losses import reference
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.families import Cispo, Dppo, Grpo, family_of
from pgtoolkit.losses.kl import FULL_KINDS, KINDS, KL
from pgtoolkit.losses.objective import Loss, Objective
from pgtoolkit.losses.piece import make_objective
from pgtoolkit.losses.reference_terms import correction_names

IMPLEMENTATIONS = {"torch": torch_passes, "triton": triton_passes}
# What rounding the gradient to the dtype costs; the arithmetic is float32 throughout.
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
"""By token, by document, and with a weight without gradient: those that tests take which know no
family."""
FAMILIES = {name: family_of(name, **parameters) for name, parameters in PARAMETERS.items()} | {
    "grpo, dual clip": Grpo(epsilon_low=0.2, epsilon_high=0.25, dual_clip=1.3),
    "cispo, no lower bound": Cispo(epsilon_low=None, epsilon_high=0.2),
    "dppo, binary KL": Dppo(delta_low=1e-3, delta_high=5e-4, ratio_cap=1.1, divergence="binary_kl"),
}
AGGREGATIONS = ("sample_mean", "prompt_mean", "token_mean", "constant")
LEVELS = ("none", "basic", "with_entropy")
PENALTIES = (None, *KINDS, *FULL_KINDS)
OBJECTIVES = (
    *(("grpo", "sample_mean", "basic"), ("grpo", "constant", "none")),
    *(
        ("gspo", "sample_mean", "none"),
        ("gspo", "prompt_mean", "with_entropy"),
        ("gspo", "token_mean", "basic"),
    ),
    *(
        ("cispo", "sample_mean", "with_entropy"),
        ("sapo", "token_mean", "none"),
        ("gmpo", "token_mean", "basic"),
    ),
    *(
        ("dppo", "constant", "basic"),
        ("vespo", "prompt_mean", "basic"),
        ("kimi", "sample_mean", "basic"),
    ),
    ("reinforce", "token_mean", "none"),
)
"""Every family, aggregation and level of the metrics, but few pairs: for tests in which each case
takes long."""
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
    "off policy": corrections.OffPolicyMask(threshold=0.01),
}
"""Each kind, with bounds beyond which some tokens of the cases below lie on each side, and others
between."""


def covering(*factors: Sequence) -> list[tuple]:
    """Rows of a value of each factor in which any two values of two factors stand together, the
    longest factors first.

    About as many as the product of the two longest, where all combinations would be the product of
    all.
    """
    places = [[(i, number) for number in range(len(factor))] for i, factor in enumerate(factors)]
    left = {pair for one, other in combinations(places, 2) for pair in product(one, other)}
    rows = []
    while left:
        row = dict(min(left))
        for i, factor in enumerate(places):
            if i not in row:
                held = tuple(row.items())
                row[i] = max(
                    factor, key=lambda x: sum(tuple(sorted((x, y))) in left for y in held)
                )[1]
        left -= {*combinations(sorted(row.items()), 2)}
        rows.append(tuple(factor[row[i]] for i, factor in enumerate(factors)))
    return rows


@dataclass(frozen=True)
class Case:
    """The positional arguments of policy_loss, with each document's group and the number of
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
        """(documents,) the trajectory of each: some have two documents, and the last masked one is
        alone in its own."""
        return torch.tensor([0, 1, 0, 2, 1, 3])[torch.arange(self.num_documents) % 6]

    @property
    def sampling_log_probs(self) -> Tensor:
        """(T,) the old ones plus noise of their own, by token and by document."""
        draw = torch.Generator().manual_seed(4)
        noise = 0.2 * torch.randn(len(self.labels), generator=draw, dtype=torch.float64)
        drift = 0.05 * torch.randn(self.num_documents, generator=draw, dtype=torch.float64)
        return (self.old_log_probs + noise + drift[self.document_index]).clamp(max=0)

    @property
    def ref_log_probs(self) -> Tensor:
        """(T,) about as far from the old ones as these are from the new; NaN where nothing is
        trained."""
        noise = torch.randn(
            len(self.labels), generator=torch.Generator().manual_seed(8), dtype=torch.float64
        )
        return torch.where(
            self.labels < 0, torch.nan, (self.old_log_probs + 0.3 * noise).clamp(max=0)
        )

    @property
    def ref_logits(self) -> Tensor:
        """(T, V) some way from the logits; NaN where nothing is trained."""
        noise = torch.randn(
            self.logits.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
        )
        return torch.where(self.labels[:, None] < 0, torch.nan, self.logits + noise)

    def on_device(self, dtype: torch.dtype) -> list[Tensor]:
        """The last four tensors, on the device."""
        return [on_device(x, dtype) for x in self.tensors[1:]]


def on_device(tensor: Tensor, dtype: torch.dtype, device: str = DEVICE) -> Tensor:
    """dtype: of what is floating."""
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)


@dataclass(frozen=True)
class Choice:
    """What a step's loss is, by names: of FAMILIES, AGGREGATIONS, CORRECTIONS, PENALTIES and
    LEVELS."""

    family: str
    correction: str | None = None
    kl: str | None = None
    aggregation: str = "sample_mean"
    metrics: str = "with_entropy"
    entropy: float = 0.0
    trajectories: bool = False

    def __str__(self) -> str:
        return ", ".join(str(x) for x in vars(self).values())

    @property
    def divisor(self) -> float | None:
        return 8.0 if self.aggregation == "constant" else None

    def vectors(self, case: Case, fused: bool = False) -> dict[str, Tensor]:
        """What the loss needs of each row of a step besides, by its keyword. fused: of
        `linear_policy_loss`."""
        given = {} if self.correction is None else {"sampling_log_probs": case.sampling_log_probs}
        if self.kl in FULL_KINDS:
            return given | (
                {"ref_hidden": case.ref_logits - 0.5} if fused else {"ref_logits": case.ref_logits}
            )
        return given if self.kl is None else given | {"ref_log_probs": case.ref_log_probs}

    def of_documents(self, case: Case) -> dict[str, Tensor]:
        """What the documents belong to, by keywords; trajectories where they are named."""
        given = {"group_index": case.group_index}
        return given | {"trajectory_index": case.trajectory_index} if self.trajectories else given

    def ref_head(self, case: Case, columns: slice = slice(None)) -> dict[str, Tensor]:
        """The head that gives these columns of the case's ref_logits for `ref_hidden` of
        `vectors`."""
        if self.kl not in FULL_KINDS:
            return {}
        identity = torch.eye(case.logits.shape[1], dtype=torch.float64)[columns]
        return {
            "ref_lm_head_weight": identity,
            "ref_bias": torch.full((len(identity),), 0.5, dtype=torch.float64),
        }

    def keywords(self) -> dict:
        """Of `policy_loss`, without what belongs to a step."""
        given = {
            "loss": FAMILIES[self.family],
            "aggregation": self.aggregation,
            "divisor": self.divisor,
        }
        given |= {"correction": CORRECTIONS.get(self.correction), "metrics": self.metrics}
        given |= {"entropy_coefficient": self.entropy} if self.entropy else {}
        return given if self.kl is None else given | {"kl": KL(self.kl, coefficient=0.4)}

    def step(
        self,
        case: Case,
        dtype: torch.dtype = torch.float64,
        fused: bool = False,
        device: str = "cpu",
    ) -> dict:
        """Keywords of `policy_loss` for the case as a step; fused: of `linear_policy_loss`. device:
        of the tensors."""
        vectors = (
            self.vectors(case, fused)
            | self.of_documents(case)
            | (self.ref_head(case) if fused else {})
        )
        on = {name: on_device(x, dtype, device) for name, x in vectors.items()}
        return self.keywords() | on | {"num_documents": case.num_documents}

    def by_reference(
        self, case: Case, logits: Tensor | None = None, temperature=TEMPERATURE
    ) -> reference.Reference:
        """By the loops of the reference. logits: others than the case's."""
        return reference.policy_loss(
            case.logits if logits is None else logits,
            *case.tensors[1:],
            **reference.names(
                FAMILIES[self.family], aggregation_of(self.aggregation, self.divisor)
            ),
            **correction_names(CORRECTIONS.get(self.correction)),
            **self.vectors(case),
            **{} if self.kl is None else {"kl": self.kl, "kl_coefficient": 0.4},
            **self.of_documents(case),
            num_documents=case.num_documents,
            temperature=temperature,
            metrics="with_entropy" if self.metrics == "basic" and self.entropy else self.metrics,
            entropy_coefficient=self.entropy,
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
    )
]
"""Any two of a family, a correction, a penalty, an aggregation, a level, an entropy bonus,
trajectories."""


@dataclass(frozen=True)
class Result:
    """loss, metrics: of a step. gradients: by logits (T, V), or by hidden (T, H), weight and
    bias."""

    loss: float
    metrics: dict[str, float]
    gradients: list[Tensor]


def result_of(out: PolicyLoss, leaves: list[Tensor], factor: float = 1.0) -> Result:
    """Of a call, after the backward pass of `factor` times its loss, and with the gradients of the
    loss itself."""
    (factor * out.loss).backward()
    return Result(
        out.loss.item(), as_floats(out.metrics), [x.grad.cpu().double() / factor for x in leaves]
    )


def assert_results_close(
    found: Result, wanted: Result, tolerance: float, gradient_tolerance: float | None = None
) -> None:
    assert_numbers_close(found.loss, wanted.loss, tolerance, "loss")
    assert found.metrics.keys() == wanted.metrics.keys()
    for name, value in wanted.metrics.items():
        assert_numbers_close(found.metrics[name], value, tolerance, name)
    for one, other in zip(found.gradients, wanted.gradients, strict=True):
        assert_numbers_close(one, other, gradient_tolerance or tolerance, "gradient")


def assert_numbers_close(found, value, tolerance: float, name: str = "") -> None:
    found, value = (torch.as_tensor(x, dtype=torch.float64) for x in (found, value))
    assert torch.equal(found.isnan(), value.isnan()), (name, found, value)
    error = float(
        (found - value).nan_to_num(posinf=torch.inf).norm()
        / value.nan_to_num().norm().clamp(min=1e-3)
    )
    assert error < tolerance, (name, error, found, value)


def make_case(
    seed: int = 0, vocabulary: int = 13, lengths=(7, 1, 5, 12, 3, 4), temperature: float = 1.0
) -> Case:
    """Documents of the given lengths in three uneven, interleaved groups.

    The first token of a document of more than two is masked, the last document wholly so. Old
    log-probs are the new ones plus noise, so that some tokens clip on each side and most do not.
    Advantages are constant in a document.
    """
    generator = torch.Generator().manual_seed(seed)
    total, count = sum(lengths), len(lengths)
    document_index = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths))
    logits = torch.randn(total, vocabulary, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (total,), generator=generator)
    noise = 0.15 * torch.randn(total, generator=generator, dtype=torch.float64)
    new = (logits / temperature).log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    # A document's own drift makes sequence ratios leave the GSPO range on both sides.
    drift = 0.03 * torch.randn(count, generator=generator, dtype=torch.float64)
    advantages = torch.randn(count, generator=generator, dtype=torch.float64)[document_index]
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    for start, length in zip(starts.tolist(), lengths, strict=True):
        if length > 2:
            labels[start] = -1
    labels[document_index == count - 1] = -1
    groups = torch.tensor([0, 1, 0, 2, 1, 2])
    group_index = groups[torch.arange(count) % len(groups)]
    old = (new + noise + drift[document_index]).clamp(max=0)
    return Case(logits, labels, old, advantages, document_index, group_index, count)


@dataclass(frozen=True)
class HeadCase:
    """A step as hidden states and the head whose logits are the case's. dtype: in which it is
    computed."""

    case: Case
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    dtype: torch.dtype

    @property
    def precise(self) -> torch.dtype:
        """Of vectors beside the hidden states."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def tensors(self) -> list[Tensor]:
        """The last four of the case's as a call takes them."""
        return self.case.on_device(self.precise)

    def leaves(self) -> list[Tensor]:
        """Hidden states, weight and bias on the device, which want gradients."""
        return [
            x.clone().to(DEVICE, self.dtype).requires_grad_()
            for x in (self.hidden, self.weight, self.bias)
        ]

    def by_reference(self, choice: Choice, fused: bool = True) -> Result:
        """fused: gradients by hidden states, weight and bias, and not by the logits."""
        found = choice.by_reference(self.case)
        g = found.gradient
        gradients = [g @ self.weight, g.T @ self.hidden, g.sum(0)] if fused else [g]
        return Result(found.loss, found.metrics, gradients)

    def by_fused_head(self, choice: Choice, factor: float = 1.0, **options) -> Result:
        """By `linear_policy_loss`; options: more of its keywords."""
        leaves = hidden, weight, bias = self.leaves()
        given = {"temperature": TEMPERATURE, "bias": bias}
        given |= choice.step(self.case, self.precise, fused=True, device=DEVICE) | options
        return result_of(linear_policy_loss(hidden, weight, *self.tensors, **given), leaves, factor)

    def by_all_logits(
        self, factor: float = 1.0, **options
    ) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """(loss, gradients of factor times it by hidden, weight, bias, metrics) in float64 from all
        logits at once."""
        leaves = [x.clone().requires_grad_() for x in (self.hidden, self.weight, self.bias)]
        out = policy_loss(
            linear(*leaves),
            *self.case.tensors[1:],
            temperature=TEMPERATURE,
            impl="torch",
            **options,
        )
        (factor * out.loss).backward()
        return out.loss.detach(), [x.grad for x in leaves], out.metrics


def make_head_case(
    seed=6, lengths=(7, 1, 5, 12, 3, 4), vocabulary=12, dtype=torch.float64, hidden_size=None
) -> HeadCase:
    """As `make_case`, with a document of zero advantage and advantages that differ within the
    others.

    With the seeds 6 and 11 clips act on both sides, and with 6 the two longest documents keep a
    gradient under grpo and gspo. All numbers are exact in dtype, and float64. With fewer hidden
    units than tokens of the vocabulary (None: three more) the logits are others, and so are the old
    log-probs, by as much.
    """
    case = make_case(seed, vocabulary, lengths, TEMPERATURE)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def log_probs(logits):
        return (
            (logits / TEMPERATURE)
            .log_softmax(-1)
            .gather(-1, case.labels.clamp(min=0)[:, None])[:, 0]
        )

    weight, bias = random(vocabulary, hidden_size or vocabulary + 3), 0.1 * random(vocabulary)
    hidden = (case.logits - bias) @ torch.linalg.pinv(weight).T
    advantages = torch.where(
        case.document_index == 2, 0.0, case.advantages + 0.2 * random(len(case.labels))
    )
    hidden, weight, bias, advantages = (
        x.to(dtype).double() for x in (hidden, weight, bias, advantages)
    )
    logits = linear(hidden, weight, bias)
    old = (case.old_log_probs + log_probs(logits) - log_probs(case.logits)).to(dtype).double()
    case = Case(
        logits,
        case.labels,
        old,
        advantages,
        case.document_index,
        case.group_index,
        case.num_documents,
    )
    return HeadCase(case, hidden, weight, bias, dtype)


def count_totals(case: Case, trajectories: bool = False) -> StepTotals:
    """Counted here by loops, so that no test leans on the code under test."""
    counts = [
        int((case.labels[case.document_index == d] >= 0).sum()) for d in range(case.num_documents)
    ]

    def per(index):
        sums = [0] * (int(index.max()) + 1)
        for count, number in zip(counts, index.tolist(), strict=True):
            sums[number] += count
        return torch.tensor(sums)

    groups, attempts = per(case.group_index), per(case.trajectory_index) if trajectories else None
    return StepTotals(
        case.num_documents, sum(counts), counts.count(0), len(groups), groups, attempts
    )


def objective_of(
    tensors,
    loss,
    aggregation=("sample_mean",),
    num_documents=None,
    group_index=None,
    ranks=None,
    dtype=torch.float64,
) -> Objective:
    """The objective of a piece that is a whole step; tensors: the last four of `Case.tensors`;
    loss: of FAMILIES."""
    labels, old_log_probs, advantages, document_index = tensors
    tokens = Tokens(
        labels=labels,
        old_log_probs=old_log_probs,
        advantages=advantages,
        document_index=document_index,
        num_documents=int(document_index.max()) + 1 if num_documents is None else num_documents,
        group_index=group_index,
    )
    return make_objective(
        tokens, None, Loss(FAMILIES[loss], aggregation_of(*aggregation)), dtype, ranks or Ranks()
    )


def as_floats(metrics: dict) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def relative_error(found, expected) -> float:
    """The norm of the difference over that of what is expected, in float64."""
    expected = torch.as_tensor(expected).double().cpu()
    error = (torch.as_tensor(found).double().cpu() - expected).norm()
    return float(error / expected.norm().clamp(min=1e-30))
