"""The estimate of what a GPU holds: within 15 % of peaks measured on H200s, and a change that fits
is found."""

import json

import pytest
from builders.runs import config_of

from benchmarks.sweep_throughput import GPU as SMALL
from pgtoolkit.config.memory import (
    bytes_of_process,
    max_tokens_for,
    memory_lines,
    memory_use,
    refuse_overflow,
)
from pgtoolkit.errors import ConfigError

NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
SHAPES = {
    "0.5": (896, 4864, 24, 14, 2, True),
    "0.55": (1024, 4096, 16, 16, 4, False),
    "1.5": (1536, 8960, 28, 12, 2, True),
    "7.6": (3584, 18944, 28, 28, 4, False),
    "14.8": (5120, 13824, 48, 40, 8, False),
}
GPU = 150e9
LONG = ("rollout.max_completion_length=512", "accumulation.docs_per_step=256")
READ = ("rollout=recorded", "rollout.path=rows.jsonl", "accumulation.docs_per_step=64")


def configuration(folder, size, *more):
    *sizes, tied = SHAPES[size]
    shape = dict(zip(NAMES, sizes, strict=True)) | {
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **shape}))
    room = () if any("max_tokens" in one for one in more) else ("accumulation.max_tokens=65536",)
    model = ("model=huggingface", f"model.path={folder}", "model.gradient_checkpointing=true")
    return config_of(*model, *room, *more)


@pytest.mark.parametrize(
    ("size", "more", "measured"),
    [
        ("0.5", LONG, 19.5),
        ("1.5", LONG, 46.7),
        ("7.6", (*LONG, "model.lora_rank=16"), 50.2),
        ("0.55", READ, 18.3),
        ("0.55", (*READ, "parallelism=fsdp"), 14.9),
        ("0.55", (*READ, "parallelism=sequence"), 9.3),
        ("0.55", (*READ, "parallelism=sequence_data"), 13.6),
        ("7.6", (*LONG, "accumulation.max_tokens=32768", "parallelism=fsdp"), 98.1),
        ("7.6", (*LONG, "accumulation.max_tokens=32768", "parallelism=tensor"), 84.4),
        (
            "14.8",
            (*LONG, "accumulation.max_tokens=32768", "parallelism=fsdp", "model.lora_rank=16"),
            65.4,
        ),
    ],
)
def test_the_estimate_is_near_what_was_measured(tmp_path, size, more, measured):
    """docs/reports/performance.md has the jobs."""
    assert memory_use(configuration(tmp_path, size, *more), GPU).peak / 1e9 == pytest.approx(
        measured, rel=0.15
    )


def test_a_critic_takes_what_a_second_policy_in_training_would(tmp_path):
    """But for the LM head of its own, in whose place there is one row."""
    plan = memory_use(configuration(tmp_path, "0.55", *LONG, "advantage=gae", "loss=grpo"), GPU)
    trained = plan.always["weights"] + plan.always["gradients"] + plan.always["moments"]
    assert plan.always["critic"] == trained - 16 * 151936 * 1024
    plan = memory_use(configuration(tmp_path, "0.5", *LONG, "advantage=gae", "loss=grpo"), GPU)
    assert (
        plan.always["critic"]
        == plan.always["weights"] + plan.always["gradients"] + plan.always["moments"]
    )


H100 = 85.5e9
SMOLLM2 = {"model_type": "llama", "vocab_size": 49152, "tie_word_embeddings": True}
SMOLLM2 |= dict(zip(NAMES, (576, 1536, 30, 9, 3), strict=True))


def small(folder, *more):
    """A job of SmolLM2-135M, whose chat template makes prompts of 46 tokens."""
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    return config_of("experiment=sums", f"model.path={folder}", *more)


@pytest.mark.parametrize(
    ("max_tokens", "measured"),
    [(2048, 4.67), (4096, 6.77), (8192, 11.02), (16384, 18.53), ("checkpointed", 3.82)],
)
def test_the_estimate_of_a_small_model_is_near_what_was_measured(tmp_path, max_tokens, measured):
    """Steps of 256 documents of 94 tokens, which fill their micro-batches, on an H100;
    `checkpointed` with 8192."""
    more = [f"accumulation.max_tokens={max_tokens}"]
    if max_tokens == "checkpointed":
        more = ["model.gradient_checkpointing=true"]
    c = small(tmp_path, "accumulation.docs_per_step=256", *more)
    assert memory_use(c, H100).peak / 1e9 == pytest.approx(measured, rel=0.1)


def test_layers_that_keep_everything_of_a_larger_model(tmp_path):
    more = ("accumulation.max_tokens=16384", "model.gradient_checkpointing=false")
    c = configuration(tmp_path, "0.5", *LONG, *more)
    assert memory_use(c, H100).peak / 1e9 == pytest.approx(36.58, rel=0.1)


def test_a_step_that_does_not_fill_its_micro_batch_takes_no_more_for_a_larger_one(tmp_path):
    """64 documents, of at most 94 tokens as is likely: 8.3 GB were measured, of the whole
    process."""
    jobs = [
        bytes_of_process(small(tmp_path, f"accumulation.max_tokens={room}"), H100) / 1e9
        for room in (8192, 16384)
    ]
    assert jobs == pytest.approx([8.3, 8.3], rel=0.15)
    assert jobs[0] == jobs[1]
    digits = ("task.num_digits=2", "task.num_digits=40")
    plans = [
        memory_use(small(tmp_path, "accumulation.max_tokens=16384", one), H100) for one in digits
    ]
    short, long = (plan.update["hidden states"] for plan in plans)
    assert long / short == pytest.approx((94 + 76) / 94)  # a token a digit


