"""What `pgtk check` says of several GPUs, against what was measured."""

from __future__ import annotations

import json

import pytest
from builders.runs import config_of

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


def job(folder, shape, *overrides):
    """32 prompts of some 112 tokens, with 8 completions of 512, one update: docs/rollouts.md."""
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


def test_the_order_and_the_seconds_are_those_measured_on_two_gpus(tmp_path):
    found = ways(job(tmp_path, "0.5b"), 2, MEMORY)
    measured = {
        f"sampler.gpus=[1] {AHEAD}": 1.63,
        "parallelism=ddp parallelism.data_parallel=2": 1.71,
        "": 2.68,
        f"sampler=vllm sampler.gpus=[1] {AHEAD}": 7.93,
    }
    assert [way.settings for way in found] == list(measured)
    for way in found:
        assert way.seconds == pytest.approx(measured[way.settings], rel=0.2)


def test_of_more_gpus_some_train_and_some_sample(tmp_path):
    """As many for each rank; a batch of several steps is as many updates old."""
    best = ways(job(tmp_path, "0.5b", "accumulation.docs_per_step=64"), 4, MEMORY)[0]
    ahead = "rollout.max_staleness=7 rollout.old_log_probs=sampling"
    assert (
        best.settings == f"parallelism=ddp parallelism.data_parallel=2 sampler.gpus=[2,3] {ahead}"
    )


def test_a_way_without_room_is_left_out(tmp_path):
    """All weights of 7.6 billion take 122 GB of each GPU that trains; adapters, and the copy,
    fit."""
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
def test_what_cannot_be_compared_is_not(tmp_path, other):
    config = job(tmp_path, "0.5b", other) if other != "model=tiny" else config_of("model=tiny")
    assert ways(config, 2, MEMORY) == []
