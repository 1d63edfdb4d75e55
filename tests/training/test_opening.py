"""The first lines of a run name its model and its sampler."""

from dataclasses import replace

import pytest
from builders.models import small_policy
from builders.runs import config_of

from pgtoolkit.assembly.opening import opening
from pgtoolkit.ranks.layout import ONE_PROCESS


@pytest.mark.parametrize(
    ("overrides", "sampler"),
    [
        ([], "transformers, in this process"),
        (
            ["sampler.processes=2"],
            "transformers, on the CPU in processes with copies of the weights: 2",
        ),
        (
            ["sampler.gpus=[1,3]"],
            "transformers, in processes with copies of the weights on GPU 1, 3",
        ),
        (["sampler=vllm"], "vllm, on servers that this run starts"),
        (["sampler=vllm", "sampler.urls=[http://host:8000]"], "vllm at http://host:8000"),
    ],
)
def test_the_opening_ends_with_where_completions_are_sampled(overrides, sampler):
    config = config_of(*overrides)
    lines = opening(
        config.model, config.rollout, config.sampler, small_policy("gpt2"), False, ONE_PROCESS
    ).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["model", "device", "sampler"]
    assert lines[-1].partition(" ")[2].strip() == sampler


def test_the_opening_says_that_a_model_is_compiled():
    config = config_of()
    policy = small_policy("gpt2")
    for compiled, ending in (
        (False, "drawn from the seed"),
        (True, "drawn from the seed, compiled"),
    ):
        used = replace(policy, compiled=compiled)
        text = opening(config.model, config.rollout, config.sampler, used, False, ONE_PROCESS)
        assert text.splitlines()[0].endswith(ending)
