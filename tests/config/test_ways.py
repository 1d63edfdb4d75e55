"""The ways that `pgtk check` lists to use several GPUs: their order and their seconds are near
those measured on two GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders.runs import config_of

from pgtoolkit.config.schema import Config
from pgtoolkit.config.ways import ways, ways_in_words

MEMORY = 80e9
SHAPES = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
    },
}
GROUPS = {"0.5b": 2, "7b": 4}
AHEAD = "rollout.max_staleness=1 rollout.old_log_probs=sampling"


def job(folder: Path, shape: str, *overrides: str) -> Config:
    """Return the configuration of the job of docs/rollouts.md: 32 prompts of some 112 tokens, 8
    completions of 512 for each, one update."""
    known = {"model_type": "qwen2", "vocab_size": 151936, "tie_word_embeddings": shape == "0.5b"}
    known |= SHAPES[shape] | {
        "num_key_value_heads": GROUPS[shape],
        "architectures": ["Qwen2ForCausalLM"],
    }
    (folder / "config.json").write_text(json.dumps(known))
    (folder / "prompts.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    return config_of(
        *(
            "model=huggingface",
            f"model.path={folder}",
            "model.gradient_checkpointing=true",
            "task=prompts",
        ),
        *(
            f"task.path={folder}/prompts.jsonl",
            "task.verifier=exact",
            "rollout.prompts_per_batch=32",
        ),
        *(
            "rollout.group_size=8",
            "rollout.max_completion_length=512",
            "accumulation.docs_per_step=256",
        ),
        *("accumulation.max_tokens=65536", *overrides),
    )


def test_ways_have_the_order_and_nearly_the_seconds_that_were_measured_on_two_gpus(tmp_path):
    listed = ways(job(tmp_path, "0.5b"), 2, MEMORY)
    measured = {
        f"sampler.gpus=[1] {AHEAD}": 1.63,
        "parallelism=ddp parallelism.data_parallel=2": 1.71,
        "": 2.68,
        f"sampler=vllm sampler.gpus=[1] {AHEAD}": 7.93,
    }
    assert [way.settings for way in listed] == list(measured)
    for way in listed:
        assert way.seconds == pytest.approx(measured[way.settings], rel=0.2)


def test_the_best_way_on_four_gpus_trains_on_two_and_samples_on_two(tmp_path):
    # A batch makes four steps, so a document is up to seven updates old.
    best = ways(job(tmp_path, "0.5b", "accumulation.docs_per_step=64"), 4, MEMORY)[0]
    ahead = "rollout.max_staleness=7 rollout.old_log_probs=sampling"
    assert (
        best.settings == f"parallelism=ddp parallelism.data_parallel=2 sampler.gpus=[2,3] {ahead}"
    )


def test_a_way_that_does_not_fit_into_memory_is_left_out(tmp_path):
    # To train all weights of 7.6 billion takes 122 GB of each GPU; adapters and a copy fit.
    assert ways(job(tmp_path, "7b"), 2, MEMORY) == []
    assert list(ways_in_words(job(tmp_path, "7b"), 2, MEMORY)) == []
    lines = list(ways_in_words(job(tmp_path, "7b", "model.lora_rank=16"), 2, MEMORY))
    assert [line.partition(" s  ")[2] for line in lines[1:3]] == [
        "parallelism=ddp parallelism.data_parallel=2",
        f"sampler.gpus=[1] {AHEAD}",
    ]


@pytest.mark.parametrize(
    "other", ["parallelism.shard=true", "accumulation.last_step=carry", "model=tiny"]
)
def test_no_way_is_listed_for_a_job_whose_time_cannot_be_estimated(tmp_path, other):
    config = job(tmp_path, "0.5b", other) if other != "model=tiny" else config_of("model=tiny")
    assert ways(config, 2, MEMORY) == []
