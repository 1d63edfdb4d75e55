"""Compares the slopes of a family with automatic differentiation, on a few numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from pgtoolkit.losses.family import Family


def check_family(family: Family) -> None:
    """Raise ValueError, naming the number, where a family's slopes or attributes disagree with its functions.

    Looks at log-ratios between -3 and 3, advantages of both signs and 0, and log-probs between -6 and -0.01, in
    float64: shapes, the derivatives that `token` and `surrogate` return, `silent_without_advantage`,
    `reads_old_log_probs`, and the bounds.
    """
    name = type(family).__name__
    if family.scope not in ("token", "document", "document_sum"):
        raise ValueError(f"{name}.scope needs to be 'token', 'document' or 'document_sum' (got {family.scope!r})")
    if family.slope_of not in ("log_ratio", "log_prob", "both"):
        raise ValueError(f"{name}.slope_of needs to be 'log_ratio', 'log_prob' or 'both' (got {family.slope_of!r})")
    if family.slope_of == "both" and family.by_document:
        raise ValueError(f"{name}.slope_of='both' needs scope='token' (got {family.scope!r})")
    log_ratio, advantages, log_probs = _grid()
    x, derivative = family.token(log_ratio, advantages)
    derivative = torch.ones_like(x) if derivative is None else derivative
    _check_derivative(f"{name}.token", "log_ratio", x, derivative, log_ratio, log_ratio)
    losses, slope = family.surrogate(log_ratio, advantages, log_probs)
    by = {"log_ratio": log_ratio, "log_prob": log_probs}
    if family.slope_of == "both":
        moved = torch.zeros_like(log_ratio).requires_grad_()  # log-prob and log-ratio move together
        losses, slope = family.surrogate(log_ratio + moved, advantages, log_probs + moved)
        _check_derivative(f"{name}.surrogate", "log_prob", losses, slope, moved, log_ratio)
    else:
        _check_derivative(f"{name}.surrogate", family.slope_of, losses, slope, by.pop(family.slope_of), log_ratio)
        ((other, leaf),) = by.items()
        _check_derivative(f"{name}.surrogate", other, losses, torch.zeros_like(slope), leaf, log_ratio)
    if family.silent_without_advantage and bool((slope[advantages == 0] != 0).any()):
        raise ValueError(f"{name}.silent_without_advantage needs a slope of 0 where the advantage is 0 (got another)")
    if not family.reads_old_log_probs:
        for one, other in zip((losses, slope), family.surrogate(1.3 * log_ratio, advantages, log_probs), strict=True):
            if not torch.equal(one, other):
                raise ValueError(f"{name}.reads_old_log_probs=False needs a surrogate without the log-ratio")
    low, high = family.bounds
    if not low <= high:
        raise ValueError(f"{name}.bounds need to be two ratios, the lower one first (got {low!r}, {high!r})")
    ratio = log_ratio.detach().exp()
    family.cuts(*family.outside(ratio, log_ratio.detach(), log_probs.detach()), ratio, advantages)


def _grid() -> tuple[Tensor, Tensor, Tensor]:
    # No round numbers: a clip's bound, where the derivative jumps, is not met by chance.
    log_ratio = torch.linspace(-2.917, 3.013, 61, dtype=torch.float64)
    advantages = torch.tensor([-1.37, 0.0, 0.83], dtype=torch.float64)
    log_ratio, advantages = log_ratio.repeat(3), advantages.repeat_interleave(61)
    log_probs = -0.01 - 6 * torch.linspace(0, 1, 183, dtype=torch.float64).sqrt()
    return log_ratio.requires_grad_(), advantages, log_probs.requires_grad_()


def _check_derivative(what: str, by: str, values: Tensor, given: Tensor, leaf: Tensor, log_ratio: Tensor) -> None:
    for result in (values, given):
        if not isinstance(result, Tensor) or result.shape != leaf.shape:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"{what} needs to return one number per token, shape {tuple(leaf.shape)} (got {got})")
        if len(wrong := (~torch.isfinite(result)).nonzero()):
            got, at = (float(one[int(wrong[0])].detach()) for one in (result, log_ratio))
            raise ValueError(f"{what} needs to return finite numbers (got {got:g}, at a log-ratio of {at:.6g})")
    found = None
    if values.requires_grad:
        found = torch.autograd.grad(values.sum(), leaf, retain_graph=True, allow_unused=True)[0]
    found = torch.zeros_like(leaf) if found is None else found
    wrong = ((found - given.detach()).abs() > 1e-6 * (1 + found.abs())).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"{what} needs a slope that is the derivative of its value by the {by} "
            f"(got {float(given[at].detach()):.6g}, where it is {float(found[at]):.6g}, "
            f"at a log-ratio of {float(log_ratio[at].detach()):.6g})"
        )
