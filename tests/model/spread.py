"""A fixed step through a small model, in one process or spread over ranks, which the processes of
`test_parallel_models.py` and `parallel_gpu.py` run."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

import torch
from builders import processes
from builders.documents import document_of
from builders.losses import PARAMETERS
from builders.models import small_policy
from builders.runs import CLOCK_COLUMNS
from builders.uncompiled import uncompiled_functions
from torch.distributed.tensor import DTensor

from pgtoolkit.batch import MicroBatch, Step, StepTotals, known_vectors, pack
from pgtoolkit.document import Document
from pgtoolkit.kernels.losses import Computation
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.corrections import correction_of
from pgtoolkit.losses.families import family_of
from pgtoolkit.losses.objective import Loss
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.settings import ParallelismSettings
from pgtoolkit.model.spread import parallelize
from pgtoolkit.ranks.layout import ONE_PROCESS, Layout
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.optimizer import LocalAdamW
from pgtoolkit.training.settings import OptimizerSettings

LENGTHS = (9, 1, 4, 21, 2, 6, 3, 11)
GROUPS = (0, 0, 1, 0, 2, 2, 2, 1)
MASKED = (4, 5)


def documents(vocabulary: int, scale: int) -> list[Document]:
    """Return documents of all kinds: long, of a single token, and without a completion."""
    generator = torch.Generator().manual_seed(3)
    documents = []
    for number, (length, group) in enumerate(zip(LENGTHS, GROUPS, strict=True)):
        length *= 1 if length == 1 else scale
        trained = torch.arange(length) >= (length if number in MASKED else max(1, length // 4))
        documents.append(
            document_of(
                torch.randint(0, vocabulary, (length,), generator=generator),
                trained,
                old_log_probs=(-3.0 + 0.2 * torch.randn(length, generator=generator))[trained],
                advantages=float(torch.randn((), generator=generator)),
                group=group,
                name=f"document {number}",
            )
        )
    generator = torch.Generator().manual_seed(4)
    sampled = []
    for document in documents:
        noise = 0.3 * torch.randn(document.num_trained, generator=generator)
        sampling_log_probs = document.old_log_probs + noise
        sampled.append(replace(document, sampling_log_probs=sampling_log_probs))
    return sampled


def totals(documents: list[Document]) -> StepTotals:
    trained = torch.tensor([document.num_trained for document in documents])
    tokens_per_group = torch.zeros(3, dtype=torch.int64).index_add(0, torch.tensor(GROUPS), trained)
    return StepTotals(
        len(documents), int(trained.sum()), int((trained == 0).sum()), 3, tokens_per_group
    )


def packed(documents: list[Document], known: tuple[str, ...] | None = None) -> MicroBatch:
    return pack(documents, known)


def micro_batches_of_rank(
    documents: list[Document], data_rank: int, data_size: int
) -> list[MicroBatch]:
    """Return a data rank's micro-batches. All ranks have four of them, the third of which is
    empty."""
    of_rank = documents[data_rank::data_size]
    known = known_vectors(*documents)
    return [packed(part, known) for part in (of_rank[:1], of_rank[1:4], [], of_rank[4:])]


class Module(PolicyGradientModule):
    """A policy under an objective: loss, aggregation, metrics, and perhaps divisor and
    correction."""

    def __init__(self, policy: Policy, layout: Layout, objective: dict):
        family = family_of(objective["loss"], **PARAMETERS[objective["loss"]])
        aggregation = aggregation_of(objective["aggregation"], objective.get("divisor"))
        correction = correction_of(objective.get("correction"))
        loss = Loss(
            family, aggregation, metrics=objective.get("metrics", "none"), correction=correction
        )
        optimizer = OptimizerSettings(learning_rate=1.0, max_grad_norm=0.5)
        super().__init__(policy, loss, Computation(check_finite=False), optimizer, 1, layout)

    def before_update(self):
        return {}


def step(policy: Policy, layout: Layout, scale: int = 1, **objective) -> dict[str, torch.Tensor]:
    """Return loss, norm of the gradient, metrics, and the full gradient of each parameter, of the
    fixed step."""
    module = Module(policy, layout, objective).to(next(policy.model.parameters()).device)
    # The fused optimizer, which is that of GPUs, on CPUs too.
    optimizer = LocalAdamW(module.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    module.optimizers = lambda use_pl_optimizer=True: optimizer
    module.manual_backward = lambda loss: loss.backward()
    step_documents = documents(policy.vocabulary_size, scale)
    if layout.world_size == 1:
        micro_batches = [packed(step_documents)]
    else:
        micro_batches = micro_batches_of_rank(
            step_documents, layout.rank_in("data_parallel"), layout.size("data_parallel")
        )
    step_data = Step(micro_batches, totals(step_documents), step_documents, {})
    metrics = module.training_step(step_data, 0)["metrics"]
    metrics["norm"] = metrics.pop("grad_norm")
    for name in ("num_micro_batches", *CLOCK_COLUMNS):
        metrics.pop(name, None)
    assert module.num_updates == 1
    numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
    return numbers | gradients(policy)


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """Return the full gradient of each trained parameter. All ranks of a parameter must call."""
    full = {}
    for name, parameter in policy.model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            is_spread = isinstance(gradient, DTensor)
            full[name] = gradient.full_tensor() if is_spread else gradient.clone()
    return full


@functools.cache
def spread_policy(
    kind: str, cut: tuple, shard: bool, sequence_parallel: bool
) -> tuple[Policy, Layout]:
    sizes = dict(cut)
    layout = processes.layout(**sizes)
    parallelism = ParallelismSettings(shard=shard, sequence_parallel=sequence_parallel, **sizes)
    return parallelize(small_policy(kind), layout, parallelism, sum(LENGTHS)), layout


def step_of_one_process(kind: str, **objective) -> dict[str, torch.Tensor]:
    with _compiling(kind):
        return step(small_policy(kind), ONE_PROCESS, **objective)


def _compiling(kind: str) -> contextlib.AbstractContextManager[None]:
    return uncompiled_functions() if "_compiled" in kind else contextlib.nullcontext()


def spread_steps(
    cases: list[tuple], cut: tuple, shard: bool, sequence_parallel: bool
) -> list[dict]:
    """Return this rank's results of the step of each (kind of model, objective)."""
    results = []
    for kind, objective in cases:
        with _compiling(kind):
            policy, layout = spread_policy(kind, cut, shard, sequence_parallel)
            results.append(step(policy, layout, **objective))
    return results
