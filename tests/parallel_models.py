"""What the workers of test_parallel_models.py do: one fixed step through a small model, whole or spread over ranks."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pgtoolkit.batch import Document, MicroBatch, StepTotals
from pgtoolkit.kernels.losses import Computation, loss_of_hidden
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.families import family_of
from pgtoolkit.losses.objective import Loss
from pgtoolkit.model import attention
from pgtoolkit.model.norms import clip_gradients, gradient_groups
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.sequence_data import local_tokens
from pgtoolkit.model.spread import parallelize
from pgtoolkit.ranks.layout import Layout
from pgtoolkit.rollouts.packing import pack
from tests import worlds

VOCABULARY = 19  # divides by no number of ranks
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
    return made


def totals(documents: list[Document]) -> StepTotals:
    trained = torch.tensor([document.num_trained for document in documents])
    tokens_per_group = torch.zeros(3, dtype=torch.int64).index_add(0, torch.tensor(GROUPS), trained)
    return StepTotals(len(documents), int(trained.sum()), int((trained == 0).sum()), 3, tokens_per_group)


def packed(documents: list[Document]) -> MicroBatch:
    return pack(documents, [document.group for document in documents])


def dealt(documents: list[Document], data_rank: int, data_size: int) -> list[MicroBatch]:
    """A data rank's micro-batches of the step, as many as the others'; one of them is empty."""
    own = documents[data_rank::data_size]
    return [packed(cut) for cut in (own[:1], own[1:4], [], own[4:])]


def build(kind: str) -> Policy:
    """A small model in float64, the same in each process."""
    import transformers

    tied = kind.endswith("_tied")
    shape = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "tie_word_embeddings": tied}
    torch.manual_seed(7)
    if kind.startswith("gpt2"):
        nothing = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(
            **shape, n_head=4, n_positions=24, **nothing, bos_token_id=None, eos_token_id=None
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}[kind.partition("_")[0]]
        make, configure = getattr(transformers, f"{name}ForCausalLM"), getattr(transformers, f"{name}Config")
        window = {"sliding_window": 5} if name == "Mistral" else {}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
        model = make(
            configure(**shape, **heads, **window, intermediate_size=24, max_position_embeddings=64, pad_token_id=2)
        )
        if "_checkpointed" in kind:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for parameter in model.parameters():  # also biases and norms, which begin as constants
        parameter.data += 0.2 * torch.randn(parameter.shape)
    if kind.endswith("_by_document"):
        attend_by_document(model)
    return Policy(model.double().train(), None)


def attend_by_document(model) -> None:
    """Give it the attention that it would have on a GPU, here through the loop over documents."""
    attention.register(attention.NAME, attention.attention)
    model.set_attn_implementation(attention.NAME)


def loss_of(mine: MicroBatch, inputs: tuple, totals: StepTotals, objective: dict):
    """objective: loss, aggregation and, where they are not the defaults, divisor and metrics."""
    hidden, head, ranks = inputs
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    mine = replace(mine, old_log_probs=mine.old_log_probs.to(dtype), advantages=mine.advantages.to(dtype))
    family = family_of(objective["loss"], epsilon_low=0.3, epsilon_high=0.4)
    aggregation = aggregation_of(objective["aggregation"], objective.get("divisor"))
    what = Loss(family, aggregation, metrics=objective.get("metrics", "none"))
    return loss_of_hidden(hidden, head, mine, totals, what, ranks, Computation(check_finite=False))


def step(policy: Policy, layout: Layout, scale: int = 1, **objective) -> dict[str, torch.Tensor]:
    """Loss, norm of the gradient, metrics, and the gradient of each parameter, whole, of the fixed step."""
    policy.model.zero_grad()
    device = next(policy.model.parameters()).device
    whole = documents(policy.vocabulary_size, scale)
    count = totals(whole)
    if layout.world_size == 1:
        micro_batches = [packed(whole)]
    else:
        micro_batches = dealt(whole, layout.rank_in("data_parallel"), layout.size("data_parallel"))
    micro_batches = [local_tokens(micro_batch, layout) for micro_batch in micro_batches]
    if getattr(policy, "pipeline", None) is not None:
        outputs = policy.pipeline.run(
            micro_batches, lambda mine, hidden: loss_of(mine, policy.with_head(hidden), count, objective)
        )
    else:
        outputs = []
        for number, mine in enumerate(micro_batches):
            mine = mine.to(device)
            if layout.world_size > 1:
                policy.synchronise_gradients(number == len(micro_batches) - 1)
            outputs.append(loss_of(mine, policy.loss_inputs(mine), count, objective))
            outputs[-1].loss.backward()
    metrics = {}
    if outputs:  # a pipeline's stages but the last have none
        sums = functools.reduce(lambda a, b: a.merge(b), [out.metric_sums for out in outputs])
        loss = torch.stack([out.loss.detach() for out in outputs]).sum()
        loss, sums = sums.all_reduce(loss, layout.loss_group)
        metrics = {"loss": loss} | sums.finalize(count)
    for group, parameters in gradient_groups(policy, layout):
        for parameter in parameters:
            dist.all_reduce(local_part(parameter.grad), group=group)
    norm = clip_gradients(policy.model.parameters(), layout, 0.5)
    return {"norm": norm} | metrics | gradients(policy)


def local_part(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in found.items()}


def configuration(shard: bool, sequence_parallel: bool, scale: int = 1) -> SimpleNamespace:
    parallelism = SimpleNamespace(shard=shard, sequence_parallel=sequence_parallel)
    return SimpleNamespace(parallelism=parallelism, accumulation=SimpleNamespace(max_tokens=scale * sum(LENGTHS)))


@functools.cache
def spread(kind: str, cut: tuple, shard: bool, sequence_parallel: bool) -> tuple[Policy, Layout]:
    layout = worlds.layout(**dict(cut))
    return parallelize(build(kind), layout, configuration(shard, sequence_parallel)), layout


def whole_step(kind: str, **objective) -> dict[str, torch.Tensor]:
    return step(build(kind), Layout.single(), **objective)


def spread_steps(cases: list[tuple], cut: tuple, shard: bool, sequence_parallel: bool) -> list[dict]:
    """The step of each (kind of model, objective) on these ranks; a rank returns what it found."""
    found = []
    for kind, objective in cases:
        policy, layout = spread(kind, cut, shard, sequence_parallel)
        found.append(step(policy, layout, **objective))
    return found
