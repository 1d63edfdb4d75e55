"""One fixed step through a small model, whole or spread over ranks: what the workers of the tests
of models do."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import torch
from builders import processes
from builders.losses import PARAMETERS
from builders.models import small_policy
from builders.runs import CLOCK_COLUMNS
from torch.distributed.tensor import DTensor

from pgtoolkit.batch import Document, MicroBatch, Step, StepTotals, known_vectors, pack
from pgtoolkit.kernels.losses import Computation
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.corrections import correction_of
from pgtoolkit.losses.families import family_of
from pgtoolkit.losses.objective import Loss
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.spread import parallelize
from pgtoolkit.ranks.layout import AXES, ONE_PROCESS, Layout
from pgtoolkit.training.accumulation import DynamicAccumulation
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.optimizer import LocalAdamW

LENGTHS = (9, 1, 4, 21, 2, 6, 3, 11)
GROUPS = (0, 0, 1, 0, 2, 2, 2, 1)
MASKED = (4, 5)


def documents(vocabulary: int, scale: int) -> list[Document]:
    """Documents of all kinds: long, of one token, of a prompt alone, and of an empty completion."""
    draw = torch.Generator().manual_seed(3)
    made = []
    for number, (length, group) in enumerate(zip(LENGTHS, GROUPS, strict=True)):
        length *= 1 if length == 1 else scale
        trained = torch.arange(length) >= (length if number in MASKED else max(1, length // 4))
        made.append(
            Document(
                tokens=torch.randint(0, vocabulary, (length,), generator=draw),
                loss_mask=trained,
                old_log_probs=(-3.0 + 0.2 * torch.randn(length, generator=draw))[trained],
                advantages=torch.randn((), generator=draw).expand(int(trained.sum())),
                group=group,
                name=f"document {number}",
            )
        )
    draw = torch.Generator().manual_seed(4)
    noise = [0.3 * torch.randn(one.num_trained, generator=draw) for one in made]
    return [
        replace(one, sampling_log_probs=one.old_log_probs + x)
        for one, x in zip(made, noise, strict=True)
    ]


def totals(documents: list[Document]) -> StepTotals:
    trained = torch.tensor([document.num_trained for document in documents])
    tokens_per_group = torch.zeros(3, dtype=torch.int64).index_add(0, torch.tensor(GROUPS), trained)
    return StepTotals(
        len(documents), int(trained.sum()), int((trained == 0).sum()), 3, tokens_per_group
    )


def packed(documents: list[Document], known: tuple[str, ...] | None = None) -> MicroBatch:
    return pack(documents, known)


def dealt(documents: list[Document], data_rank: int, data_size: int) -> list[MicroBatch]:
    """A data rank's micro-batches of the step, as many as the others'; one of them is empty."""
    own, known = documents[data_rank::data_size], known_vectors(*documents)
    return [packed(cut, known) for cut in (own[:1], own[1:4], [], own[4:])]


class Module(PolicyGradientModule):
    """A policy under an objective (loss, aggregation, metrics and, where it is not the default,
    divisor)."""

    def __init__(self, policy: Policy, layout: Layout, objective: dict):
        DynamicAccumulation.__init__(self, layout, max_grad_norm=0.5)
        self.policy, self.model, self._noted_mismatch = policy, policy.model, True
        family = family_of(objective["loss"], **PARAMETERS[objective["loss"]])
        aggregation = aggregation_of(objective["aggregation"], objective.get("divisor"))
        correction = correction_of(objective.get("correction"))
        self.loss = Loss(
            family, aggregation, metrics=objective.get("metrics", "none"), correction=correction
        )
        self.computation = Computation(check_finite=False)
        shard = getattr(policy, "sharded", False)
        no_reference = SimpleNamespace(update_every=None, update_rate=None, place="loss")
        self.config = SimpleNamespace(
            model=SimpleNamespace(fp32_lm_head=False),
            parallelism=SimpleNamespace(shard=shard),
            kl=no_reference,
        )

    def before_update(self):
        return {}


def step(policy: Policy, layout: Layout, scale: int = 1, **objective) -> dict[str, torch.Tensor]:
    """Loss, norm of the gradient, metrics, and the gradient of each parameter, whole, of the fixed
    step."""
    module = Module(policy, layout, objective).to(next(policy.model.parameters()).device)
    # as on a GPU, also without one
    optimizer = LocalAdamW(module.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    module.optimizers = lambda use_pl_optimizer=True: optimizer
    module.manual_backward = lambda loss: loss.backward()
    whole = documents(policy.vocabulary_size, scale)
    if layout.world_size == 1:
        micro_batches = [packed(whole)]
    else:
        micro_batches = dealt(whole, layout.rank_in("data_parallel"), layout.size("data_parallel"))
    metrics = module.training_step(Step(micro_batches, totals(whole), whole, {}), 0)["metrics"]
    metrics["norm"] = metrics.pop("grad_norm")
    for name in ("num_micro_batches", *CLOCK_COLUMNS):
        metrics.pop(name, None)
    assert module.num_updates == 1
    numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
    return numbers | gradients(policy)


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    trained = [
        (name, parameter)
        for name, parameter in policy.model.named_parameters()
        if parameter.requires_grad
    ]
    found = {name: parameter.grad for name, parameter in trained}
    return {
        name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in found.items()
    }


def configuration(
    sizes: dict[str, int], shard: bool, sequence_parallel: bool, scale: int = 1
) -> SimpleNamespace:
    """What `parallelize` reads; sizes: of the axes that are not 1."""
    parallelism = SimpleNamespace(
        shard=shard, sequence_parallel=sequence_parallel, **(dict.fromkeys(AXES, 1) | sizes)
    )
    return SimpleNamespace(
        parallelism=parallelism, accumulation=SimpleNamespace(max_tokens=scale * sum(LENGTHS))
    )


@functools.cache
def spread(kind: str, cut: tuple, shard: bool, sequence_parallel: bool) -> tuple[Policy, Layout]:
    sizes = dict(cut)
    layout = processes.layout(**sizes)
    return parallelize(
        small_policy(kind), layout, configuration(sizes, shard, sequence_parallel)
    ), layout


def whole_step(kind: str, **objective) -> dict[str, torch.Tensor]:
    return step(small_policy(kind), ONE_PROCESS, **objective)


def spread_steps(
    cases: list[tuple], cut: tuple, shard: bool, sequence_parallel: bool
) -> list[dict]:
    """The step of each (kind of model, objective) on these ranks; a rank returns what it found."""
    found = []
    for kind, objective in cases:
        policy, layout = spread(kind, cut, shard, sequence_parallel)
        found.append(step(policy, layout, **objective))
    return found
