"""The cases of every loss family beside GRPO and GSPO: given logits, and the fused head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from benchmarks.kernels.measure import peak_bytes, seconds
from benchmarks.kernels.sections import Row
from benchmarks.kernels.workloads import document_lengths, head_matrices, make_workload
from pgtoolkit import linear_policy_loss, policy_loss
from pgtoolkit.kernels.given_logits import choose_implementation
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.losses.function import FunctionFamily

_OF_PIECES = [name for name, family in FAMILIES.items() if not issubclass(family, FunctionFamily)]
"""Losses that a piece of a step has; those of whole groups take two passes."""
_CASES = {(name, "defaults"): {} for name in _OF_PIECES} | {
    ("grpo", "dual_clip=3"): {"dual_clip": 3.0}
}


def every_family(
    tokens: int, hidden_size: int, vocabulary: int, device: str, repetitions: int
) -> Iterator[Row]:
    """Yield rows of forward and backward of each family, all in turns.

    share: its time over that of the family it is compared with. That is `grpo`, and for a family by
    document on given logits `gspo`, which reads them twice as well.
    """
    hidden, weight = head_matrices(tokens, hidden_size, vocabulary, device)
    with torch.no_grad():
        logits = hidden @ weight.T
    best = choose_implementation("auto", logits)
    lengths = document_lengths(tokens, *((64, 2048) if tokens > 2048 else (4, 64)))
    workload = make_workload(
        "grpo",
        lambda labels: best.forward(logits, labels, 1.0, False)[0],
        vocabulary,
        lengths,
        device,
    )
    leaf = logits.requires_grad_()
    total = torch.zeros(vocabulary, hidden_size, device=device)

    def of_logits(loss: str, parameters: dict) -> Callable:
        chosen = replace(workload, loss=loss)

        def call():
            leaf.grad = None
            out = policy_loss(
                leaf, *chosen.tensors, **chosen.options, **parameters, check_finite=False
            )
            out.loss.backward()

        return call

    def of_the_head(loss: str, parameters: dict) -> Callable:
        chosen = replace(workload, loss=loss)
        options = (
            chosen.options | parameters | {"counts": chosen.counts(), "weight_gradient": total}
        )

        def call():
            hidden.grad = weight.grad = None
            out = linear_policy_loss(
                hidden, weight, *chosen.tensors, **options, metrics="basic", check_finite=False
            )
            out.loss.backward()

        return call

    for name, make in (
        (best.__name__.rpartition(".")[2].removesuffix("_passes"), of_logits),
        ("fused_linear", of_the_head),
    ):
        calls = {case: make(case[0], parameters) for case, parameters in _CASES.items()}
        times = seconds(calls, repetitions, device)
        for (loss, case), call in calls.items():
            beside = "gspo" if name != "fused_linear" and FAMILIES[loss]().by_document else "grpo"
            leaf.grad = hidden.grad = None
            extra = peak_bytes(call, device)
            yield Row(
                "families",
                name,
                loss,
                tokens,
                vocabulary,
                case,
                times[loss, case] * 1e3,
                None,
                times[loss, case] / times[beside, "defaults"],
                None if extra is None else extra / 1e6,
            )
        leaf.grad = None
