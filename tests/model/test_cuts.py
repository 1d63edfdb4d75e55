"""Logits and gradients of documents, in whatever way they are cut and packed, are those that
transformers computes for each of them alone, in float64."""

from collections.abc import Callable

import pytest
import torch
from builders.models import small_policy
from model.test_packed_attention import completions
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3_moe import modeling_qwen3_moe

from pgtoolkit.batch import MicroBatch, pack
from pgtoolkit.model.architectures import Layer
from pgtoolkit.model.policy import Policy

CUTS: dict[str, Callable[[Policy, list[MicroBatch]], list[Tensor]]] = {
    "rows": lambda policy, parts: [policy.in_rows(part) for part in parts],
    "one row": lambda policy, parts: [policy.in_one_row(part) for part in parts],
    "any": lambda policy, parts: [policy.hidden_states(part) for part in parts],
}
"""Ways to the hidden states of micro-batches."""


@pytest.mark.parametrize(
    ("options", "cut", "num_parts", "shares"),
    [
        ("", "rows", 1, False),
        ("", "one row", 2, False),
        ("_checkpointed_by_document", "any", 1, False),
        ("_by_document", "any", 3, False),
        ("_by_document", "any", 1, True),
    ],
)
@pytest.mark.parametrize("kind", ["gemma3_tied", "mixture"])
def test_no_cut_changes_logits_or_gradients(monkeypatch, kind, options, cut, num_parts, shares):
    # transformers computes these in float32, where sums of gradients depend on their order.
    monkeypatch.setattr(Gemma3RMSNorm, "forward", norm_of_gemma3)
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeRMSNorm, "forward", norm_of_qwen3)
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeTopKRouter, "forward", router)
    policy = small_policy(kind)
    documents = completions(policy.vocabulary_size)
    alone = [policy.model(input_ids=document.tokens[None]).logits[0] for document in documents]
    predicting = [document.loss_mask.roll(-1) for document in documents]
    expected = torch.cat([x[mask] for x, mask in zip(alone, predicting, strict=True)])
    expected_gradients = gradients(policy, expected)
    policy = small_policy(f"{kind}_experts{options}")
    size = -(-len(documents) // num_parts)
    parts = [documents[start : start + size] for start in range(0, len(documents), size)]
    micro_batches = [pack(part, shares=shares) for part in parts]
    assert [len(part.shared) > 0 for part in micro_batches] == [shares] * num_parts
    states = zip(CUTS[cut](policy, micro_batches), micro_batches, strict=True)
    logits = torch.cat([policy.head(hidden[part.labels >= 0]) for hidden, part in states])
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients(policy, logits).items():
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=1e-12, atol=1e-12, msg=name
        )


def norm_of_gemma3(norm: Layer, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (1 + norm.weight)


def norm_of_qwen3(norm: Layer, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight


def router(gate: Layer, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = hidden @ gate.weight.T
    best = logits.topk(gate.top_k)
    return logits, best.values.softmax(-1), best.indices  # the same as norm_topk_prob


def gradients(policy: Policy, logits: Tensor) -> dict[str, Tensor]:
    """Return the gradient by each weight of a sum of logits with different factors."""
    factors = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    (logits * factors.sin()).sum().backward()
    named = policy.model.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}
