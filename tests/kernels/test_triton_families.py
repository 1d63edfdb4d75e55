"""Every loss family in Triton's kernels: against the reference, and against PyTorch's vectors in pieces of a step.

Without a GPU the kernels run under Triton's interpreter.
"""

import math
from dataclasses import replace

import pytest
import torch
from builders.losses import (
    DEVICE,
    EVERY_LOSS,
    GRADIENT_ERROR,
    LEVELS,
    PARAMETERS,
    TEMPERATURE,
    make_head_case,
    objective_of,
    relative_error,
)

from pgtoolkit import policy_loss
from pgtoolkit.kernels import triton_objective, triton_passes
from pgtoolkit.kernels.fused_head import HeadOptions, LMHead, linear_loss
from pgtoolkit.losses import reference
from pgtoolkit.losses.aggregation import SampleMean
from pgtoolkit.losses.kl import KINDS, KL
from pgtoolkit.losses.objective import Loss

DUAL = {"epsilon_low": 0.2, "epsilon_high": 0.25, "dual_clip": 1.3}
CASES = [
    *((loss, PARAMETERS[loss]) for loss in EVERY_LOSS),
    ("grpo", DUAL),
    ("cispo", {"epsilon_low": None, "epsilon_high": 0.2}),
]
POISONS = [math.nan, math.inf, -math.inf]
NAMES = [*EVERY_LOSS, "grpo-dual_clip", "cispo-no_lower_bound"]


def step(seed, dtype=torch.float32):
    """(logits, the other tensors, groups) of documents whose advantages differ, one of them 0, rounded to dtype."""
    case = make_head_case(seed, dtype=dtype).case
    return case.logits.to(dtype), case.tensors[1:], case.group_index


def evaluated(logits, tensors, impl="triton", factor=1.0, **options):
    """(loss, log-probs, metrics, gradient of factor times the loss) in the dtype of the logits, on the device."""
    leaf = logits.clone().to(DEVICE).requires_grad_()
    tensors = [x.to(DEVICE, torch.float32 if x.is_floating_point() else x.dtype) for x in tensors]
    out = policy_loss(leaf, *tensors, impl=impl, temperature=TEMPERATURE, **options)
    (factor * out.loss).backward()
    return out.loss.detach(), out.log_probs, {name: float(value) for name, value in out.metrics.items()}, leaf.grad


def test_every_family_has_its_kernel():
    tensors = step(0)[1]
    for loss, parameters in CASES:
        family = objective_of(tensors, loss, **parameters).family
        assert triton_objective.formula_of(family) is not None
        assert len(triton_objective.numbers_of(family)) == 4


@pytest.mark.parametrize(("seed", "aggregation"), [(6, "sample_mean"), (11, "prompt_mean")], ids=["6", "11"])
@pytest.mark.parametrize(("loss", "parameters"), CASES, ids=NAMES)
def test_matches_the_reference(loss, parameters, seed, aggregation):
    logits, tensors, groups = step(seed)
    full = vars(objective_of(tensors, loss, **parameters).family)
    options = {"loss": loss, "aggregation": aggregation, "metrics": "with_entropy"}
    expected = reference.policy_loss(logits, *tensors, group_index=groups, temperature=TEMPERATURE, **options, **full)
    options["group_index"] = groups.to(DEVICE)
    found_loss, log_probs, metrics, gradient = evaluated(logits, tensors, factor=3.0, **options, **parameters)
    assert float(found_loss) == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
    assert relative_error(log_probs, torch.tensor(expected.log_probs)) < 1e-5
    assert relative_error(gradient, 3 * expected.gradient) < GRADIENT_ERROR[torch.float32]
    assert metrics == pytest.approx(expected.metrics, rel=2e-4, abs=2e-5, nan_ok=True)


