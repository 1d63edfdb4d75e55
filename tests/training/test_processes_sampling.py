"""Runs that sample while the model is spread over ranks: the completions, numbers and weights of
whole models."""

import functools
import math
from pathlib import Path

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.parallel_runs import assert_runs_close, run_on_ranks
from builders.processes import layout, world
from builders.runs import (
    SHORT,
    assert_equal,
    checkpoint_of,
    config_of,
    copy_as_of,
    metrics_of,
    with_model,
)

from pgtoolkit.completion import Request
from pgtoolkit.errors import DataError
from pgtoolkit.ranks.agreement import gather_objects
from pgtoolkit.runs.completion_files import read_completions
from pgtoolkit.runs.records import read_evaluations
from pgtoolkit.training.build import build

pytestmark = pytest.mark.slow  # ranks are processes

FSDP = "parallelism.shard=true"
GREEDY = (
    "rollout.top_p=1e-6",
    "entropy=bonus",
    "entropy.coefficient=0.1",
    "optimizer.learning_rate=0.01",
)
"""Completions of the likeliest tokens, and a loss whose gradient needs no advantage."""
FULL = (
    *(
        "rollout.prompts_per_batch=3",
        "accumulation.docs_per_step=6",
        "rollout.max_sampling_rounds=3",
    ),
    *("evaluation.every=2", "evaluation.prompts_per_set=5", "evaluation.completions_per_prompt=2"),
    *("kl=k3", "kl.coefficient=0.1", "rollout.stop=[77]", "optimizer.learning_rate=0.01"),
)
"""Ranks with different numbers of prompts, and of forward passes; all that asks a sampler or a
reference."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = small_llama(3, num_hidden_layers=2, num_attention_heads=4)
    return save_with_tokenizer(model.bfloat16(), tmp_path_factory.mktemp("llama"))


def completions(config, sizes: dict[str, int]) -> tuple[list[list[int]], list, dict[str, float]]:
    """What this rank's sampler writes for its prompts, of which rank 1 has none; what its copy
    holds, and held."""
    module, loader = build(config, layout=layout(**sizes))
    sampler, held = loader.source.sampler, {}
    sample = sampler._complete

    def watched(prompts):
        held.update(
            {
                name: float(weight.double().sum())
                for name, weight in sampler._policy.weights().items()
            }
        )
        return sample(prompts)

    sampler._complete = watched
    requests = (
        [] if module.layout.rank == 1 else [Request([1, 2, 10], 1, 0), Request([4, 7, 7, 10], 1, 1)]
    )
    sampler.publish(module.policy.weights, 0)
    written = [completion.tokens.tolist() for completion in sampler.complete(requests)]
    return written, [weight.numel() for weight in sampler._policy.weights().values()], held


KINDS = {
    "fsdp": ({"data_parallel": 2}, [FSDP]),
    "fsdp, lora": ({"data_parallel": 2}, [FSDP, "model.lora_rank=2"]),
    "sequence": ({"tensor_parallel": 2}, ["parallelism.sequence_parallel=true"]),
    "sequence_data": ({"sequence_data_parallel": 2}, []),
    "pipeline": ({"pipeline_parallel": 2}, ["metrics=none"]),
    "pipeline of fsdp": ({"data_parallel": 2, "pipeline_parallel": 2}, [FSDP, "metrics=none"]),
}


@pytest.mark.parametrize(("sizes", "more"), KINDS.values(), ids=KINDS)
def test_a_whole_copy_is_made_for_a_batch_and_given_back(llama, sizes, more):
    """Token for token the completions of one process, from weights equal to the last bit."""
    greedy = with_model(
        llama, *GREEDY, *(setting for setting in more if setting.startswith(("model.", "metrics=")))
    )
    module, loader = build(config_of(*greedy))
    asked = [Request([1, 2, 10], 1, 0), Request([4, 7, 7, 10], 1, 1)]
    expected = [completion.tokens.tolist() for completion in loader.source.sampler.complete(asked)]
    settings = [*(f"parallelism.{axis}={size}" for axis, size in sizes.items()), *more]
    config = config_of(*greedy, *settings)
    by_rank = world(math.prod(sizes.values())).run(completions, config, sizes)
    assert [written for written, _, _ in by_rank] == [
        [] if rank == 1 else expected for rank in range(len(by_rank))
    ]
    weights = {
        name: float(weight.double().sum()) for name, weight in module.policy.weights().items()
    }
    if "sequence_data_parallel" in sizes:  # each rank holds the whole model, and samples from it
        return
    # each rank has had a copy, and has it no more
    assert all(set(sizes) == {0} for _, sizes, _ in by_rank)
    assert by_rank[0][2] == weights


@pytest.fixture(scope="module")
def by_one_process(tmp_path_factory):
    """The run of one process, by its settings."""

    @functools.cache
    def run(*settings: str):
        return run_on_ranks(tmp_path_factory.mktemp("one") / "run", [*SHORT, *settings])

    return run


def assert_drawn_alike(found: Path, expected: Path) -> None:
    """Token for token the same completions, held-out ones included; metrics but for the order of
    sums."""
    assert_runs_close(found, expected, 1e-6)
    drop = {"time": 0, "seconds": 0}
    rows, others = (
        [row | drop for row in read_evaluations(folder)] for folder in (found, expected)
    )
    assert rows == others
    for path in (expected / "completions").glob("evaluation_*"):
        assert read_completions(found / "completions" / path.name) == read_completions(path)
    steps = [row["step"] for row in metrics_of(expected)]
    batches, others = (
        [checkpoint_of(folder, n)["data"]["source"] for n in steps] for folder in (found, expected)
    )
    for batch, other in zip(batches, others, strict=True):  # in use, and sampled ahead
        assert_equal(
            *([document["tokens"] for document in one["documents"]] for one in (batch, other))
        )
    assert len({str(batch["documents"][0]["tokens"]) for batch in batches}) > 1
    assert sum(row["grad_norm"] > 0 for row in metrics_of(found)) > 1


LAG, STALE = ["rollout.lag=2"], ["rollout.max_staleness=2", "rollout.old_log_probs=sampling"]
PROXIMAL = [
    "rollout.max_staleness=2",
    "rollout.old_log_probs=proximal",
    "correction=token_truncate",
]
STAGES = ["metrics=none", "evaluation.every=3", "evaluation.prompts_per_set=3"]
RUNS = {
    "ddp of four": ({"data_parallel": 4}, [], FULL),
    "fsdp of four, lag": ({"data_parallel": 4}, [FSDP], LAG),
    "ddp, staleness": ({"data_parallel": 2}, [], STALE),
    "fsdp, proximal": ({"data_parallel": 2}, [FSDP], PROXIMAL),
    "sequence": ({"tensor_parallel": 2}, ["parallelism.sequence_parallel=true"], FULL),
    "sequence_data": ({"sequence_data_parallel": 2}, [], FULL),
    "pipeline": ({"pipeline_parallel": 2}, [], STAGES),
}


@pytest.mark.parametrize(("sizes", "spread", "settings"), RUNS.values(), ids=RUNS)
def test_any_number_of_ranks_makes_the_run_of_one_process(
    tmp_path, by_one_process, sizes, spread, settings
):
    on_ranks = run_on_ranks(tmp_path / "run", [*SHORT, *settings, *spread], **sizes)
    assert_drawn_alike(on_ranks, by_one_process(*settings))


@pytest.mark.parametrize("settings", [FULL, STALE], ids=["full", "staleness"])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, settings):
    """Two ranks, then one process, two, and four that share the weights, as if nothing had been
    between."""
    uninterrupted = run_on_ranks(tmp_path / "whole", [*SHORT, *settings], data_parallel=2)
    assert (
        max(row.get("dropped_prompt_fraction", 0) for row in metrics_of(uninterrupted)) > 0
        or settings is STALE
    )
    for step, spread, sizes in (
        (3, [], {}),
        (1, [], {"data_parallel": 2}),
        (2, [FSDP], {"data_parallel": 4}),
    ):
        folder = copy_as_of(uninterrupted, step, tmp_path / f"from-{step}")
        run_on_ranks(folder, [*SHORT, *settings, *spread], resume=True, **sizes)
        assert_drawn_alike(folder, uninterrupted)
        if step == 1:  # as many as before: to the last bit
            assert metrics_of(folder) == metrics_of(uninterrupted)
            assert_equal(checkpoint_of(folder, 6), checkpoint_of(uninterrupted, 6))


def kept_copy(config, sizes: dict[str, int]) -> list[str]:
    """Names of the weights of the copy beside training that change with those in training."""
    module, loader = build(config, layout=layout(**sizes))
    sampler = loader.source.sampler
    sampler.publish(module.policy.weights, 0)
    before = {name: weight.clone() for name, weight in sampler._policy.weights().items()}
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter += 1
    return [
        name
        for name, weight in sampler._policy.weights().items()
        if not torch.equal(weight, before[name])
    ]


@pytest.mark.parametrize("kind", ["fsdp", "sequence", "pipeline"])
def test_what_is_sampled_beside_training_keeps_the_weights_that_were_published(llama, kind):
    sizes, more = KINDS[kind]
    beside = ["rollout.max_staleness=2", "rollout.old_log_probs=sampling", *more]
    settings = [
        *(f"parallelism.{axis}={size}" for axis, size in sizes.items()),
        "model.dtype=float32",
        *beside,
    ]
    config = config_of(*with_model(llama, *settings))
    assert world(math.prod(sizes.values())).run(kept_copy, config, sizes) == [[]] * math.prod(
        sizes.values()
    )


def failing_rank(config, sizes: dict[str, int], place: str) -> tuple[str, list[int]]:
    """What each rank is told where rank 1 alone fails, with prompts or completions, and whom it
    still meets."""
    module, loader = build(config, layout=layout(**sizes))
    if module.layout.rank == 1:
        source = loader.source
        owner, name = (
            (source.task, "encode") if place == "prompts" else (source.sampler, "_complete")
        )

        def fail(*_):
            raise DataError(f"no {place}")

        setattr(owner, name, fail)
    with pytest.raises(DataError) as refused:
        next(iter(loader))
    return str(refused.value), gather_objects(module.layout.rank, module.layout.world_group)


@pytest.mark.parametrize(
    ("place", "beside"),
    [
        ("prompts", []),
        ("completions", []),
        ("completions", ["rollout.max_staleness=2", "rollout.old_log_probs=sampling"]),
    ],
)
def test_a_rank_that_fails_keeps_none_waiting_that_gathers_the_weights(llama, place, beside):
    settings = with_model(llama, "parallelism.data_parallel=2", FSDP, *beside)
    config = config_of(*settings)
    outcomes = world(2).run(failing_rank, config, {"data_parallel": 2}, place)
    assert outcomes == [(f"rank 1: no {place}", [0, 1])] * 2
