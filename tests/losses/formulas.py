"""The families' formulas as their papers have them, for automatic differentiation, and tokens for
them.

In a formula p are the new log-probs, x the log-ratios new - old, and A the advantages, each (T,).
It returns the loss of each token.
"""

import torch
from torch import Tensor

from pgtoolkit import families, log_prob_loss
from pgtoolkit.losses.families import Family

NEW = torch.tensor([-0.3, -1.1, -0.7, -2.0, -0.05, -1.6, -0.9, -0.4], dtype=torch.float64)
LOG_RATIO = torch.tensor([0.5, -0.6, 0.02, 1.3, -0.03, -1.2, 0.3, -0.2], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, -0.5, 0.0, 0.0], dtype=torch.float64)
DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])


def grpo(p: Tensor, x: Tensor, A: Tensor) -> Tensor:
    r = x.exp()
    losses = -torch.minimum(r * A, r.clamp(0.8, 1.3) * A)
    return torch.where(A < 0, torch.minimum(losses, -2.0 * A), losses)


def sapo(p: Tensor, x: Tensor, A: Tensor) -> Tensor:
    tau = torch.where(A > 0, 1.5, 2.5)
    return -A * torch.sigmoid(tau * (x.exp() - 1)) * 4 / tau


def by_document(values: Tensor) -> Tensor:
    """Return, for each token, the mean over its document."""
    return torch.stack([values[d == DOCUMENTS].mean() for d in range(3)])[DOCUMENTS]


def gmpo(p: Tensor, x: Tensor, A: Tensor) -> Tensor:
    x = torch.where(A > 0, x.clamp(max=0.25), torch.where(A < 0, x.clamp(min=-0.4), x))
    return -A * by_document(x).exp()


def dppo(p: Tensor, x: Tensor, A: Tensor) -> Tensor:
    p_new = p.detach().exp()
    p_old = (p - x).detach().exp()
    kept = torch.where(A > 0, p_new - p_old <= 0.1, torch.where(A < 0, p_new - p_old >= -0.2, True))
    return -A * x.detach().exp().clamp(max=3.0) * p * kept


def dppo_by_kl(p: Tensor, x: Tensor, A: Tensor) -> Tensor:
    new = p.detach().exp()
    old = (p - x).detach().exp()
    kl = old * (old / new).log() + (1 - old) * ((1 - old) / (1 - new)).log()
    left_out = ((kl > 0.03) & (new > old) & (A > 0)) | ((kl > 0.05) & (new < old) & (A < 0))
    return -A * x.detach().exp().clamp(max=1.5) * p * ~left_out


def dppo_on_both_sides(p: Tensor, x: Tensor, A: Tensor) -> Tensor:
    kept = ((p.exp() - (p - x).exp()).abs() <= 0.1).detach()
    return -A * x.detach().exp().clamp(max=1e4) * p * kept


def dppo_by_square(p: Tensor, x: Tensor, A: Tensor) -> Tensor:
    moved = (x**2 / 2).detach()
    left_out = ((moved > 0.1) & (x > 0) & (A > 0)) | ((moved > 0.2) & (x < 0) & (A < 0))
    return -A * x.detach().exp().clamp(max=1.5) * p * ~left_out


def icepop(p: Tensor, x: Tensor, A: Tensor) -> Tensor:
    r = x.detach().exp()
    return -A * r * p * ((r >= 0.5) & (r <= 1.5))


def vespo(p: Tensor, x: Tensor, A: Tensor) -> Tensor:
    W = (by_document(x) * torch.tensor([3.0, 3, 3, 3, 3, 3, 2, 2])).exp().detach()
    positive = W**2 * torch.exp(3 * (1 - W))
    negative = W**1.5 * torch.exp(2 * (1 - W))
    return -torch.where(A >= 0, positive, negative) * A * p


def kimi(p: Tensor, x: Tensor, A: Tensor) -> Tensor:
    return -A * p + 0.7 / 2 * x**2


def reinforce(p: Tensor, x: Tensor, A: Tensor) -> Tensor:
    return -A * p


def gspo(p: Tensor, x: Tensor, A: Tensor) -> Tensor:
    r = by_document(x).exp()
    return -torch.minimum(r * by_document(A), r.clamp(0.95, 1.04) * by_document(A))


def cispo(p: Tensor, x: Tensor, A: Tensor) -> Tensor:
    return -x.exp().clamp(0.7, 1.5).detach() * A * p


FORMULAS = {
    grpo: families.Grpo(epsilon_low=0.2, epsilon_high=0.3, dual_clip=2.0),
    gspo: families.Gspo(0.05, 0.04),
    cispo: families.Cispo(0.3, 0.5),
    sapo: families.Sapo(temperature_positive=1.5, temperature_negative=2.5),
    gmpo: families.Gmpo(epsilon_low=0.4, epsilon_high=0.25),
    dppo: families.Dppo(delta_low=0.2, delta_high=0.1, ratio_cap=3.0),
    dppo_by_kl: families.Dppo(
        delta_low=0.05, delta_high=0.03, ratio_cap=1.5, divergence="binary_kl"
    ),
    dppo_on_both_sides: families.Dppo(delta_low=0.1, delta_high=0.1, ratio_cap=1e4, sides="both"),
    dppo_by_square: families.Dppo(
        delta_low=0.2, delta_high=0.1, ratio_cap=1.5, divergence="squared_log_ratio"
    ),
    icepop: families.Icepop(low=0.5, high=1.5),
    vespo: families.Vespo(power_negative=1.5),
    kimi: families.Kimi(tau=0.7),
    reinforce: families.Reinforce(),
}


def of_log_probs(
    family: Family | str,
    new: Tensor = NEW,
    log_ratio: Tensor = LOG_RATIO,
    advantages: Tensor = ADVANTAGES,
    sampling: Tensor | None = None,
    **options: object,
) -> tuple[float, Tensor, dict[str, float]]:
    """Return (loss, its derivative by each new log-prob, metrics) with token_mean.

    sampling: (T,) the old log-probs minus those of the sampler. options: further keywords of
    `log_prob_loss`.
    """
    leaf = new.clone().requires_grad_()
    old = new - log_ratio
    keywords: dict[str, object] = {
        "loss": family,
        "aggregation": "token_mean",
        "metrics": "basic",
        # Some differences take log-probs above 0, which the check would refuse.
        "check_finite": False,
    }
    if sampling is not None:
        keywords["sampling_log_probs"] = old - sampling
    mask = torch.ones(len(new), dtype=torch.bool)
    documents = DOCUMENTS[: len(new)]
    out = log_prob_loss(leaf, old, advantages, documents, mask, **keywords | options)
    out.loss.backward()
    return out.loss.item(), leaf.grad, {name: float(value) for name, value in out.metrics.items()}