def test_the_gates_are_hit_on_both_sides():
    """Else the comparison above would say little."""
    for (loss, parameters), name in zip(CASES, NAMES, strict=True):
        if loss in ("sapo", "vespo", "kimi", "reinforce"):
            continue
        given = {"impl": "torch", "loss": loss, "metrics": "basic"}
        found = [evaluated(*step(seed)[:2], **given, **parameters)[2] for seed in (6, 11)]
        low, high = (max(metrics[f"clipped_{side}_fraction"] for metrics in found) for side in ("low", "high"))
        assert (low > 0) == (name != "cispo-no_lower_bound"), name
        assert high > 0, name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("loss", "parameters"), CASES, ids=NAMES)
def test_vectors_match_those_of_pytorch(loss, parameters, level):
    """Documents out of order, and tokens of a document that weigh differently."""

    def rising(totals, mask, **_):
        return (1 + torch.arange(len(mask), device=mask.device)) / 100

    _, (labels, old, advantages, index), _ = step(6)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    tensors = [x[order].to(DEVICE) for x in (labels, old.float(), advantages.float(), index)]
    options = {"num_documents": 6, "dtype": torch.float32}
    objective = objective_of(tensors, loss, ("token_mean", None, rising), **options, **parameters)
    if level == "none":  # this one with a penalty, whose metric is PyTorch's
        kl, ref = KL(KINDS[NAMES.index(loss) % 4], 0.3), tensors[1] + 0.1 * tensors[2]
        objective = replace(objective, penalties=replace(objective.penalties, kl=kl, ref_log_probs=ref))
    noise = 0.2 * torch.randn(len(labels), generator=torch.Generator().manual_seed(2))
    log_probs = torch.where(tensors[0] >= 0, tensors[1] + noise.to(DEVICE), 0.0)
    entropy = log_probs.abs() if level == "with_entropy" else None
    expected = objective.evaluate(log_probs, entropy, level)
    found = triton_objective.evaluate(objective, log_probs, entropy, level)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(found[2].sums, expected[2].sums, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(found[2].maxima, expected[2].maxima, rtol=2e-5, atol=1e-6)
    coefficients = triton_objective.coefficients(objective, log_probs)
    assert torch.equal(coefficients, found[1])


@pytest.mark.parametrize(("loss", "parameters"), CASES, ids=NAMES)
def test_large_log_ratios_match_those_of_pytorch(loss, parameters):
    """Beyond the clamp and at it, under advantages of both signs and of none."""
    log_ratio = torch.tensor([25.0, 20.0, 0.25, -0.25, -20.0, -25.0], device=DEVICE).repeat_interleave(6)
    labels = torch.zeros(36, dtype=torch.int64, device=DEVICE)
    index = torch.arange(36, device=DEVICE) // 2
    advantages = torch.tensor([1.0, 2.0, -1.0, -0.5, 0.0, 0.0], device=DEVICE).repeat(6)
    log_probs = torch.tensor([-0.5, -1.0, -0.25, -2.0, -1.5, -0.5], device=DEVICE).repeat(6)
    # Exact in float32, so that a log-ratio of 20 is 20 in both; each document's sum is the log-ratio for vespo.
    old = log_probs - log_ratio / (2 if loss == "vespo" else 1)
    objective = objective_of((labels, old, advantages, index), loss, dtype=torch.float32, **parameters)
    found, expected = (x.evaluate for x in (triton_objective, objective))
    ours, theirs = found(objective, log_probs, None, "basic"), expected(log_probs, None, "basic")
    for a, b in zip((*ours[:2], ours[2].sums), (*theirs[:2], theirs[2].sums), strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinity less infinity, in the interpreter
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(("loss", "parameters"), CASES, ids=NAMES)
def test_what_is_not_finite_is_not_hidden(loss, parameters, poison):
    _, tensors, _ = step(6)
    turn = NAMES.index("grpo-dual_clip") if "dual_clip" in parameters else EVERY_LOSS.index(loss)
    # Every family meets each kind of old log-prob, and of advantage, which none of them looks at, one.
    for field in (1, 2) if POISONS[turn % 3] is poison else (1,):
        changed = [x.to(DEVICE, torch.float32 if x.is_floating_point() else x.dtype) for x in tensors]
        changed[field][int((changed[0] >= 0).nonzero()[3])] = poison
        objective = objective_of(changed, loss, dtype=torch.float32, **parameters)
        log_probs = torch.where(changed[0] >= 0, tensors[1].to(DEVICE, torch.float32), 0.0)
        assert torch.isnan(triton_objective.evaluate(objective, log_probs, None, "basic")[0])


@pytest.mark.parametrize(("loss", "parameters"), CASES, ids=NAMES)
def test_the_fused_head_matches_the_logits(loss, parameters):
    """Against all logits in float64: chunks of whole documents, and documents that are longer than a chunk."""
    made = make_head_case(6, dtype=torch.float32)
    expected_loss, gradients, _ = made.expected(2.0, loss=loss, **parameters)
    for rows in (4, 1000) if loss in ("grpo", "gspo", "vespo") else (4,):  # the latter asks only where sums are taken
        leaves = made.leaves()
        objective = objective_of(made.tensors, loss, dtype=torch.float32, **parameters)
        how = HeadOptions(triton_passes, rows, Loss(objective.family, SampleMean(), TEMPERATURE, "basic"))
        value = linear_loss(leaves[0], LMHead(*leaves[1:]), made.tensors[0], objective, how)[0]
        (2 * value).backward()
        assert float(value.detach()) == pytest.approx(float(expected_loss), rel=1e-5, abs=1e-6)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            assert relative_error(leaf.grad, gradient) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "vocabulary"), [(torch.bfloat16, 151936), (torch.float16, 4096), (torch.float32, 4097)]
)
@pytest.mark.parametrize(("loss", "parameters"), CASES, ids=NAMES)
def test_on_a_gpu(loss, parameters, dtype, vocabulary):
    """Rows that several programs share, that one keeps, and that are read twice: against float64 on the same logits."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    lengths = torch.tensor([37, 1, 64, 90, 8], device=DEVICE)
    index = torch.repeat_interleave(torch.arange(len(lengths), device=DEVICE), lengths)
    logits = (2 * torch.randn(len(index), vocabulary, generator=generator, device=DEVICE)).to(dtype)
    labels = torch.randint(0, vocabulary, (len(index),), generator=generator, device=DEVICE)
    new = logits.double().log_softmax(-1).gather(1, labels[:, None])[:, 0]
    scale = 0.02 if loss == "vespo" else 0.15
    old = (new + scale * torch.randn(len(index), generator=generator, device=DEVICE)).float()
    advantages = torch.randn(len(lengths), generator=generator, device=DEVICE)[index]
    labels[::5] = -1
    options = {"loss": loss, "aggregation": "token_mean", "metrics": "with_entropy", **parameters}
    results = []
    for values, impl, kind in ((logits, "triton", torch.float32), (logits.double(), "torch", torch.float64)):
        leaf = values.clone().requires_grad_()
        out = policy_loss(leaf, labels, old.to(kind), advantages.to(kind), index, impl=impl, **options)
        out.loss.backward()
        results.append((out.loss.detach(), leaf.grad, {name: float(x) for name, x in out.metrics.items()}))
    (loss_found, gradient, metrics), (loss_expected, exact, wanted) = results
    assert float(loss_found) == pytest.approx(float(loss_expected), rel=1e-4, abs=1e-5)
    assert relative_error(gradient, exact) < GRADIENT_ERROR[dtype] * 1.5
    # A token may lie so close to a bound that rounding of its log-prob decides: one of them, at most.
    fractions = {name: value for name, value in wanted.items() if "fraction" in name}
    assert {name: metrics[name] for name in fractions} == pytest.approx(fractions, abs=1 / len(labels))
    rest = wanted.keys() - fractions.keys()
    assert {name: metrics[name] for name in rest} == pytest.approx(
        {name: wanted[name] for name in rest}, rel=1e-3, abs=1e-4
    )
