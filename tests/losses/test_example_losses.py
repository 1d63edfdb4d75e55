"""The losses of examples/losses against plain loops over tokens in float64."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from pgtoolkit import log_prob_loss, step_coefficients
from pgtoolkit.losses.function import FunctionLoss
from pgtoolkit.losses.trial import check_function

FOLDER = Path(__file__).parents[2] / "examples" / "losses"
LENGTHS = (4, 1, 9, 6, 2, 7)
GROUPS = (0, 1, 0, 1, 1, 0)
REWARDS = (1.0, 0.0, 0.0, 1.0, 1.0, 0.0)


def example(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def vectors():
    generator = torch.Generator().manual_seed(1)
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

    def noise(scale, size):
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    old = (-1.5 + noise(0.7, len(index))).clamp(max=-1e-3)
    new = (old + noise(0.4, len(index))).clamp(max=-1e-3)
    sampled = (old + noise(0.2, len(index))).clamp(max=-1e-3)
    return new, old, sampled, noise(1.0, len(LENGTHS))[index], index


def expected(losses, leaf):
    """Return (loss, gradient) of the mean over documents of the means of their tokens' losses."""
    means = [torch.stack(of_document).mean() for of_document in losses]
    total = torch.stack(means).mean()
    (gradient,) = torch.autograd.grad(total, leaf)
    return float(total.detach()), gradient


def gapo_by_loops(new, old, sampled, advantages, index):
    losses = []
    for document, length in enumerate(LENGTHS):
        members = [d for d in range(len(LENGTHS)) if GROUPS[d] == GROUPS[document]]
        wrong = sum(REWARDS[d] < 1 for d in members)
        high = 0.2 + (0.28 - 0.2) * wrong / (len(members) - 1)
        start = sum(LENGTHS[:document])
        of_document = []
        for t in range(start, start + length):
            r = (new[t] - old[t]).exp()
            bounded = min(max(float(r.detach()), 0.8), 1 + high)
            a = float(advantages[t])
            clips = float(r.detach()) * a > bounded * a
            of_document.append(0 * r - bounded * a if clips else -r * a)
        losses.append(of_document)
    return losses


def cppo_by_loops(new, old, sampled, advantages, index):
    losses = []
    for document, length in enumerate(LENGTHS):
        start = sum(LENGTHS[:document])
        weights_before = moved_before = 0.0
        of_document = []
        for place in range(length):
            t = start + place
            r = (new[t] - sampled[t]).exp()
            weight = 1 - 0.2 * place / max(1, length - 1)
            moved = weight * abs(math.exp(float(new[t].detach())) - math.exp(float(sampled[t])))
            left = min(0.15, 0.15 + 0.015 * weights_before - moved_before)
            a = float(advantages[t])
            is_kept = a * (float(r.detach()) - 1) <= 0 or moved <= left
            of_document.append(-r * a if is_kept else 0 * r)
            weights_before += weight
            moved_before += moved
        losses.append(of_document)
    return losses


def tis_by_loops(new, old, sampled, advantages, index):
    losses = []
    for document, length in enumerate(LENGTHS):
        start = sum(LENGTHS[:document])
        losses.append(
            [
                -min(math.exp(float(new[t].detach() - sampled[t])), 2.0) * advantages[t] * new[t]
                for t in range(start, start + length)
            ]
        )
    return losses


def rloo_by_loops(new, old, sampled, advantages, index):
    losses = []
    for document, length in enumerate(LENGTHS):
        start = sum(LENGTHS[:document])
        r = math.prod([(new[t] - old[t]).exp() for t in range(start, start + length)], start=1.0)
        a = sum(float(advantages[t]) for t in range(start, start + length)) / length
        bounded = min(max(float(r.detach()), 0.8), 1.2)
        clips = float(r.detach()) * a > bounded * a
        losses.append([0 * r - bounded * a if clips else -r * a] * length)
    return losses


LOOPS = {"gapo": gapo_by_loops, "cppo": cppo_by_loops, "tis": tis_by_loops, "rloo": rloo_by_loops}


@pytest.mark.parametrize("name", LOOPS)
def test_value_and_gradient_are_those_of_loops(name):
    new, old, sampled, advantages, index = vectors()
    leaf = new.clone().requires_grad_()
    loss, gradient = expected(LOOPS[name](leaf, old, sampled, advantages, index), leaf)
    mask = torch.ones_like(index, dtype=torch.bool)
    options = {"group_index": torch.tensor(GROUPS), "sampling_log_probs": sampled}
    if name == "gapo":  # the others read none
        options["rewards"] = torch.tensor(REWARDS, dtype=torch.float64)
    if name in ("gapo", "rloo"):
        del options["sampling_log_probs"]
    made = step_coefficients(new, old, advantages, index, mask, loss=example(name), **options)
    assert float(made.loss) == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(made.coefficients, gradient, rtol=1e-11, atol=1e-14)
    if name != "gapo":  # which depends on groups, and so on the whole step
        out = log_prob_loss(leaf, old, advantages, index, mask, loss=example(name), **options)
        (by_pieces,) = torch.autograd.grad(out.loss, leaf)
        torch.testing.assert_close(by_pieces, gradient, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", LOOPS)
def test_the_trial_passes(name):
    check_function(FunctionLoss(example(name)))
