"""The fused LM head has the loss and gradients of materialised logits, in every precision and
however its rows are cut."""

from dataclasses import replace

import pytest
import torch
from builders.losses import (
    DEVICE,
    FAMILIES,
    PARAMETERS,
    TEMPERATURE,
    TYPICAL_LOSSES,
    Choice,
    assert_results_close,
    make_head_case,
    objective_of,
    relative_error,
    result_of,
)

from pgtoolkit import kl, linear_policy_loss
from pgtoolkit.batch import DocumentCounts
from pgtoolkit.kernels import losses
from pgtoolkit.kernels.chunks import make_plan


def limit_rows(monkeypatch: pytest.MonkeyPatch, rows: int, implementation: str) -> None:
    """Let the fused head compute `rows` rows of logits at a time, by this implementation."""
    choose = losses.choose_implementation
    monkeypatch.setattr(
        losses, "choose_implementation", lambda _, *others: choose(implementation, *others)
    )
    monkeypatch.setattr(losses, "rows_within", lambda memory, columns, dtype: rows)


HALF_PRECISION = (
    (torch.bfloat16, False),
    (torch.bfloat16, True),
    (torch.float16, False),
    (torch.float16, True),
)
"""dtype, and whether logits are in float32."""
BONUS = {"aggregation": "constant", "divisor": 1e5, "entropy_coefficient": 0.3}


@pytest.mark.parametrize(
    ("loss", "implementation", "dtype", "fp32_logits", "more"),
    [
        *(
            (TYPICAL_LOSSES[i % 3], "torch", *precision, {})
            for i, precision in enumerate(((torch.float32, False), *HALF_PRECISION))
        ),
        ("grpo", "triton", torch.bfloat16, False, {}),
        ("cispo", "triton", torch.float16, True, {}),
        *(
            (("grpo", "gspo")[i % 2], "torch", *precision, BONUS)
            for i, precision in enumerate(HALF_PRECISION)
        ),
    ],
)
def test_the_error_of_loss_and_gradients_is_that_of_the_precision(
    loss, implementation, dtype, fp32_logits, more, monkeypatch
):
    """The clip is wide, so that it clips the same tokens with rounded logits as with exact ones.

    With an entropy bonus and a large divisor, coefficients are too small for float16: they stay in
    float32 until the loss is scaled by `factor`.
    """
    wide = {"loss": loss, "epsilon_low": 0.9, "epsilon_high": 9.0} | more
    factor = more.get("divisor", 1.0)
    # With logits rounded to the dtype the ratios move; float32 logits leave the rounding of the
    # gradient.
    tolerance = {
        torch.float32: 1e-5,
        torch.bfloat16: 1e-2 if fp32_logits else 3e-2,
        torch.float16: 3e-3,
    }[dtype]
    problem = make_head_case(dtype=dtype)
    expected_value, gradients, _ = problem.by_all_logits(factor, **wide)
    for rows in (4, 1000):
        limit_rows(monkeypatch, rows, implementation)
        leaves = problem.leaves()
        hidden, weight, bias = leaves
        options = {"bias": bias, "temperature": TEMPERATURE, "fp32_logits": fp32_logits, **wide}
        out = linear_policy_loss(hidden, weight, *problem.tensors, **options)
        (factor * out.loss).backward()
        assert relative_error(out.loss.detach(), expected_value) < tolerance
        for leaf, gradient in zip(leaves, gradients, strict=True):
            assert leaf.grad.dtype == dtype
            assert relative_error(leaf.grad, gradient) < tolerance
        monkeypatch.undo()


@pytest.mark.parametrize("num_splits", [1, 2, 1000])
def test_the_result_does_not_depend_on_num_splits(num_splits):
    problem = make_head_case()
    choice = Choice("grpo")
    expected = problem.by_reference(choice)
    for impl in ("auto", "torch"):
        result = problem.by_fused_head(choice, num_splits=num_splits, impl=impl)
        assert_results_close(result, expected, 1e-12)


@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
def test_without_gradients_loss_and_metrics_are_the_same(loss):
    problem = make_head_case()
    hidden, weight, bias = problem.leaves()
    options = {
        "loss": FAMILIES[loss],
        "bias": bias,
        "metrics": "with_entropy",
        "impl": "fused_linear",
    }
    with_gradient = linear_policy_loss(hidden, weight, *problem.tensors, **options)
    with torch.no_grad():
        without = linear_policy_loss(hidden, weight, *problem.tensors, **options)
    assert not without.loss.requires_grad
    assert relative_error(without.loss, with_gradient.loss.detach()) < 1e-13
    assert relative_error(without.log_probs, with_gradient.log_probs) < 1e-13
    assert relative_error(without.metrics["entropy"], with_gradient.metrics["entropy"]) < 1e-13


def test_untrained_rows_are_not_multiplied():
    """Hidden states of NaN at untrained positions reach neither the loss nor any gradient; their
    own gradient is 0."""
    problem = make_head_case()
    for choice in map(Choice, TYPICAL_LOSSES):
        expected = problem.by_reference(choice)
        hidden, weight, bias = problem.leaves()
        untrained = problem.tensors[0] < 0
        poisoned = torch.where(untrained[:, None], torch.nan, hidden.detach()).requires_grad_()
        options = {
            "bias": bias,
            "temperature": TEMPERATURE,
            **choice.step(problem.case, device=DEVICE),
        }
        out = linear_policy_loss(poisoned, weight, *problem.tensors, **options)
        assert_results_close(result_of(out, [poisoned, weight, bias]), expected, 1e-12)
        assert (poisoned.grad[untrained] == 0).all()
        assert (out.log_probs[untrained] == 0).all()