def test_prompts_of_a_file_are_as_long_as_the_longest(tmp_path):
    """46 tokens as those of task=sums; of a file that says nothing the micro-batches are taken to
    be full."""
    prompts = tmp_path / "prompts.jsonl"
    text = "What is 41 + 83? Answer with the number only."
    rows = [{"prompt": "1 + 1?"}, {"prompt": [{"role": "user", "content": text}]}]
    task = ("task=prompts", f"task.path={prompts}", "accumulation.max_tokens=16384")
    for content, expected in (("\n".join(map(json.dumps, rows)), "sums"), ("{}", "full")):
        prompts.write_text(content)
        same = (
            ()
            if expected == "sums"
            else ("accumulation.docs_per_step=256", "accumulation.max_tokens=16384")
        )
        taken = memory_use(small(tmp_path, *task), H100).update["hidden states"]
        assert taken == pytest.approx(
            memory_use(small(tmp_path, *same), H100).update["hidden states"], rel=0.01
        )


def test_tokens_of_a_micro_batch_with_which_jobs_fit(tmp_path):
    """The most, in steps of 256; none where the steps would be others, or CUDA alone is too
    much."""
    full = ("accumulation.docs_per_step=256", "accumulation.max_tokens=16384")
    room = H100 / 8
    tokens = max_tokens_for(small(tmp_path, *full), room, H100)
    assert tokens == 7168
    taken = [
        bytes_of_process(small(tmp_path, full[0], f"accumulation.max_tokens={n}"), H100)
        for n in (tokens, tokens + 256)
    ]
    assert taken[0] <= room < taken[1]
    assert max_tokens_for(small(tmp_path, *full), H100 / 40, H100) is None
    more = (
        "accumulation.docs_per_step=0",
        "accumulation.micro_batches_per_step=2",
        "accumulation.max_tokens=16384",
    )
    fixed = small(tmp_path, *more)
    assert max_tokens_for(fixed, room, H100) is None


def test_what_does_not_fit_is_told_what_does(tmp_path):
    large = configuration(tmp_path, "7.6", *LONG)
    assert list(memory_lines(large, GPU))[-1].startswith(
        "use accumulation.max_tokens=32768, which takes 147"
    )
    for gpu, use in (
        (80e9, "parallelism.shard=true parallelism.data_parallel=2"),
        (1e9, "more GPUs or a smaller"),
    ):
        with pytest.raises(
            ConfigError, match=r"needs 1\d\d GB of each GPU .got \d+.. .* Use " + use
        ):
            refuse_overflow(large, gpu)
    refuse_overflow(large, GPU)


def test_a_copy_on_a_gpu_of_its_own_takes_nothing_of_the_one_that_trains(tmp_path):
    """Two share the cache of a batch; each holds all weights."""
    here, one, two = (
        memory_use(configuration(tmp_path, "0.5", *LONG, *more), GPU)
        for more in ((), ("sampler.gpus=[1]",), ("sampler.gpus=[1,2]",))
    )
    assert (one.always, one.update, one.sampling) == (here.always, here.update, {})
    assert one.copies == here.sampling
    assert two.copies["copy"] == one.copies["copy"]
    assert two.copies["keys and values"] == one.copies["keys and values"] / 2
    # whose copy takes 15.2
    large = configuration(tmp_path, "7.6", *LONG, "model.lora_rank=16", "sampler.gpus=[1]")
    with pytest.raises(ConfigError, match=r"needs 22.8 GB of each GPU"):
        refuse_overflow(large, 15e9)


def test_the_estimate_of_a_tiny_model_is_near_what_was_measured():
    """Eight jobs of `benchmarks/sweep_throughput.py --gpu` on one H200: nearly 4 GiB in most of
    them."""
    overrides = [f"{key}={value}" for key, value in SMALL.items()]
    assert bytes_of_process(config_of(*overrides), GPU) / 2**30 == pytest.approx(3.99, rel=0.1)


def test_a_short_conversation_may_be_sampled_beside_a_long_one(tmp_path):
    """Its cache goes as far as the longest that was said, and as the longest that may still
    follow."""
    room = ("rollout.max_completion_length=512", "task.max_prompt_length=100")
    kinds = (
        ("task=prompts", "task.path=x.jsonl"),
        ("task=conversation", "task.environment=my_module.Environment"),
    )
    one, several = (
        memory_use(configuration(tmp_path, "0.5", *room, *kind)).sampling["keys and values"]
        for kind in kinds
    )
    assert several / one == pytest.approx((100 + 2 * 512) / (100 + 512))


def test_a_run_that_reads_rollouts_samples_only_to_evaluate(tmp_path):
    """256 prompts of 4 completions take a cache of 1024 rows, whatever the file's rows are."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"token_ids": [1, 2], "loss_mask": [0, 1]}\n')
    sizes = ("evaluation.prompts_per_set=256", "evaluation.completions_per_prompt=4")
    c = config_of("experiment=sft", f"rollout.path={rows}", "evaluation.every=10", *sizes)
    assert memory_use(c, GPU).sampling["logits"] == 4 * 1024 * 12  # float32 of a vocabulary of 12
