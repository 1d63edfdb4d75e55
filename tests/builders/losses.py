"""Made-up steps of documents for the tests of losses and kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from pgtoolkit import corrections, policy_loss
from pgtoolkit.batch import StepTotals, Tokens
from pgtoolkit.kernels import torch_passes, triton_passes
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.families import family_of
from pgtoolkit.losses.objective import Loss, Objective, make_objective

IMPLEMENTATIONS = {"torch": torch_passes, "triton": triton_passes}
# What rounding the gradient to the dtype costs; the arithmetic is float32 throughout.
GRADIENT_ERROR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEMPERATURE = 0.7
LOSSES = ("grpo", "gspo", "cispo")
"""Those that every test of a kernel takes; the others are in tests/kernels/test_triton_families.py."""
EVERY_LOSS = (*LOSSES, "sapo", "gmpo", "dppo", "vespo", "kimi", "reinforce")
SMOOTH = ("grpo", "gspo")
"""Those of them whose gradient is the derivative of the loss, without a stop-gradient."""
CLIPPED = ("grpo", "gspo", "cispo", "gmpo", "dppo")
"""Those with bounds beyond which a token counts as clipped."""
AGGREGATIONS = ("sample_mean", "prompt_mean", "token_mean", "constant")
PAIRS = (
    *((loss, "sample_mean") for loss in LOSSES),
    *(("gspo", "prompt_mean"), ("gspo", "token_mean"), ("grpo", "constant")),
)
"""Every family and every aggregation, but not each with each: an aggregation is no more than a weight."""
LEVELS = ("none", "basic", "with_entropy")
OBJECTIVES = (
    *(("grpo", "sample_mean", "basic"), ("grpo", "constant", "none")),
    *(("gspo", "sample_mean", "none"), ("gspo", "prompt_mean", "with_entropy"), ("gspo", "token_mean", "basic")),
    *(("cispo", "sample_mean", "with_entropy"), ("sapo", "token_mean", "none"), ("gmpo", "token_mean", "basic")),
    *(("dppo", "constant", "basic"), ("vespo", "prompt_mean", "basic"), ("kimi", "sample_mean", "basic")),
    ("reinforce", "token_mean", "none"),
)
"""Every family, each pair at one level of the metrics. Each with each is for the comparison with the reference."""
PARAMETERS = {
    "grpo": {"epsilon_low": 0.2, "epsilon_high": 0.25},
    "gspo": {"epsilon_low": 0.02, "epsilon_high": 0.03},
    "cispo": {"epsilon_low": 0.15, "epsilon_high": 0.2},
    "sapo": {"temperature_positive": 1.5, "temperature_negative": 2.0},
    "gmpo": {"epsilon_low": 0.1, "epsilon_high": 0.12},
    "dppo": {"delta_low": 0.01, "delta_high": 0.008, "ratio_cap": 1.1},
    "vespo": {"power_positive": 2.0, "decay_positive": 3.0, "power_negative": 3.0, "decay_negative": 2.0},
    "kimi": {"tau": 0.1},
    "reinforce": {},
}


CORRECTIONS = {
    "token truncated": corrections.TokenTruncate(low=0.8, high=1.2),
    "token masked": corrections.TokenMask(low=0.75, high=1.3),
    "product truncated": corrections.SequenceTruncate(low=0.95, high=1.5),
    "mean truncated": corrections.SequenceTruncate(mean="geometric", low=0.95, high=1.1),
    "product masked, V": corrections.SequenceMask(low=0.9, high=1.6),
    "mean masked, v": corrections.SequenceMask(mean="geometric", low=0.9, high=1.1, factor="token"),
    "mean masked, 1": corrections.SequenceMask(mean="geometric", high=1.1, factor="one"),
    "off policy": corrections.OffPolicyMask(threshold=0.01),
}
"""Each kind, with bounds beyond which some tokens of the cases below lie on each side, and others between."""


@dataclass(frozen=True)
class Case:
    """The positional arguments of policy_loss, with each document's group and the number of documents."""

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
    def sampling_log_probs(self) -> Tensor:
        """(T,) the old ones plus noise of their own, by token and by document."""
        draw = torch.Generator().manual_seed(4)
        noise = 0.2 * torch.randn(len(self.labels), generator=draw, dtype=torch.float64)
        drift = 0.05 * torch.randn(self.num_documents, generator=draw, dtype=torch.float64)
        return (self.old_log_probs + noise + drift[self.document_index]).clamp(max=0)


def options_of(case: Case, loss: str, aggregation: str, **more) -> dict:
    """The keywords of policy_loss and of its reference for the case as a step. more: further ones."""
    return {
        "loss": loss,
        "aggregation": aggregation,
        "divisor": 8.0 if aggregation == "constant" else None,
        "group_index": case.group_index,
        **PARAMETERS[loss],
        **more,
    }


