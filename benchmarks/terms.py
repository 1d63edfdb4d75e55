"""Measure what penalties and corrections cost on this machine, and how exact they are.

    python -m benchmarks.terms

The cases are forward and backward of bfloat16 logits that are given, and of the fused head, each
with an entropy bonus, a penalty against a reference (whose own forward pass is not in the times)
and every correction, against the same loss without; and with score centering by 32 tokens. Errors
are those of the gradient against float64 on fewer tokens; without a GPU all is small and in
float32.
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
_CENTERED = {"none": {}, "score centering": {"score_centering": True}}
CASES = {"grpo": TERMS, "gspo": TERMS, "cispo": _CENTERED, "reinforce": _CENTERED}
_WIDTH = 32
"""Tokens of the sampler at each position, for score centering."""


def main() -> None:
    repetitions, device, large, small, machine = setup("terms", __doc__)
    print(f"{machine}; {large[0]} tokens, width {large[1]}, vocabulary {large[2]}")
    print(f"{'':18}{'metrics':9}{'':20}{'ms':>9}{'of none':>9}{'MiB':>8}{'error':>10}")
    states, head, workload, top = problem(*large, device)
    few = problem(*small, device)
    for fused in (False, True):
        leaves = (states, head) if fused else ((states @ head.T).detach().requires_grad_(),)
        for loss, terms in CASES.items():
            errors = {name: error(*few, fused, loss, term) for name, term in terms.items()}
            for level in ("none", "basic"):
                calls = {
                    name: call(leaves, workload, top, loss, term, metrics=level)
                    for name, term in terms.items()
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
) -> tuple[torch.Tensor, torch.Tensor, Workload, dict[str, torch.Tensor]]:
    """Return hidden states, head, packed documents, of whose tokens GRPO clips 5 %, and the
    likeliest tokens of a sampler close to the policy, as keywords of the loss."""
    hidden, weight = head_matrices(tokens, hidden_size, vocabulary, device)
    lengths = document_lengths(tokens, *((64, 2048) if tokens > 2048 else (4, 64)))
    with torch.no_grad():
        logits = hidden @ weight.T

    def log_probs_of(labels: torch.Tensor) -> torch.Tensor:
        return choose_implementation("auto", logits).forward(logits, labels, 1.0, False)[0]

    workload = make_workload("grpo", log_probs_of, vocabulary, lengths, device)
    values, ids = logits.topk(_WIDTH)
    ones = torch.ones_like(workload.labels)
    normalizer = choose_implementation("auto", logits).forward(logits, ones, 1.0, False)[1]
    generator = torch.Generator().manual_seed(2)
    noise = 0.05 * torch.randn(*values.shape, generator=generator).to(normalizer)
    top = values - normalizer.sum(0)[:, None] + noise - 0.05
    old = workload.old_log_probs[:, None]
    top = torch.where(ids == workload.labels[:, None], old, top)
    return hidden, weight, workload, {"sampling_top_ids": ids, "sampling_top_log_probs": top}


def call(leaves: tuple, workload: Workload, top: dict, loss: str, term: dict, **options):
    """Return a function that computes the loss and returns its gradients.

    leaves: (hidden, weight) or (logits,). top: from `problem`.
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
    if "score_centering" in term:
        options |= top
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
    top: dict,
    fused: bool,
    loss: str,
    term: dict,
) -> float:
    """Return the largest relative error of a gradient, against float64 from the same numbers."""
    if fused:
        # With logits in float32: a rounded logit does not clip all that an exact one does.
        gradients = call((hidden, weight), workload, top, loss, term, fp32_logits=True)()
        leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        logits = leaves[0] @ leaves[1].T
    else:
        rounded = (hidden @ weight.T).detach().requires_grad_()
        gradients = call((rounded,), workload, top, loss, term)()
        logits = rounded.detach().double().requires_grad_()
        leaves = [logits]
    by_logits = logits.detach().requires_grad_()
    call((by_logits,), workload, top, loss, term, impl="torch")()
    exact = torch.autograd.grad(logits, leaves, by_logits.grad) if fused else [by_logits.grad]
    return max(
        float((a.double() - b).norm() / b.norm()) for a, b in zip(gradients, exact, strict=True)
    )


if __name__ == "__main__":
    main()
