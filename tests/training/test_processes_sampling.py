"""Runs that sample while the model is spread over ranks: the completions, numbers and weights of whole models."""

import functools
import math

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.parallel_runs import assert_close, run_on_ranks
from builders.processes import layout, world
from builders.runs import SHORT, config_of, copy_as_of, metrics_of
from omegaconf import OmegaConf

from pgtoolkit.errors import DataError
from pgtoolkit.ranks.agreement import gather_objects
from pgtoolkit.runs.records import read_evaluations
from pgtoolkit.tasks.completion import Request
from pgtoolkit.training.build import build

pytestmark = pytest.mark.slow  # ranks are processes

FSDP = "parallelism.shard=true"
GREEDY = ("rollout.top_p=1e-6", "entropy=bonus", "entropy.coefficient=0.1", "optimizer.learning_rate=0.01")
"""Completions of the likeliest tokens, and a loss whose gradient needs no advantage."""
FULL = (
    *("rollout.prompts_per_batch=3", "accumulation.docs_per_step=6", "rollout.max_sampling_rounds=3"),
    *("evaluation.every=2", "evaluation.prompts_per_set=5", "evaluation.completions_per_prompt=2"),
    *("kl=k3", "kl.coefficient=0.1", "rollout.stop=[77]", "optimizer.learning_rate=0.01"),
)
"""Ranks with different numbers of prompts, and of forward passes; all that asks a sampler or a reference."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = small_llama(3, num_hidden_layers=2, num_attention_heads=4)
    return save_with_tokenizer(model.bfloat16(), tmp_path_factory.mktemp("llama"))


def of_model(folder, *more: str) -> list[str]:
    own = [setting for setting in SHORT if not setting.startswith("model.")]
    return [*own, "model=huggingface", f"model.path={folder}", *more]


def completions(config, sizes: dict[str, int]) -> tuple[list[list[int]], list, dict[str, float]]:
    """What this rank's sampler writes for its prompts, of which rank 1 has none; what its copy holds, and held."""
    module, loader = build(config, layout=layout(**sizes))
    sampler, held = loader.source.sampler, {}
    sample = sampler._complete

    def watched(prompts):
        held.update({name: float(weight.double().sum()) for name, weight in sampler._policy.weights().items()})
        return sample(prompts)

    sampler._complete = watched
    requests = [] if module.layout.rank == 1 else [Request([1, 2, 10], 1, 0), Request([4, 7, 7, 10], 1, 1)]
    sampler.publish(module.policy.weights, 0)
    written = [completion.tokens.tolist() for completion in sampler.complete(requests)]
    return written, [weight.numel() for weight in sampler._policy.weights().values()], held


KINDS = {
    "fsdp": ({"data_parallel": 2}, [FSDP]),
    "fsdp, lora": ({"data_parallel": 2}, [FSDP, "model.lora_rank=2"]),
    "sequence": ({"tensor_parallel": 2}, ["parallelism.sequence_parallel=true"]),
    "sequence_data": ({"sequence_data_parallel": 2}, []),
    "pipeline": ({"pipeline_parallel": 2}, ["metrics=none"]),
    "fsdp of tensor": ({"data_parallel": 2, "tensor_parallel": 2}, [FSDP]),
    "pipeline of fsdp": ({"data_parallel": 2, "pipeline_parallel": 2}, [FSDP, "metrics=none"]),
}


@pytest.mark.parametrize(("sizes", "more"), KINDS.values(), ids=KINDS)
def test_a_whole_copy_is_made_for_a_batch_and_given_back(llama, sizes, more):
    """Token for token the completions of one process, from weights equal to the last bit."""
    greedy = of_model(llama, *GREEDY, *(one for one in more if one.startswith(("model.", "metrics="))))
    module, loader = build(OmegaConf.to_object(config_of(*greedy)))
    asked = [Request([1, 2, 10], 1, 0), Request([4, 7, 7, 10], 1, 1)]
    expected = [completion.tokens.tolist() for completion in loader.source.sampler.complete(asked)]
    settings = [*(f"parallelism.{axis}={size}" for axis, size in sizes.items()), *more]
    config = OmegaConf.to_object(config_of(*greedy, *settings))
    found = world(math.prod(sizes.values())).run(completions, config, sizes)
    assert [written for written, _, _ in found] == [[] if rank == 1 else expected for rank in range(len(found))]
    weights = {name: float(weight.double().sum()) for name, weight in module.policy.weights().items()}
    if "sequence_data_parallel" in sizes:  # each rank holds the whole model, and samples from it
        return
    assert all(set(sizes) == {0} for _, sizes, _ in found)  # each rank has had a copy, and has it no more
    assert found[0][2] == weights


