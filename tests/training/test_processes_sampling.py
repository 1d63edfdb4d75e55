"""Runs that sample while the model is spread over ranks draw what whole models would.

Completions are compared token for token with those of one process, numbers up to the order of sums.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
    last_of_each_key,
    metrics_of,
    with_model,
)

from pgtoolkit.assembly.build import build
from pgtoolkit.completion import Request
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import DataError
from pgtoolkit.model.policy import Policy
from pgtoolkit.ranks.agreement import gather_objects
from pgtoolkit.runs.completion_files import read_completions
from pgtoolkit.runs.records import read_evaluations
from pgtoolkit.training.checkpoint import list_checkpoints, read_checkpoint

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
    "rollout.prompts_per_batch=3",
    "accumulation.docs_per_step=6",
    "rollout.max_sampling_rounds=3",
    "evaluation.every=2",
    "evaluation.prompts_per_set=5",
    "evaluation.completions_per_prompt=2",
    "kl=k3",
    "kl.coefficient=0.1",
    "rollout.stop=[77]",
    "optimizer.learning_rate=0.01",
)
"""Ranks with different numbers of prompts, and of forward passes; evaluations and a reference."""
LAG = ("rollout.lag=2",)
STALE = ("rollout.max_staleness=2", "rollout.old_log_probs=sampling")
PROXIMAL = (
    "rollout.max_staleness=2",
    "rollout.old_log_probs=proximal",
    "correction=token_truncate",
)
STAGES = (
    "metrics=none",
    "evaluation.every=3",
    "evaluation.prompts_per_set=3",
    "model.num_layers=2",
)
SMALLER = [*SHORT, "model.num_layers=1", "trainer.max_steps=4"]
"""Two batches of two steps."""
EACH_BATCH = "trainer.checkpoint_every=2"
REQUESTS = [Request([1, 2, 10], 1, 0), Request([4, 7, 7, 10], 1, 1)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    model = small_llama(3, num_hidden_layers=2, num_attention_heads=4)
    return save_with_tokenizer(model.bfloat16(), tmp_path_factory.mktemp("llama"))


def parallelism(sizes: dict[str, int]) -> list[str]:
    return [f"parallelism.{axis}={size}" for axis, size in sizes.items()]


def sums_of_weights(policy: Policy) -> dict[str, float]:
    return {name: float(weight.double().sum()) for name, weight in policy.weights().items()}


class Sampled(NamedTuple):
    """Completions of a rank; its copy's sums of weights while it sampled, and its sizes after."""

    completions: list[list[int]]
    sums: dict[str, float]
    sizes_after: list[int]


def sample_on_rank(config: Config, sizes: dict[str, int]) -> Sampled:
    """Sample `REQUESTS` on this rank; rank 1 has none."""
    module, loader = build(config, layout=layout(**sizes))
    sampler = loader.source.sampler
    sums = {}
    complete = sampler._complete

    def complete_and_record(prompts):
        sums.update(sums_of_weights(sampler._policy))
        return complete(prompts)

    sampler._complete = complete_and_record
    sampler.publish(module.policy.weights, 0)
    completions = sampler.complete([] if module.layout.rank == 1 else REQUESTS)
    return Sampled(
        completions=[completion.tokens.tolist() for completion in completions],
        sums=sums,
        sizes_after=[weight.numel() for weight in sampler._policy.weights().values()],
    )


DIVISIONS = {
    "fsdp": ({"data_parallel": 2}, [FSDP]),
    "fsdp, lora": ({"data_parallel": 2}, [FSDP, "model.lora_rank=2"]),
    "sequence": ({"tensor_parallel": 2}, ["parallelism.sequence_parallel=true"]),
    "sequence_data": ({"sequence_data_parallel": 2}, []),
    "pipeline": ({"pipeline_parallel": 2}, ["metrics=none"]),
    "pipeline of fsdp": ({"data_parallel": 2, "pipeline_parallel": 2}, [FSDP, "metrics=none"]),
}
"""Sizes of the axes, and further settings, by the way in which the model is divided."""


@pytest.mark.parametrize(("sizes", "settings"), DIVISIONS.values(), ids=DIVISIONS)
def test_a_divided_model_samples_from_a_whole_copy_and_frees_it(llama, sizes, settings):
    """The copy's weights are those of one process to the last bit, and so are completions."""
    of_model = [setting for setting in settings if setting.startswith(("model.", "metrics="))]
    in_one_process = with_model(llama, *GREEDY, *of_model)
    module, loader = build(config_of(*in_one_process))
    completions = loader.source.sampler.complete(REQUESTS)
    expected = [completion.tokens.tolist() for completion in completions]

    config = config_of(*in_one_process, *parallelism(sizes), *settings)
    ranks = world(math.prod(sizes.values())).run(sample_on_rank, config, sizes)

    for rank, sampled in enumerate(ranks):
        assert sampled.completions == ([] if rank == 1 else expected)
    if "sequence_data_parallel" not in sizes:  # where each rank holds the whole model anyway
        assert ranks[0].sums == sums_of_weights(module.policy)
        for sampled in ranks:
            assert set(sampled.sizes_after) == {0}


@pytest.fixture(scope="module")
def run_of_one_process(tmp_path_factory) -> Callable[..., Path]:
    """Return a function from settings to the run of one process with them, made once."""

    @functools.cache
    def run(*settings: str) -> Path:
        settings = last_of_each_key(*SMALLER, *settings, EACH_BATCH)
        return run_on_ranks(tmp_path_factory.mktemp("one") / "run", settings)

    return run


