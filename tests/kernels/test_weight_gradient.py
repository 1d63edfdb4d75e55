"""The fused LM head adds its gradients up in float32 or wider, in the buffer that it is given, and
for those parameters that are trained."""

import math

import pytest
import torch
from builders.losses import (
    DEVICE,
    PARAMETERS,
    TEMPERATURE,
    TYPICAL_LOSSES,
    make_head_case,
    relative_error,
)

from pgtoolkit import linear_policy_loss
from pgtoolkit.errors import DataError
from pgtoolkit.kernels.products import accumulate_matmul, linear, matmul


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weight_gradient_adds_up_over_micro_batches(dtype):
    """Two calls add to a float32 buffer, which autograd does not see; sums of bfloat16 are not
    rounded in between."""
    problem = make_head_case(dtype=dtype)
    total_dtype = torch.promote_types(dtype, torch.float32)
    total = torch.zeros(12, 15, dtype=total_dtype, device=DEVICE)
    for _ in range(2):
        hidden, weight, _ = problem.leaves()
        out = linear_policy_loss(
            hidden,
            weight,
            *problem.tensors,
            loss="grpo",
            weight_gradient=total,
            **PARAMETERS["grpo"],
        )
        out.loss.backward()
        assert weight.grad is None
    other_hidden, other_weight, _ = problem.leaves()
    linear_policy_loss(
        other_hidden, other_weight, *problem.tensors, loss="grpo", **PARAMETERS["grpo"]
    ).loss.backward()
    tolerance = 1e-13 if dtype == torch.float64 else 5e-3
    assert relative_error(total, 2 * other_weight.grad.double()) < tolerance
    assert torch.equal(hidden.grad, other_hidden.grad)


@pytest.mark.skipif(
    DEVICE == "cuda", reason="a device-side assertion ends the process's use of the GPU"
)
def test_weight_gradient_refuses_a_scaled_loss():
    problem = make_head_case()
    hidden, weight, _ = problem.leaves()
    out = linear_policy_loss(
        hidden, weight, *problem.tensors, weight_gradient=torch.zeros_like(weight).detach()
    )
    with pytest.raises(RuntimeError, match="as it was returned"):
        (2 * out.loss).backward()


@pytest.mark.parametrize("with_buffer", [False, True])
def test_the_weight_gradient_adds_up_in_float32_over_chunks(with_buffer):
    """Each of 1024 equal tokens is a chunk. A total in bfloat16 would stop growing once it is 256
    times a token's part."""
    rows = 1024
    ones = torch.ones(rows, 1, device=DEVICE)
    hidden = ones.bfloat16().requires_grad_()
    weight = torch.zeros(4, 1, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    zeros = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    total = torch.zeros(4, 1, device=DEVICE) if with_buffer else None
    out = linear_policy_loss(
        hidden,
        weight,
        zeros,
        -math.log(4) * ones[:, 0],
        ones[:, 0],
        zeros,
        loss="grpo",
        impl="fused_linear",
        logits_memory_mb=1e-6,
        weight_gradient=total,
    )
    out.loss.backward()
    # The mean of -(onehot - softmax): -3/4 for the label, 1/4 for the others.
    gradient = (total if with_buffer else weight.grad).double().cpu()
    expected = torch.tensor([[-0.75], [0.25], [0.25], [0.25]], dtype=torch.float64)
    assert relative_error(gradient, expected) < 1e-5


@pytest.mark.parametrize("columns", [130, 2200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_add_to_a_float32_total_without_rounding_in_between(dtype, columns):
    """A GPU adds products of more than 2048 columns in two halves."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(300, 50, generator=generator).to(DEVICE, dtype)
    b = torch.randn(50, columns, generator=generator).to(DEVICE, dtype)
    total = torch.full((300, columns), 100.0, device=DEVICE)
    accumulate_matmul(total, a, b, alpha=0.25)
    accumulate_matmul(total, a, b, alpha=0.25)
    assert relative_error(total, 100 + 0.5 * (a.double() @ b.double())) < 1e-6
    product = matmul(a, b, torch.empty(300, columns, device=DEVICE))
    assert relative_error(product, a.double() @ b.double()) < 1e-6


def test_bad_data_is_an_error_before_it_reaches_the_buffer():
    problem = make_head_case()
    labels, old, advantages, index = problem.tensors
    old = old.clone()
    old[(index == 3).nonzero()[4]] = torch.nan
    hidden, weight, _ = problem.leaves()
    total = torch.zeros_like(weight).detach()
    for loss in TYPICAL_LOSSES:
        with pytest.raises(DataError, match="document 3"):
            linear_policy_loss(
                hidden, weight, labels, old, advantages, index, loss=loss, weight_gradient=total
            )
        assert (total == 0).all()
    hidden = hidden.detach().clone()
    hidden[(index == 1).nonzero()[0]] = torch.inf
    with pytest.raises(DataError, match="document 1"):
        linear_policy_loss(hidden.requires_grad_(), weight, *problem.tensors)


def test_a_frozen_parameter_gets_no_gradient_and_the_others_get_theirs():
    problem = make_head_case()
    _, gradients, _ = problem.by_all_logits(loss="gspo")
    for frozen in (0, 1, 2):
        leaves = problem.leaves()
        leaves[frozen].requires_grad_(False)
        out = linear_policy_loss(
            *leaves[:2], *problem.tensors, bias=leaves[2], temperature=TEMPERATURE
        )
        out.loss.backward()
        for i, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
            if i == frozen:
                assert leaf.grad is None
            else:
                assert relative_error(leaf.grad, gradient) < 1e-12


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float64, torch.float32), (torch.float16, None)],
)
def test_the_gradient_of_a_weight_of_another_type_is_rounded_once(dtype, weight_dtype):
    """Sums are in float32, or in float64 where the hidden states are, as with materialised
    logits. A weight_dtype of None is that of the hidden states."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 8, generator=generator, dtype=torch.float64).to(dtype)
    gradient = torch.randn(300, 5, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(5, 8, generator=generator).to(weight_dtype or dtype).requires_grad_()
    linear(hidden, weight, None, True).backward(
        gradient.to(torch.float64 if dtype == torch.float64 else torch.float32)
    )
    exact = gradient.double().T @ hidden.double()
    if dtype == torch.float64:
        assert torch.equal(weight.grad, exact.float())
    else:
        assert relative_error(weight.grad, exact) < (1e-6 if weight_dtype else 4e-4)


def test_a_float32_weight_under_bfloat16_hidden_states_has_a_float32_gradient():
    problem = make_head_case(dtype=torch.bfloat16)
    hidden, weight, _ = problem.leaves()
    wide = weight.detach().float().requires_grad_()
    linear_policy_loss(hidden, wide, *problem.tensors).loss.backward()
    out = linear_policy_loss(hidden, weight, *problem.tensors)
    out.loss.backward(retain_graph=True)
    assert wide.grad.dtype == torch.float32
    assert torch.equal(wide.grad.bfloat16(), weight.grad)
    # Gradients are computed with the loss, and can be used once.
    with pytest.raises(RuntimeError, match="first backward"):
        out.loss.backward()
