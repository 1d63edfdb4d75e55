"""Without old log-probs each implementation takes the new ones, without gradient, in their place.

Without a GPU the Triton kernels run under Triton's interpreter.
"""

from dataclasses import replace

import pytest
import torch
from builders.losses import DEVICE, FAMILIES, assert_numbers_close, count_totals, make_head_case
from torch import Tensor

from pgtoolkit.batch import Tokens
from pgtoolkit.kernels.losses import (
    Computation,
    LMHead,
    PolicyLoss,
    log_probs_of_hidden,
    loss_of_hidden,
)
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.exchange import Ranks
from pgtoolkit.losses.kl import KL
from pgtoolkit.losses.objective import Loss


@pytest.mark.parametrize("impl", ["torch", "triton", "fused_linear"])
@pytest.mark.parametrize(
    ("family", "kl"), [("grpo", None), ("gspo", None), ("reinforce", "k3_ratio")]
)
def test_without_old_log_probs_loss_and_gradient_are_those_of_equal_ones(impl, family, kl):
    problem = make_head_case(dtype=torch.float32)
    hidden, weight, bias = (
        x.float().to(DEVICE) for x in (problem.hidden, problem.weight, problem.bias)
    )
    case = problem.case
    labels, old, advantages, documents = (x.to(DEVICE) for x in case.tensors[1:])
    tokens = Tokens(
        labels=labels,
        advantages=advantages,
        document_index=documents,
        num_documents=case.num_documents,
        sampling_log_probs=old,
        ref_log_probs=old - 0.1,
        group_index=case.group_index.to(DEVICE),
    )
    loss = Loss(
        FAMILIES[family], aggregation_of("token_mean"), 0.7, "basic", None, 0.0, kl and KL(kl, 0.1)
    )
    method = Computation(impl)
    totals = count_totals(case)

    def loss_and_gradients(tokens: Tokens) -> tuple[PolicyLoss, list[Tensor]]:
        leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
        out = loss_of_hidden(leaves[0], LMHead(*leaves[1:]), tokens, totals, loss, Ranks(), method)
        out.loss.backward()
        return out, [x.grad for x in leaves]

    new, _ = log_probs_of_hidden(hidden, LMHead(weight, bias), tokens, loss, Ranks(), method)
    out, gradients = loss_and_gradients(tokens)
    expected, expected_gradients = loss_and_gradients(replace(tokens, old_log_probs=new))
    assert_numbers_close(out.loss, expected.loss, 1e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert expected_gradient.abs().max() > 1e-3
        assert_numbers_close(gradient, expected_gradient, 1e-5)
    assert out.metrics.keys() == expected.metrics.keys()
    assert expected.metrics.keys() >= {"kl_old_sampling", "kl_ref", "max_ratio_new_old"}
    for name, value in expected.metrics.items():
        assert_numbers_close(out.metrics[name], value, 1e-5, name)