def evaluations_without_clock(folder: Path) -> list[dict]:
    return [row | {"time": 0, "seconds": 0} for row in read_evaluations(folder)]


def sampled_batches(folder: Path) -> list[list]:
    """Return the tokens of the documents of each checkpoint, in use and sampled ahead."""
    return [
        [document["tokens"] for document in read_checkpoint(path)["data"]["source"]["documents"]]
        for path in list_checkpoints(folder / "checkpoints")
    ]


def assert_drawn_alike(run: Path, expected: Path) -> None:
    """Check that two runs drew the same completions, held-out ones included, and have the same
    metrics up to the order of sums."""
    assert_runs_close(run, expected, 1e-6)
    assert evaluations_without_clock(run) == evaluations_without_clock(expected)
    for path in (expected / "completions").glob("evaluation_*"):
        assert read_completions(run / "completions" / path.name) == read_completions(path)
    batches = sampled_batches(run)
    assert_equal(batches, sampled_batches(expected))
    assert len({str(batch[0]) for batch in batches}) > 1
    assert sum(row["grad_norm"] > 0 for row in metrics_of(run)) > 1


RUNS = {
    "ddp of four": ({"data_parallel": 4}, [], FULL),
    "fsdp, lag": ({"data_parallel": 2}, [FSDP], LAG),
    "fsdp, proximal": ({"data_parallel": 2}, [FSDP], PROXIMAL),
    "sequence": ({"tensor_parallel": 2}, ["parallelism.sequence_parallel=true"], FULL),
    "sequence_data": ({"sequence_data_parallel": 2}, [], FULL),
    "pipeline": ({"pipeline_parallel": 2}, [], STAGES),
}
"""Sizes of the axes, settings that divide the model, and settings of sampling."""


@pytest.mark.parametrize(("sizes", "division", "settings"), RUNS.values(), ids=RUNS)
def test_any_number_of_ranks_makes_the_run_of_one_process(
    tmp_path, run_of_one_process, sizes, division, settings
):
    divided = last_of_each_key(*SMALLER, *settings, *division, EACH_BATCH)
    on_ranks = run_on_ranks(tmp_path / "run", divided, **sizes)
    assert_drawn_alike(on_ranks, run_of_one_process(*settings))


@pytest.mark.parametrize(
    ("settings", "resumed"),
    [
        (FULL, [(2, [FSDP], {"data_parallel": 4})]),
        (
            STALE,
            [
                (3, [], {}),
                (1, [], {"data_parallel": 2}),
                (2, [FSDP], {"data_parallel": 4}),
            ],
        ),
    ],
    ids=["full", "staleness"],
)
def test_a_run_resumes_on_another_number_of_ranks(tmp_path, settings, resumed):
    """Two ranks, continued by one process, by two ranks, or by four that share the weights."""
    uninterrupted = run_on_ranks(tmp_path / "uninterrupted", [*SMALLER, *settings], data_parallel=2)
    if settings is FULL:
        assert max(row["dropped_prompt_fraction"] for row in metrics_of(uninterrupted)) > 0
    for step, division, sizes in resumed:
        folder = copy_as_of(uninterrupted, step, tmp_path / f"from-{step}")
        run_on_ranks(folder, [*SMALLER, *settings, *division], resume=True, **sizes)
        assert_drawn_alike(folder, uninterrupted)
        if sizes == {"data_parallel": 2}:  # as many ranks as before: equal to the last bit
            assert metrics_of(folder) == metrics_of(uninterrupted)
            assert_equal(checkpoint_of(folder, 4), checkpoint_of(uninterrupted, 4))


def weights_that_follow_training(config: Config, sizes: dict[str, int]) -> list[str]:
    """Return the names of weights of the sampler's copy that change when the model's do."""
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
def test_asynchronous_sampling_keeps_the_weights_that_were_published(llama, kind):
    sizes, settings = DIVISIONS[kind]
    config = config_of(
        *with_model(llama, *parallelism(sizes), "model.dtype=float32", *STALE, *settings)
    )
    changed = world(math.prod(sizes.values())).run(weights_that_follow_training, config, sizes)
    assert changed == [[]] * math.prod(sizes.values())


def fail_on_rank_1(config: Config, sizes: dict[str, int], place: str) -> tuple[str, list[int]]:
    """Return the error on this rank where rank 1 alone fails, and the ranks that it still meets
    in a collective."""
    module, loader = build(config, layout=layout(**sizes))

    def fail(*_):
        raise DataError(f"no {place}")

    if module.layout.rank == 1 and place == "prompts":
        loader.source.task.encode = fail
    elif module.layout.rank == 1:
        loader.source.sampler._complete = fail
    with pytest.raises(DataError) as refused:
        next(iter(loader))
    return str(refused.value), gather_objects(module.layout.rank, module.layout.world_group)


@pytest.mark.parametrize(
    ("place", "settings"), [("prompts", ()), ("completions", ()), ("completions", STALE)]
)
def test_a_rank_that_fails_to_sample_ends_those_that_gather_the_weights(llama, place, settings):
    config = config_of(*with_model(llama, "parallelism.data_parallel=2", FSDP, *settings))
    outcomes = world(2).run(fail_on_rank_1, config, {"data_parallel": 2}, place)
    assert outcomes == [(f"rank 1: no {place}", [0, 1])] * 2