def corrected(correction: corrections.Correction | None, sampling_log_probs: Tensor) -> dict:
    """The keywords of the reference for a correction, or for none, with sampling log-probs."""
    kind = {} if correction is None else {"correction": correction.name, "correction_settings": vars(correction)}
    return {"sampling_log_probs": sampling_log_probs, **kind}


def make_case(seed: int = 0, vocabulary: int = 13, lengths=(7, 1, 5, 12, 3, 4), temperature: float = 1.0) -> Case:
    """Documents of the given lengths in three uneven, interleaved groups.

    The first token of a document of more than two is masked, the last document wholly so. Old log-probs are the new
    ones plus noise, so that some tokens clip on each side and most do not. Advantages are constant in a document.
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
    """A step as hidden states and the head whose logits are the case's. dtype: in which it is computed."""

    case: Case
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    dtype: torch.dtype

    @property
    def logits(self) -> Tensor:
        return linear(self.hidden, self.weight, self.bias)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The last four of the case's as a call takes them: on the device, vectors in float32 for a narrower dtype."""
        precise = torch.float64 if self.dtype == torch.float64 else torch.float32
        return tuple(x.to(DEVICE, precise if x.is_floating_point() else x.dtype) for x in self.case.tensors[1:])

    def leaves(self) -> list[Tensor]:
        """Hidden states, weight and bias on the device, which want gradients."""
        return [x.clone().to(DEVICE, self.dtype).requires_grad_() for x in (self.hidden, self.weight, self.bias)]

    def expected(self, factor: float = 1.0, **options) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """(loss, gradients of factor times it by hidden, weight, bias, metrics) in float64 from all logits at once."""
        leaves = [x.clone().requires_grad_() for x in (self.hidden, self.weight, self.bias)]
        out = policy_loss(linear(*leaves), *self.case.tensors[1:], temperature=TEMPERATURE, impl="torch", **options)
        (factor * out.loss).backward()
        return out.loss.detach(), [x.grad for x in leaves], out.metrics


def make_head_case(
    seed=6, lengths=(7, 1, 5, 12, 3, 4), vocabulary=12, dtype=torch.float64, hidden_size=None
) -> HeadCase:
    """As `make_case`, with a document of zero advantage and advantages that differ within the others.

    With the seed given, clips act on both sides, and the two longest documents keep a gradient in both families.
    All numbers are exact in dtype, and float64. With fewer hidden units than tokens of the vocabulary (None: three
    more) the logits are others, and so are the old log-probs, by as much.
    """
    case = make_case(seed, vocabulary, lengths, TEMPERATURE)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def log_probs(logits):
        return (logits / TEMPERATURE).log_softmax(-1).gather(-1, case.labels.clamp(min=0)[:, None])[:, 0]

    weight, bias = random(vocabulary, hidden_size or vocabulary + 3), 0.1 * random(vocabulary)
    hidden = (case.logits - bias) @ torch.linalg.pinv(weight).T
    advantages = torch.where(case.document_index == 2, 0.0, case.advantages + 0.2 * random(len(case.labels)))
    hidden, weight, bias, advantages = (x.to(dtype).double() for x in (hidden, weight, bias, advantages))
    logits = linear(hidden, weight, bias)
    old = (case.old_log_probs + log_probs(logits) - log_probs(case.logits)).to(dtype).double()
    case = Case(logits, case.labels, old, advantages, case.document_index, case.group_index, case.num_documents)
    return HeadCase(case, hidden, weight, bias, dtype)


def totals_of(case: Case) -> StepTotals:
    """Counted here by loops, so that no test leans on the code under test."""
    counts = [int((case.labels[case.document_index == d] >= 0).sum()) for d in range(case.num_documents)]
    groups = case.group_index.tolist()
    per_group = [sum(n for n, g in zip(counts, groups, strict=True) if g == group) for group in range(max(groups) + 1)]
    return StepTotals(case.num_documents, sum(counts), counts.count(0), len(per_group), torch.tensor(per_group))


def objective_of(
    tensors,
    loss: str,
    aggregation=("sample_mean",),
    num_documents=None,
    group_index=None,
    ranks=None,
    dtype=torch.float64,
    **parameters,
) -> Objective:
    """The objective of a piece that is a whole step; tensors: the last four of `Case.tensors`."""
    labels, old_log_probs, advantages, document_index = tensors
    tokens = Tokens(
        labels=labels,
        old_log_probs=old_log_probs,
        advantages=advantages,
        document_index=document_index,
        num_documents=int(document_index.max()) + 1 if num_documents is None else num_documents,
        group_index=group_index,
    )
    what = Loss(family_of(loss, **PARAMETERS[loss] | parameters), aggregation_of(*aggregation))
    return make_objective(tokens, None, what, dtype, ranks or Ranks())


def numbers(metrics: dict) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def relative_error(found, expected) -> float:
    """The norm of the difference over that of what is expected, in float64."""
    expected = torch.as_tensor(expected).double().cpu()
    error = (torch.as_tensor(found).double().cpu() - expected).norm()
    return float(error / expected.norm().clamp(min=1e-30))
