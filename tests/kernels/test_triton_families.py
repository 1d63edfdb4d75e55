"""The loss families in Triton's kernels over vectors: against PyTorch's, beyond the clamps, and without numbers.

Without a GPU the kernels run under Triton's interpreter.
"""

import math
from dataclasses import replace

import pytest
import torch
from builders.losses import (
    DEVICE,
    FAMILIES,
    GRADIENT_ERROR,
    LEVELS,
    make_head_case,
    numbers,
    objective_of,
    relative_error,
)

from pgtoolkit import policy_loss
from pgtoolkit.kernels import triton_objective
from pgtoolkit.losses.kl import KINDS, KL

POISONS = [math.nan, math.inf, -math.inf]


def test_every_family_has_its_kernel():
    for family in FAMILIES.values():
        assert triton_objective.formula_of(family) is not None
        assert len(triton_objective.numbers_of(family)) == 4


@pytest.mark.parametrize(
    ("name", "level"), [(name, LEVELS[(i + j) % 3]) for i, name in enumerate(FAMILIES) for j in range(2)]
)
def test_vectors_match_those_of_pytorch(name, level):
    """Documents out of order, and tokens of a document that weigh differently."""

    def rising(totals, mask, **_):
        return (1 + torch.arange(len(mask), device=mask.device)) / 100

    order = torch.randperm(32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    tensors = [x[order] for x in make_head_case(dtype=torch.float32).tensors]
    options = {"num_documents": 6, "dtype": torch.float32}
    objective = objective_of(tensors, name, ("token_mean", None, rising), **options)
    if level == "none":  # this one with a penalty, whose metric is PyTorch's
        kl, ref = KL(KINDS[[*FAMILIES].index(name) % 4], 0.3), tensors[1] + 0.1 * tensors[2]
        objective = replace(objective, penalties=replace(objective.penalties, kl=kl, ref_log_probs=ref))
    noise = 0.2 * torch.randn(32, generator=torch.Generator().manual_seed(2))
    log_probs = torch.where(tensors[0] >= 0, tensors[1] + noise.to(DEVICE), 0.0)
    entropy = log_probs.abs() if level == "with_entropy" else None
    expected = objective.evaluate(log_probs, entropy, level)
    found = triton_objective.evaluate(objective, log_probs, entropy, level)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(found[2].sums, expected[2].sums, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(found[2].maxima, expected[2].maxima, rtol=2e-5, atol=1e-6)
    assert torch.equal(triton_objective.coefficients(objective, log_probs), found[1])


@pytest.mark.parametrize("name", FAMILIES)
def test_large_log_ratios_match_those_of_pytorch(name):
    """Beyond the clamp and at it, under advantages of both signs and of none."""
    log_ratio = torch.tensor([25.0, 20.0, 0.25, -0.25, -20.0, -25.0], device=DEVICE).repeat_interleave(6)
    labels = torch.zeros(36, dtype=torch.int64, device=DEVICE)
    index = torch.arange(36, device=DEVICE) // 2
    advantages = torch.tensor([1.0, 2.0, -1.0, -0.5, 0.0, 0.0], device=DEVICE).repeat(6)
    log_probs = torch.tensor([-0.5, -1.0, -0.25, -2.0, -1.5, -0.5], device=DEVICE).repeat(6)
    # Exact in float32, so that a log-ratio of 20 is 20 in both; each document's sum is the log-ratio for vespo.
    old = log_probs - log_ratio / (2 if name == "vespo" else 1)
    objective = objective_of((labels, old, advantages, index), name, dtype=torch.float32)
    ours = triton_objective.evaluate(objective, log_probs, None, "basic")
    theirs = objective.evaluate(log_probs, None, "basic")
    for a, b in zip((*ours[:2], ours[2].sums), (*theirs[:2], theirs[2].sums), strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinity less infinity, in the interpreter
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_not_finite_is_not_hidden(name):
    """Every family meets each kind of old log-prob, and of advantage, which none of them looks at, one."""
    turn = [*FAMILIES].index(name)
    for field, poison in (*((1, poison) for poison in POISONS), (2, POISONS[turn % 3])):
        tensors = make_head_case(dtype=torch.float32).tensors
        log_probs = torch.where(tensors[0] >= 0, tensors[1], 0.0)
        tensors[field] = tensors[field].clone()
        tensors[field][int((tensors[0] >= 0).nonzero()[3])] = poison
        objective = objective_of(tensors, name, dtype=torch.float32)
        assert torch.isnan(triton_objective.evaluate(objective, log_probs, None, "basic")[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "vocabulary"), [(torch.bfloat16, 151936), (torch.float16, 4096), (torch.float32, 4097)]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_on_a_gpu(name, dtype, vocabulary):
    """Rows that several programs share, that one keeps, and that are read twice: against float64 on the same logits.

    In bfloat16 under a penalty, which the first of these kernels has a formula for.
    """
    generator = torch.Generator(DEVICE).manual_seed(0)
    lengths = torch.tensor([37, 1, 64, 90, 8], device=DEVICE)
    index = torch.repeat_interleave(torch.arange(len(lengths), device=DEVICE), lengths)
    logits = (2 * torch.randn(len(index), vocabulary, generator=generator, device=DEVICE)).to(dtype)
    labels = torch.randint(0, vocabulary, (len(index),), generator=generator, device=DEVICE)
    new = logits.double().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    scale = 0.02 if name == "vespo" else 0.15
    old, ref = (new + by * torch.randn(len(index), generator=generator, device=DEVICE) for by in (scale, 0.3))
    advantages = torch.randn(len(lengths), generator=generator, device=DEVICE)[index]
    labels[::5] = -1
    options = {"loss": FAMILIES[name], "aggregation": "token_mean", "metrics": "with_entropy"}
    if dtype == torch.bfloat16:
        options["kl"] = KL(KINDS[[*FAMILIES].index(name) % 4], 0.4)
    results = []
    for values, impl, kind in ((logits, "triton", torch.float32), (logits.double(), "torch", torch.float64)):
        leaf, vectors = values.clone().requires_grad_(), [x.float().to(kind) for x in (old, advantages, ref)]
        given = options | ({"ref_log_probs": vectors[2]} if "kl" in options else {})
        out = policy_loss(leaf, labels, *vectors[:2], index, impl=impl, **given)
        out.loss.backward()
        results.append((out.loss.detach(), leaf.grad, numbers(out.metrics)))
    (loss_found, gradient, metrics), (loss_expected, exact, wanted) = results
    assert float(loss_found) == pytest.approx(float(loss_expected), rel=1e-4, abs=1e-5)
    assert relative_error(gradient, exact) < GRADIENT_ERROR[dtype] * 1.5
    # A token may lie so close to a bound that rounding of its log-prob decides: one of them, at most.
    for key, value in wanted.items():
        allowed = {"abs": 1 / len(labels)} if "fraction" in key else {"rel": 1e-3, "abs": 1e-4}
        assert metrics[key] == pytest.approx(value, **allowed), key
