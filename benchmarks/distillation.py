"""Measure what the full KL against a teacher costs on this machine, and how exact it is.

    python -m benchmarks.distillation

Each row is a forward and a backward pass from the hidden states of student and teacher, with the
gradients of the student's hidden states and head: by the fused head, alone and beside GRPO's
surrogate; by TRL's DistillationTrainer and GKDTrainer, as far as TRL is installed; and the four
matrix products that any of them needs, in the chunks of the fused head. Errors are those of loss
and gradients against float64 on fewer tokens; without a GPU all is small and in float32.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels.measure import peak_bytes, seconds, setup
from benchmarks.kernels.workloads import Workload
from benchmarks.terms import problem
from pgtoolkit import kl, linear_policy_loss
from pgtoolkit.kernels.chunks import _cuts, default_logits_memory_mb, rows_within
from pgtoolkit.kernels.products import accumulate_matmul, matmul

KINDS = {"full_reverse": 1.0, "full_forward": 0.0}
"""TRL's `beta`, by kind of KL."""


def main() -> None:
    repetitions, device, large, small, machine = setup("distillation", __doc__)
    trl = importlib.metadata.version("trl") if importlib.util.find_spec("trl") else "none"
    print(f"{machine}; TRL {trl}")
    print(f"{large[0]} tokens, both models of width {large[1]}, vocabulary {large[2]}")
    print(
        f"{'':14}{'':34}{'ms':>9}{'of products':>13}{'MiB':>8}"
        f"{'loss error':>12}{'gradient error':>16}"
    )
    small_step = step(*small, device)
    large_step = step(*large, device)
    hidden, weight = large_step[:2]
    for kind in KINDS:
        exact = errors_against(*small_step, kind)
        errors = {name: exact(run, name) for name, run in calls(*small_step, kind).items()}
        timed = calls(*large_step, kind)
        memory = {}
        for name, run in timed.items():
            # A gradient that is there already would not count in the peak.
            hidden.grad = None
            weight.grad = None
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


def step(
    tokens: int, width: int, vocabulary: int, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Workload]:
    """Return hidden states and head of the student and of the teacher, and packed documents.

    Those of the student want gradients.
    """
    hidden, weight, workload = problem(tokens, width, vocabulary, device)
    draw = torch.Generator(device).manual_seed(3)

    def moved(values: Tensor) -> Tensor:
        noise = torch.randn(values.shape, generator=draw, device=device, dtype=values.dtype)
        return values.detach() + 0.3 * values.detach().std() * noise

    return hidden, weight, moved(hidden), moved(weight), workload


def calls(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    workload: Workload,
    kind: str,
) -> dict[str, Callable]:
    """Return functions, by name, that return the loss and the gradients of hidden and weight."""

    def differentiated(loss_of: Callable[[], Tensor]) -> Callable:
        def run():
            hidden.grad = None
            weight.grad = None
            loss = loss_of()
            loss.backward()
            return loss.detach(), [hidden.grad, weight.grad]

        return run

    def ours(family: str, advantages: Tensor, **more):
        labels, old, _, index = workload.tensors
        return linear_policy_loss(
            hidden,
            weight,
            labels,
            old,
            advantages,
            index,
            num_documents=workload.num_documents,
            loss=family,
            aggregation="token_mean",
            kl=kl.KL(kind, 1.0),
            check_finite=False,
            ref_hidden=ref_hidden,
            ref_lm_head_weight=ref_weight,
            counts=workload.counts(),
            **more,
        ).loss

    advantages = workload.tensors[2]
    functions = {
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

        mask = torch.ones(1, len(hidden), device=hidden.device)
        beta = KINDS[kind]

        def chunked() -> Tensor:
            return _chunked_divergence_loss(
                hidden[None],
                ref_hidden[None],
                weight,
                ref_weight,
                mask,
                beta,
                num_items_in_batch=len(hidden),
            )[0]

        def all_logits() -> Tensor:
            with torch.no_grad():
                ref_logits = ref_hidden @ ref_weight.T
            logits = hidden @ weight.T
            return GKDTrainer.generalized_jsd_loss(
                logits[None], ref_logits[None], beta=beta, num_items_in_batch=len(hidden)
            )

        functions["TRL's DistillationTrainer"] = differentiated(chunked)
        functions["TRL's GKDTrainer, all logits"] = differentiated(all_logits)
    return functions


def products(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Callable:
    """Return a function of the four matrix products that every way needs, chunk by chunk.

    They are the logits of both models, and the two that make gradients of the student's logits.
    """
    rows = rows_within(default_logits_memory_mb(hidden.device), 2 * len(weight), hidden.dtype)
    with torch.no_grad():
        weight = weight.detach()
        hidden = hidden.detach()

    def run():
        buffers = [hidden.new_empty(min(rows, len(hidden)), len(weight)) for _ in range(2)]
        total = torch.zeros_like(weight, dtype=torch.float32)
        gradient = torch.empty_like(hidden)
        for low, high in _cuts(0, len(hidden), rows):
            states = hidden[low:high]
            logits = matmul(states, weight.T, buffers[0][: len(states)])
            matmul(ref_hidden[low:high], ref_weight.T, buffers[1][: len(states)])
            accumulate_matmul(total, logits.T, states, 1.0)
            gradient[low:high] = logits @ weight
        return total, [gradient]

    return run


def errors_against(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    workload: Workload,
    kind: str,
) -> Callable:
    """Return a function of a call and its name that returns the call's relative errors.

    They are those of the loss and of the worse of its gradients; None for the matrix products.
    """
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    student = (leaves[0] @ leaves[1].T).log_softmax(-1)
    teacher = (ref_hidden.double() @ ref_weight.double().T).log_softmax(-1)
    if kind == "full_reverse":
        rows = student.exp() * (student - teacher)
    else:
        rows = teacher.exp() * (teacher - student)
    penalty = rows.sum() / len(rows)

    def surrogate() -> Tensor:
        """Return GRPO's in float64. All but a few tokens clip as those of rounded logits do."""
        labels, old, advantages, index = workload.tensors
        return linear_policy_loss(
            *leaves,
            labels,
            old.double(),
            advantages.double(),
            index,
            loss="grpo",
            aggregation="token_mean",
            num_documents=workload.num_documents,
            impl="torch",
        ).loss

    def errors(run: Callable, name: str) -> tuple[float, float] | None:
        if name == "four products":
            return None
        value = penalty + surrogate() if "surrogate" in name else penalty
        exact = torch.autograd.grad(value, leaves, retain_graph=True)
        loss, gradients = run()
        worst = max(
            float((a.double() - b).norm() / b.norm()) for a, b in zip(gradients, exact, strict=True)
        )
        value = float(value.detach())
        return abs(float(loss) - value) / abs(value), worst

    return errors


if __name__ == "__main__":
    main()
