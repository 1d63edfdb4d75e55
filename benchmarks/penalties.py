"""What the penalties cost on this machine, and how exact they are: `python -m benchmarks.penalties`.

Forward and backward of bfloat16 logits that are given, and of the fused head, each with and without an entropy bonus
and a penalty against a reference (whose own forward pass is not in the times). Errors are those of the gradient against
float64 on fewer tokens; without a GPU all is small, and only says that it runs.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.kernels.measure import peak_bytes, seconds
from benchmarks.kernels.workloads import document_lengths
from pgtoolkit import kl, linear_policy_loss, policy_loss

PENALTIES = {
    "none": lambda ref: {},
    "entropy": lambda ref: {"entropy_coefficient": 0.01},
    "kl": lambda ref: {"kl": kl.KL("k3", 0.04), "ref_log_probs": ref},
    "both": lambda ref: {"entropy_coefficient": 0.01, "kl": kl.KL("k3", 0.04), "ref_log_probs": ref},
}


def problem(tokens: int, vocabulary: int, hidden: int, device: str) -> tuple:
    """(hidden states, head, options of the loss) of packed documents, 5 % of whose tokens GRPO clips."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    lengths = document_lengths(tokens, min(64, tokens // 4), min(2048, tokens))
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    states, head = draw(tokens, hidden).bfloat16(), (draw(vocabulary, hidden) / hidden**0.5).bfloat16()
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator, device=device)
    with torch.no_grad():
        zeros = torch.zeros(tokens, device=device)
        new = linear_policy_loss(states, head, labels, zeros, zeros, index).log_probs
    vectors = (labels, new + 0.1 * draw(tokens), draw(len(lengths))[index], index)
    return states, head, vectors, new + 0.2 * draw(tokens), len(lengths)


def call(states, head, vectors, number, fused: bool, loss: str, **penalty):
    """A function that computes loss and gradients, which it returns."""
    options = {"loss": loss, "num_documents": number, "check_finite": False, **penalty}
    leaves = [x.clone().requires_grad_() for x in ((states, head) if fused else (states @ head.T,))]

    def run():
        for leaf in leaves:
            leaf.grad = None
        (linear_policy_loss if fused else policy_loss)(*leaves, *vectors, **options).loss.backward()
        return [leaf.grad for leaf in leaves]

    return run


def error(tokens: int, vocabulary: int, hidden: int, device: str, fused: bool, loss: str, name: str) -> float:
    """The largest relative error of a gradient, against float64 from the same bfloat16 numbers."""
    states, head, vectors, ref, number = problem(tokens, vocabulary, hidden, device)
    found = call(states, head, vectors, number, fused, loss, **PENALTIES[name](ref), **exact_logits(fused))()
    inputs = (states.double(), head.double()) if fused else ((states @ head.T).double(),)
    leaves = [x.requires_grad_() for x in inputs]
    logits = leaves[0] @ leaves[1].T if fused else leaves[0]
    wide = [x.double() if x.is_floating_point() else x for x in vectors]
    options = {"loss": loss, "num_documents": number, "impl": "torch", **PENALTIES[name](ref.double())}
    policy_loss(logits, *wide, **options).loss.backward()
    return max(float((a.double() - b.grad).norm() / b.grad.norm()) for a, b in zip(found, leaves, strict=True))


def exact_logits(fused: bool) -> dict:
    """Logits in float32, so that a rounded logit clips what an exact one does."""
    return {"fp32_logits": True} if fused else {}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    large, small = ((8192, 151936, 4096), (512, 151936, 1024)) if device == "cuda" else ((256, 4096, 64),) * 2
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, a small version"
    print(f"{name}; torch {torch.__version__}; {large[0]} tokens, vocabulary {large[1]}, width {large[2]}, bfloat16")
    print(f"{'':20}{'penalty':10}{'ms':>9}{'of none':>9}{'MiB':>9}{'error':>10}")
    states, head, vectors, ref, number = problem(*large, device)
    for fused in (False, True):
        for loss in ("grpo", "gspo"):
            arguments = states, head, vectors, number, fused, loss
            calls = {one: call(*arguments, **penalty(ref)) for one, penalty in PENALTIES.items()}
            memory = {one: peak_bytes(run, device) for one, run in calls.items()}
            times = seconds(calls, 9, device)
            for one in PENALTIES:
                exact = error(*small, device, fused, loss, one)
                what = f"{'fused head' if fused else 'logits'}, {loss}"
                mebibytes = f"{memory[one] / 2**20:9.0f}" if memory[one] is not None else f"{'':9}"
                ratio = times[one] / times["none"]
                print(f"{what:20}{one:10}{1e3 * times[one]:9.3f}{ratio:9.3f}{mebibytes}{exact:10.1e}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