@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
def test_without_trained_tokens_loss_and_gradients_are_zero(loss):
    problem = make_head_case()
    _, old, advantages, index = problem.tensors
    for rows in (0, len(old)):
        hidden, weight, _ = problem.leaves()
        hidden = hidden.detach()[:rows].requires_grad_()
        labels = torch.full((rows,), -1, device=DEVICE)
        out = linear_policy_loss(
            hidden,
            weight,
            labels,
            old[:rows],
            advantages[:rows],
            index[:rows],
            loss=loss,
            num_documents=6,
        )
        out.loss.backward()
        assert float(out.loss.detach()) == 0
        assert (hidden.grad == 0).all()
        assert (weight.grad == 0).all()


PULL = kl.KL("k3", coefficient=0.5)


@pytest.mark.parametrize(
    ("loss", "penalty"),
    [*((loss, None) for loss in (*TYPICAL_LOSSES, "kimi")), ("grpo", PULL), ("gspo", PULL)],
)
def test_counts_of_the_host_give_the_same_bits_as_those_of_the_device(loss, penalty):
    """With equal counts the chunks are equal. Counts of another number of documents are refused.

    Tokens of advantage 0 have a gradient under `kimi` and under a penalty.
    """
    problem = make_head_case(vocabulary=40000, hidden_size=32)
    labels, _, advantages, index = (x.cpu() for x in problem.tensors)
    trained = [int(((labels >= 0) & (index == d)).sum()) for d in range(6)]
    informative = [int(((labels >= 0) & (index == d) & (advantages != 0)).sum()) for d in range(6)]
    assert trained != informative
    results = []
    for counts in (None, DocumentCounts(trained, informative)):
        leaves = problem.leaves()
        options = {
            "loss": loss,
            "logits_memory_mb": 1,
            "check_finite": False,
            "num_documents": 6,
            **PARAMETERS[loss],
        }
        if penalty is not None:
            options |= {"kl": penalty, "ref_log_probs": problem.tensors[1] - 0.3}
        out = linear_policy_loss(
            *leaves[:2], *problem.tensors, bias=leaves[2], counts=counts, **options
        )
        out.loss.backward()
        results.append([out.loss.detach(), *(x.grad for x in leaves)])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    without_advantage = (labels >= 0) & (advantages == 0)
    assert without_advantage.any()
    has_gradient = bool((results[1][1].cpu()[without_advantage] != 0).any())
    assert has_gradient is (loss == "kimi" or penalty is not None)
    with pytest.raises(ValueError, match="counts needs 6 documents"):
        linear_policy_loss(
            *leaves[:2], *problem.tensors, counts=DocumentCounts([1], [1]), **options
        )


@pytest.mark.gpu
@pytest.mark.parametrize("loss", TYPICAL_LOSSES)
def test_two_calls_on_a_gpu_agree_to_the_last_bit(loss):
    """Some documents are clipped, and some have the advantage 0."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows, columns = 2000, 32000
    hidden = torch.randn(rows, 256, generator=generator, device=DEVICE).bfloat16()
    weight = (0.1 * torch.randn(columns, 256, generator=generator, device=DEVICE)).bfloat16()
    labels = torch.randint(-1, columns, (rows,), generator=generator, device=DEVICE)
    index = torch.randint(0, 20, (rows,), generator=generator, device=DEVICE)
    advantages = torch.randint(-1, 2, (20,), generator=generator, device=DEVICE).float()[index]
    with torch.no_grad():
        new = linear_policy_loss(
            hidden, weight, labels, advantages, advantages, index, check_finite=False
        ).log_probs
    old = new + 0.002 * torch.randn(rows, generator=generator, device=DEVICE)
    results = []
    for _ in range(2):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = linear_policy_loss(
            *leaves,
            labels,
            old,
            advantages,
            index,
            loss=loss,
            logits_memory_mb=20,
            metrics="with_entropy",
        )
        out.loss.backward()
        results.append([out.loss.detach(), *(x.grad for x in leaves), *out.metrics.values()])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_tokens_that_do_not_count_take_no_part_in_the_backward_products(loss):
    """With a ratio of documents, whole documents of such tokens alone."""
    case = make_head_case().case
    objective = objective_of(case.tensors[1:], loss, num_documents=case.num_documents)
    counts = (torch.arange(len(case.labels)) % 3 == 0) & (case.document_index != 3)
    weights = torch.where(counts, objective.weights, 0.0)
    plan = make_plan(replace(objective, weights=weights, given_factors=weights), 4, True, False)
    planned = [chunk.stop - chunk.start for chunk in plan.chunks if chunk.needs_gradient]
    active = counts & (case.labels >= 0) & (case.advantages != 0)
    if loss == "gspo":
        active = (case.labels >= 0) & torch.isin(case.document_index, case.document_index[active])
    assert sum(planned) == int(active.sum())
