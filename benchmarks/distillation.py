"""What the full KL against a teacher costs on this machine, and how exact it is: `python -m
benchmarks.distillation`.

Forward and backward from the hidden states of student and teacher, with the gradients of the
student's hidden states
and head: by the fused head, alone and beside GRPO's surrogate; by TRL's DistillationTrainer and
    GKDTrainer, as far as
TRL is installed; and the four matrix products that any of them needs, in the chunks of the fused
head. Errors are those of loss and gradients against float64 on fewer tokens; without a GPU all is
small and in float32.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels.measure import peak_bytes, seconds, setup
from benchmarks.terms import problem
from pgtoolkit import kl, linear_policy_loss
from pgtoolkit.kernels.chunks import _cuts, default_logits_memory_mb, rows_within
from pgtoolkit.kernels.products import accumulate_matmul, matmul

KINDS = {"full_reverse": 1.0, "full_forward": 0.0}
"""With TRL's `beta`."""


def main() -> None:
    repetitions, device, large, small, machine = setup("distillation", __doc__)
    trl = importlib.metadata.version("trl") if importlib.util.find_spec("trl") else "none"
    print(f"{machine}; TRL {trl}")
    print(f"{large[0]} tokens, both models of width {large[1]}, vocabulary {large[2]}")
    print(
        f"{'':14}{'':34}{'ms':>9}{'of products':>13}{'MiB':>8}"
        f"{'loss error':>12}{'gradient error':>16}"
    )
    few, many = step(*small, device), step(*large, device)
    for kind in KINDS:
        exact = errors_against(*few[:4], few[4], kind)
        errors = {name: exact(run, name) for name, run in calls(*few, kind).items()}
        timed = calls(*many, kind)
        memory = {}
        for name, run in timed.items():
            many[0].grad = many[1].grad = None  # else they would be there before, and not after
            memory[name] = peak_bytes(run, device)
        times = seconds(timed, repetitions, device)
        for name, time in times.items():
            mebibytes = "" if memory[name] is None else f"{memory[name] / 2**20:.0f}"
            of_products = time / times["four products"]
            wrong = "" if errors[name] is None else "".join(f"{x:14.1e}" for x in errors[name])
            print(
                f"{kind:14}{name:34}{1e3 * time:9.3f}{of_products:13.3f}{mebibytes:>8}{wrong}",
                flush=True,
            )


def step(tokens: int, width: int, vocabulary: int, device: str):
    """(hidden, weight) of the student, which want gradients, (hidden, weight) of the teacher, and
    documents."""
    hidden, weight, workload = problem(tokens, width, vocabulary, device)
    draw = torch.Generator(device).manual_seed(3)

    def moved(values: Tensor) -> Tensor:
        noise = torch.randn(values.shape, generator=draw, device=device, dtype=values.dtype)
        return values.detach() + 0.3 * values.detach().std() * noise

    return hidden, weight, moved(hidden), moved(weight), workload


def calls(hidden, weight, ref_hidden, ref_weight, workload, kind: str) -> dict[str, Callable]:
    """Functions that return (loss, gradients of hidden and weight)."""

    def differentiated(loss_of: Callable[[], Tensor]) -> Callable:
        def run():
            hidden.grad = weight.grad = None
            loss = loss_of()
            loss.backward()
            return loss.detach(), [hidden.grad, weight.grad]

        return run

    def ours(family: str, advantages: Tensor, **more):
        labels, old, _, index = workload.tensors
        options = {
            "loss": family,
            "aggregation": "token_mean",
            "kl": kl.KL(kind, 1.0),
            "check_finite": False,
        }
        options |= {
            "ref_hidden": ref_hidden,
            "ref_lm_head_weight": ref_weight,
            "counts": workload.counts(),
            **more,
        }
        tensors = hidden, weight, labels, old, advantages, index
        return linear_policy_loss(*tensors, num_documents=workload.num_documents, **options).loss

    advantages = workload.tensors[2]
    found = {
        "four products": products(hidden, weight, ref_hidden, ref_weight),
        "fused head": differentiated(lambda: ours("reinforce", torch.zeros_like(advantages))),
        "fused head, float32 logits": differentiated(
            lambda: ours("reinforce", torch.zeros_like(advantages), fp32_logits=True)
        ),
        "fused head, with GRPO's surrogate": differentiated(lambda: ours("grpo", advantages)),
    }
    if importlib.util.find_spec("trl"):
        from trl.experimental.gkd import GKDTrainer
        from trl.trainer.distillation_trainer import _chunked_divergence_loss

        mask, beta = torch.ones(1, len(hidden), device=hidden.device), KINDS[kind]

        def chunked():
            states = hidden[None], ref_hidden[None]
            return _chunked_divergence_loss(
                *states, weight, ref_weight, mask, beta, num_items_in_batch=len(hidden)
            )[0]

        def whole():
            with torch.no_grad():
                ref_logits = ref_hidden @ ref_weight.T
            given = (hidden @ weight.T)[None], ref_logits[None]
            return GKDTrainer.generalized_jsd_loss(
                *given, beta=beta, num_items_in_batch=len(hidden)
            )

        found["TRL's DistillationTrainer"] = differentiated(chunked)
        found["TRL's GKDTrainer, all logits"] = differentiated(whole)
    return found


def products(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Callable:
    """The logits of both models, and the two products that make gradients of the student's, chunk
    by chunk."""
    rows = rows_within(default_logits_memory_mb(hidden.device), 2 * len(weight), hidden.dtype)
    with torch.no_grad():
        weight, hidden = weight.detach(), hidden.detach()

    def run():
        buffers = [hidden.new_empty(min(rows, len(hidden)), len(weight)) for _ in range(2)]
        total, gradient = torch.zeros_like(weight, dtype=torch.float32), torch.empty_like(hidden)
        for low, high in _cuts(0, len(hidden), rows):
            own, its = hidden[low:high], ref_hidden[low:high]
            logits = matmul(own, weight.T, buffers[0][: len(own)])
            matmul(its, ref_weight.T, buffers[1][: len(own)])
            accumulate_matmul(total, logits.T, own, 1.0)
            gradient[low:high] = logits @ weight
        return total, [gradient]

    return run


def errors_against(hidden, weight, ref_hidden, ref_weight, workload, kind: str) -> Callable:
    """(run, name) -> relative errors of a call's loss and of the worse of its gradients; None of
    products."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    p, f = (
        x.log_softmax(-1)
        for x in (leaves[0] @ leaves[1].T, ref_hidden.double() @ ref_weight.double().T)
    )
    rows = p.exp() * (p - f) if kind == "full_reverse" else f.exp() * (f - p)
    penalty = rows.sum() / len(rows)

    def surrogate() -> Tensor:
        """GRPO's, of float64, whose tokens clip where those of rounded logits do but for a few."""
        labels, old, advantages, index = workload.tensors
        given = *leaves, labels, old.double(), advantages.double(), index
        options = {
            "loss": "grpo",
            "aggregation": "token_mean",
            "num_documents": workload.num_documents,
        }
        return linear_policy_loss(*given, **options, impl="torch").loss

    def errors(run, name: str) -> tuple[float, float] | None:
        if name == "four products":
            return None
        value = penalty + surrogate() if "surrogate" in name else penalty
        exact = torch.autograd.grad(value, leaves, retain_graph=True)
        loss, found = run()
        worst = max(
            float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)
        )
        value = float(value.detach())
        return abs(float(loss) - value) / abs(value), worst

    return errors


if __name__ == "__main__":
    main()
