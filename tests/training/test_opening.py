"""The first lines of a run name its model and its sampler."""

from dataclasses import replace

import pytest
from builders.models import small_policy
from builders.parts import ROLLOUT

from pgtoolkit.assembly.opening import opening
from pgtoolkit.model.settings import TinyModelSettings
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.sampling.settings import TransformersSamplerSettings, VllmSamplerSettings


@pytest.mark.parametrize(
    ("settings", "sampler"),
    [
        (TransformersSamplerSettings(), "transformers, in this process"),
        (
            TransformersSamplerSettings(processes=2),
            "transformers, on the CPU in processes with copies of the weights: 2",
        ),
        (
            TransformersSamplerSettings(gpus=[1, 3]),
            "transformers, in processes with copies of the weights on GPU 1, 3",
        ),
        (VllmSamplerSettings(answer_seconds=1), "vllm, on servers that this run starts"),
        (
            VllmSamplerSettings(answer_seconds=1, urls=["http://host:8000"]),
            "vllm at http://host:8000",
        ),
    ],
)
def test_the_opening_ends_with_where_completions_are_sampled(settings, sampler):
    policy = small_policy("gpt2")
    text = opening(TinyModelSettings(), ROLLOUT, settings, policy, False, ONE_PROCESS)
    lines = text.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["model", "device", "sampler"]
    assert lines[-1].partition(" ")[2].strip() == sampler


def test_the_opening_says_that_a_model_is_compiled():
    sampler = TransformersSamplerSettings()
    policy = small_policy("gpt2")
    for compiled, ending in (
        (False, "drawn from the seed"),
        (True, "drawn from the seed, compiled"),
    ):
        used = replace(policy, compiled=compiled)
        text = opening(TinyModelSettings(), ROLLOUT, sampler, used, False, ONE_PROCESS)
        assert text.splitlines()[0].endswith(ending)
