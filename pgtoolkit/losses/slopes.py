"""Compares the slopes of a family with automatic differentiation, at points of a grid."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pgtoolkit.losses.family import Family

Grid = tuple[Tensor, Tensor, Tensor]
"""Log-ratios, advantages and log-probs, (N,) each."""


def check_family(family: Family) -> None:
    """Raise ValueError where a family's slopes or attributes disagree with its functions.

    Checks shapes, `bounds`, the derivatives that `token` and `surrogate` return, that no token's
    numbers depend on other tokens, `silent_without_advantage` and `reads_old_log_probs`. This is
    done in float64, at every combination of 60 log-ratios from 5e-5 to 19 on both sides of 0, five
    advantages of both signs and 0, and five log-probs between -12 and -0.01. A fault that shows
    only between these points is not noticed.
    """
    name = type(family).__name__
    if family.scope not in ("token", "document", "document_sum"):
        raise ValueError(
            f"{name}.scope needs to be 'token', 'document' or 'document_sum' (got {family.scope!r})"
        )
    if family.slope_of not in ("log_ratio", "log_prob", "both"):
        raise ValueError(
            f"{name}.slope_of needs to be 'log_ratio', 'log_prob' or 'both' (got "
            f"{family.slope_of!r})"
        )
    if family.slope_of == "both" and family.by_document:
        raise ValueError(f"{name}.slope_of='both' needs scope='token' (got {family.scope!r})")
    _ = family.limits  # raises ValueError for bounds that are not two numbers
    grid = log_ratio, advantages, log_probs = _grid()
    x, derivative = family.token(log_ratio, advantages)
    derivative = torch.ones_like(x) if derivative is None else derivative
    _check_derivative(f"{name}.token", "log_ratio", x, derivative, log_ratio, grid)
    losses, slope = family.surrogate(*grid)
    by = {"log_ratio": log_ratio, "log_prob": log_probs}
    if family.slope_of == "both":
        moved = torch.zeros_like(log_ratio).requires_grad_()  # log-prob and log-ratio move together
        losses, slope = family.surrogate(log_ratio + moved, advantages, log_probs + moved)
        _check_derivative(f"{name}.surrogate", "log_prob", losses, slope, moved, grid)
    else:
        _check_derivative(
            f"{name}.surrogate", family.slope_of, losses, slope, by.pop(family.slope_of), grid
        )
        ((other, leaf),) = by.items()
        _check_derivative(f"{name}.surrogate", other, losses, torch.zeros_like(slope), leaf, grid)
    if family.silent_without_advantage and bool((slope[advantages == 0] != 0).any()):
        raise ValueError(
            f"{name}.silent_without_advantage needs a slope of 0 where the advantage is 0 (got "
            "another)"
        )
    _check_alone(f"{name}.token", (x, derivative), family.token, grid[:2])
    _check_alone(f"{name}.surrogate", (losses, slope), family.surrogate, grid)
    if not family.reads_old_log_probs:
        for first, other in zip(
            (losses, slope), family.surrogate(1.3 * log_ratio, advantages, log_probs), strict=True
        ):
            if not torch.equal(first, other):
                raise ValueError(
                    f"{name}.reads_old_log_probs=False needs a surrogate without the log-ratio"
                )


def _grid() -> Grid:
    """Return all combinations of some log-ratios, advantages and log-probs, so that bounds on a
    probability act on both sides."""
    # No round numbers, so that none happens to be the bound of a clip, where the derivative jumps.
    # Half of the log-ratios are close to 0, where clips of ratios by document act.
    above = torch.logspace(-4.3, 1.28, 30, dtype=torch.float64)
    log_ratio = torch.cat([-0.97 * above.flip(0), above])
    advantages = torch.tensor([-3.21, -0.37, 0.0, 0.43, 2.83], dtype=torch.float64)
    log_probs = torch.tensor([-11.7, -3.1, -0.93, -0.21, -0.011], dtype=torch.float64)
    log_ratio, advantages, log_probs = torch.cartesian_prod(
        log_ratio, advantages, log_probs
    ).unbind(-1)
    return (
        log_ratio.contiguous().requires_grad_(),
        advantages.contiguous(),
        log_probs.contiguous().requires_grad_(),
    )


def _check_derivative(
    name: str, by: str, values: Tensor, slope: Tensor, leaf: Tensor, grid: Grid
) -> None:
    """Raise ValueError unless a slope is the derivative of the values by leaf.

    by: the name of leaf.
    """
    for result in (values, slope):
        if not isinstance(result, Tensor) or result.shape != leaf.shape:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"{name} needs to return one number per token, shape {tuple(leaf.shape)} (got "
                f"{got})"
            )
        wrong = (~torch.isfinite(result)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            got = result.detach()[at].item()
            raise ValueError(
                f"{name} needs to return finite numbers (got {got:g}, {_place(grid, at)})"
            )
    expected = None
    if values.requires_grad:
        expected = torch.autograd.grad(values.sum(), leaf, retain_graph=True, allow_unused=True)[0]
    expected = torch.zeros_like(leaf) if expected is None else expected
    wrong = ((expected - slope.detach()).abs() > 1e-6 * (1 + expected.abs())).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"{name} needs a slope that is the derivative of its value by the {by} "
            f"(got {float(slope[at].detach()):.6g}, where it is {float(expected[at]):.6g}, "
            f"{_place(grid, at)}). A factor that is to have no gradient needs .detach()"
        )


def _check_alone(
    name: str, results: tuple[Tensor, ...], function: Callable, grid: tuple[Tensor, ...]
) -> None:
    """Raise ValueError unless the numbers of a token stay the same if other tokens change."""
    half = len(grid[0]) // 2
    others = function(
        *(torch.cat([numbers[:half], numbers[:1].expand(half)]).detach() for numbers in grid)
    )
    for first, other in zip(results, others, strict=True):
        if other is not None and not torch.equal(first[:half], other[:half]):
            raise ValueError(
                f"{name} needs numbers of a token that do not depend on the other tokens (got "
                "others)"
            )


def _place(grid: Grid, at: int) -> str:
    log_ratio, advantage, log_prob = (f"{float(numbers[at].detach()):.6g}" for numbers in grid)
    return (
        f"at a log-ratio of {log_ratio}, an advantage of {advantage} and a log-prob of {log_prob}"
    )