@pytest.fixture(scope="module")
def by_whole_models(tmp_path_factory):
    """The run of two ranks with a model each, by its settings."""

    @functools.cache
    def run(*settings: str):
        return run_on_ranks(tmp_path_factory.mktemp("whole") / "run", [*SHORT, *settings], data_parallel=2)

    return run


@pytest.mark.parametrize(
    ("sizes", "spread", "settings", "tolerance"),
    [
        ({"data_parallel": 2}, [FSDP], FULL, 1e-6),
        ({"data_parallel": 2}, [FSDP], ["rollout.lag=2"], 1e-6),
        ({"data_parallel": 2}, [FSDP], ["rollout.max_staleness=2", "rollout.old_log_probs=sampling"], 1e-6),
        ({"tensor_parallel": 2}, ["parallelism.sequence_parallel=true"], FULL, 1e-5),
        ({"sequence_data_parallel": 2}, [], FULL, 1e-5),
        ({"pipeline_parallel": 2}, [], ["metrics=none", "evaluation.every=3", "evaluation.prompts_per_set=3"], 1e-5),
    ],
    ids=["fsdp", "lag", "staleness", "sequence", "sequence_data", "pipeline"],
)
def test_a_divided_model_samples_and_learns_as_whole_ones_do(
    tmp_path, by_whole_models, sizes, spread, settings, tolerance
):
    """The ranks draw from the same random states, whatever they hold: all metrics agree, and so do the evaluations."""
    found = run_on_ranks(tmp_path / "run", [*SHORT, *settings, *spread], **sizes)
    other = by_whole_models(*settings)
    assert_close(found, other, tolerance)
    for row, expected in zip(read_evaluations(found), read_evaluations(other), strict=True):
        drop = {"time": 0, "seconds": 0}
        assert row | drop == expected | drop
    assert sum(row["grad_norm"] > 0 for row in metrics_of(found)) > 1


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    """Greedy: one process, then two ranks that share the weights, then four, make the steps of one process."""
    greedy = [*SHORT, *GREEDY, "trainer.max_steps=6"]
    whole = run_on_ranks(tmp_path / "whole", greedy)
    for step, sizes in ((4, {"data_parallel": 2}), (2, {"data_parallel": 4})):
        folder = copy_as_of(whole, step, tmp_path / f"from-{step}")
        run_on_ranks(folder, [*greedy, FSDP], resume=True, **sizes)
        assert_close(folder, whole)


def kept_copy(config, sizes: dict[str, int]) -> list[str]:
    """Names of the weights of the copy beside training that change with those in training."""
    module, loader = build(config, layout=layout(**sizes))
    sampler = loader.source.sampler
    sampler.publish(module.policy.weights, 0)
    before = {name: weight.clone() for name, weight in sampler._policy.weights().items()}
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter += 1
    return [name for name, weight in sampler._policy.weights().items() if not torch.equal(weight, before[name])]


@pytest.mark.parametrize("kind", ["fsdp", "sequence", "pipeline"])
def test_what_is_sampled_beside_training_keeps_the_weights_that_were_published(llama, kind):
    sizes, more = KINDS[kind]
    beside = ["rollout.max_staleness=2", "rollout.old_log_probs=sampling", *more]
    settings = [*(f"parallelism.{axis}={size}" for axis, size in sizes.items()), "model.dtype=float32", *beside]
    config = OmegaConf.to_object(config_of(*of_model(llama, *settings)))
    assert world(math.prod(sizes.values())).run(kept_copy, config, sizes) == [[]] * math.prod(sizes.values())


def failing_rank(config, sizes: dict[str, int], place: str) -> tuple[str, list[int]]:
    """What each rank is told where rank 1 alone fails, with prompts or completions, and whom it still meets."""
    module, loader = build(config, layout=layout(**sizes))
    if module.layout.rank == 1:
        source = loader.source
        owner, name = (source.task, "encode") if place == "prompts" else (source.sampler, "_complete")

        def fail(*_):
            raise DataError(f"no {place}")

        setattr(owner, name, fail)
    with pytest.raises(DataError) as refused:
        next(iter(loader))
    return str(refused.value), gather_objects(module.layout.rank, module.layout.world_group)


@pytest.mark.parametrize("beside", [[], ["rollout.max_staleness=2", "rollout.old_log_probs=sampling"]])
@pytest.mark.parametrize("place", ["prompts", "completions"])
def test_a_rank_that_fails_keeps_none_waiting_that_gathers_the_weights(llama, place, beside):
    settings = of_model(llama, "parallelism.data_parallel=2", FSDP, *beside)
    config = OmegaConf.to_object(config_of(*settings))
    told = world(2).run(failing_rank, config, {"data_parallel": 2}, place)
    assert told == [(f"rank 1: no {place}", [0, 1])] * 2
