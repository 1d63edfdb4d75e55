"""Measure what penalties and corrections cost on this machine, and how exact they are.

    python -m benchmarks.terms

The cases are forward and backward of bfloat16 logits that are given, and of the fused head, each
with an entropy bonus, a penalty against a reference (whose own forward pass is not in the times)
and every correction, against the same loss without. Errors are those of the gradient against
float64 on fewer tokens; without a GPU all is small and in float32.
"""

from __future__ import annotations

import torch

from benchmarks.kernels.measure import peak_bytes, seconds, setup
from benchmarks.kernels.workloads import Workload, document_lengths, head_matrices, make_workload
from pgtoolkit import corrections, kl, linear_policy_loss, policy_loss
from pgtoolkit.kernels.given_logits import choose_implementation

_KL = kl.KL("k3", 0.04)
# A threshold at which the workload's documents lie on both sides.
_CORRECTIONS = dict.fromkeys(corrections.CORRECTIONS) | {
    "off_policy_mask": corrections.OffPolicyMask(threshold=5e-5)
}
TERMS = {
    "none": {},
    "entropy": {"entropy_coefficient": 0.01},
    "kl": {"kl": _KL, "ref_log_probs": 0.2},
    "entropy and kl": {"entropy_coefficient": 0.01, "kl": _KL, "ref_log_probs": 0.2},
    "sampling log-probs": {"sampling_log_probs": 0.05},
    **{
        name: {"sampling_log_probs": 0.05, "correction": correction or name}
        for name, correction in _CORRECTIONS.items()
    },
}
"""What each case adds to the loss. Log-probs: their standard deviation from the old ones."""


def main() -> None:
    repetitions, device, large, small, machine = setup("terms", __doc__)
    print(f"{machine}; {large[0]} tokens, width {large[1]}, vocabulary {large[2]}")
    print(f"{'':18}{'metrics':9}{'':20}{'ms':>9}{'of none':>9}{'MiB':>8}{'error':>10}")
    states, head, workload = problem(*large, device)
    few = problem(*small, device)
    for fused in (False, True):
        leaves = (states, head) if fused else ((states @ head.T).detach().requires_grad_(),)
        for loss in ("grpo", "gspo"):
            errors = {name: error(*few, fused, loss, term) for name, term in TERMS.items()}
            for level in ("none", "basic"):
                calls = {
                    name: call(leaves, workload, loss, term, metrics=level)
                    for name, term in TERMS.items()
                }
                memory = {name: peak_bytes(run, device) for name, run in calls.items()}
                times = seconds(calls, repetitions, device)
                for name, time in times.items():
                    case = f"{'fused head' if fused else 'logits'}, {loss}"
                    mebibytes = "" if memory[name] is None else f"{memory[name] / 2**20:.0f}"
                    ratio = f"{time / times['none']:9.3f}{mebibytes:>8}{errors[name]:10.1e}"
                    print(f"{case:18}{level:9}{name:20}{1e3 * time:9.3f}{ratio}", flush=True)


def problem(
    tokens: int, hidden_size: int, vocabulary: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, Workload]:
    """Return hidden states, head, and packed documents, of whose tokens GRPO clips 5 %."""
    hidden, weight = head_matrices(tokens, hidden_size, vocabulary, device)
    lengths = document_lengths(tokens, *((64, 2048) if tokens > 2048 else (4, 64)))
    with torch.no_grad():
        logits = hidden @ weight.T

    def log_probs_of(labels: torch.Tensor) -> torch.Tensor:
        return choose_implementation("auto", logits).forward(logits, labels, 1.0, False)[0]

    return hidden, weight, make_workload("grpo", log_probs_of, vocabulary, lengths, device)


def call(leaves: tuple, workload: Workload, loss: str, term: dict, **options):
    """Return a function that computes the loss and returns its gradients.

    leaves: (hidden, weight) or (logits,).
    """
    options |= {
        "loss": loss,
        "num_documents": workload.num_documents,
        "check_finite": False,
        **term,
    }
    for seed, name in enumerate(("ref_log_probs", "sampling_log_probs")):
        if name in term:
            old = workload.old_log_probs
            noise = torch.randn(len(old), generator=torch.Generator().manual_seed(seed)).to(old)
            options[name] = old + term[name] * noise
    if len(leaves) == 2:
        options["counts"] = workload.counts()
    compute = policy_loss if len(leaves) == 1 else linear_policy_loss

    def run():
        for leaf in leaves:
            leaf.grad = None
        compute(*leaves, *workload.tensors, **options).loss.backward()
        return [leaf.grad for leaf in leaves]

    return run


def error(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    workload: Workload,
    fused: bool,
    loss: str,
    term: dict,
) -> float:
    """Return the largest relative error of a gradient, against float64 from the same numbers."""
    if fused:
        # With logits in float32: a rounded logit does not clip all that an exact one does.
        gradients = call((hidden, weight), workload, loss, term, fp32_logits=True)()
        leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        logits = leaves[0] @ leaves[1].T
    else:
        rounded = (hidden @ weight.T).detach().requires_grad_()
        gradients = call((rounded,), workload, loss, term)()
        logits = rounded.detach().double().requires_grad_()
        leaves = [logits]
    by_logits = logits.detach().requires_grad_()
    call((by_logits,), workload, loss, term, impl="torch")()
    exact = torch.autograd.grad(logits, leaves, by_logits.grad) if fused else [by_logits.grad]
    return max(
        float((a.double() - b).norm() / b.norm()) for a, b in zip(gradients, exact, strict=True)
    )


if __name__ == "__main__":
    main()
