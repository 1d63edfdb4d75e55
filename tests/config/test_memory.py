"""The estimate of the memory of a GPU is within 15 % of peaks measured on H200s and H100s, and a
refusal names a change that fits."""

import json
from pathlib import Path

import pytest
from builders.runs import config_of, last_of_each_key

from benchmarks.sweep_throughput import GPU as TINY
from pgtoolkit.config.memory import (
    bytes_of_process,
    max_tokens_for,
    memory_lines,
    memory_use,
    refuse_overflow,
)
from pgtoolkit.config.schema import Config
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


def job(folder: Path, size: str, *more: str) -> Config:
    """Return the configuration of a job of a Qwen2 with this many billion parameters."""
    *sizes, tied = SHAPES[size]
    shape = dict(zip(NAMES, sizes, strict=True)) | {
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **shape}))
    model = ("model=huggingface", f"model.path={folder}", "model.gradient_checkpointing=true")
    return config_of("accumulation.max_tokens=65536", *model, *more)


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
def test_the_estimate_is_within_15_percent_of_the_measured_peak(tmp_path, size, more, measured):
    """docs/performance.md has the jobs."""
    assert memory_use(job(tmp_path, size, *more), GPU).peak / 1e9 == pytest.approx(
        measured, rel=0.15
    )


def test_a_critic_takes_as_much_as_a_second_policy_in_training_without_its_lm_head(tmp_path):
    plan = memory_use(job(tmp_path, "0.55", *LONG, "advantage=gae", "loss=grpo"), GPU)
    trained = plan.always["weights"] + plan.always["gradients"] + plan.always["moments"]
    assert plan.always["critic"] == trained - 16 * 151936 * 1024
    plan = memory_use(job(tmp_path, "0.5", *LONG, "advantage=gae", "loss=grpo"), GPU)
    assert (
        plan.always["critic"]
        == plan.always["weights"] + plan.always["gradients"] + plan.always["moments"]
    )


H100 = 85.5e9
SMOLLM2 = {"model_type": "llama", "vocab_size": 49152, "tie_word_embeddings": True}
SMOLLM2 |= dict(zip(NAMES, (576, 1536, 30, 9, 3), strict=True))


def small_job(folder: Path, *more: str) -> Config:
    """Return the configuration of a job of SmolLM2-135M, whose chat template makes prompts of 46
    tokens."""
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    # Layers were transformers' own, and each completion had its prompt, when this was measured.
    measured_so = ("model.compile=false", "model.share_prompts=false")
    measured_so += ("model.gradient_checkpointing=false",)
    return config_of("experiment=sums", f"model.path={folder}", *measured_so, *more)


@pytest.mark.parametrize(
    ("max_tokens", "measured"),
    [(2048, 4.67), (4096, 6.77), (8192, 11.02), (16384, 18.53), ("checkpointed", 3.82)],
)
def test_the_estimate_of_a_small_model_is_within_10_percent_of_the_measured_peak(
    tmp_path, max_tokens, measured
):
    """Steps of 256 documents of 94 tokens, which fill their micro-batches, on an H100;
    `checkpointed` with 8192."""
    more = [f"accumulation.max_tokens={max_tokens}"]
    if max_tokens == "checkpointed":
        more = ["model.gradient_checkpointing=true"]
    config = small_job(tmp_path, "accumulation.docs_per_step=256", *more)
    assert memory_use(config, H100).peak / 1e9 == pytest.approx(measured, rel=0.1)


def test_the_estimate_without_gradient_checkpointing_is_within_10_percent_of_the_measured_peak(
    tmp_path,
):
    more = ("accumulation.max_tokens=16384", "model.gradient_checkpointing=false")
    config = job(tmp_path, "0.5", *LONG, *more, "model.compile=false")
    assert memory_use(config, H100).peak / 1e9 == pytest.approx(36.58, rel=0.1)


def test_memory_without_a_gpu_is_that_of_the_cpu_unless_the_run_is_for_a_gpu(tmp_path):
    devices = ("auto", "cpu", "cuda")
    auto, cpu, cuda = (
        job(tmp_path, "0.5", *LONG, f"trainer.device={name}", "model.gradient_checkpointing=auto")
        for name in devices
    )
    lines = [*memory_lines(auto, None)]
    assert lines == [*memory_lines(cpu, None)]
    assert lines[-1].endswith(" GB of memory in each process, on the CPU")
    # On a CPU no layer is made again.
    assert f"about {memory_use(cpu, None).peak / 1e9:.3g} GB" in lines[-1]
    assert "GPU" not in " ".join(lines)
    assert " GB on each GPU" in " ".join(memory_lines(cuda, None))
    assert [*memory_lines(auto, GPU)] == [*memory_lines(cuda, GPU)]


def test_auto_is_estimated_as_true_where_layers_can_keep_parts_and_as_false_elsewhere(tmp_path):
    """In 24 layers each of 65536 tokens keeps 896 numbers of attention's output, and results of
    products: 1152 of query, key and value, 896 of attention's output, 9728 of gate and up."""
    key = "model.gradient_checkpointing"
    again, auto, kept = (
        job(tmp_path, "0.5", *LONG, f"{key}={x}") for x in ("true", "auto", "false")
    )
    more = 24 * 65536 * 2 * (896 + 1152 + 896 + 9728)
    assert memory_use(auto, GPU) == memory_use(again, GPU)
    assert memory_use(kept, GPU).peak - memory_use(again, GPU).peak == more
    lines = [*memory_lines(auto, GPU)]
    assert lines[-1] == (
        "layers keep up to 39.9 GB more from the second step on, as far as the GPU has them"
    )
    assert [*memory_lines(again, GPU)] == lines[:-1]
    # A layer of autograd keeps 5 x 4864 + 12 x 896 numbers, where one that is made again keeps 896.
    more = 24 * 65536 * 2 * (5 * 4864 + 11 * 896)
    auto, kept = (
        job(tmp_path, "0.5", *LONG, f"{key}={x}", "model.lora_rank=16") for x in ("auto", "false")
    )
    assert memory_use(kept, GPU).peak - memory_use(auto, GPU).peak == more
    assert [*memory_lines(auto, GPU)][-1] == lines[-1].replace("39.9", "108")
    for other, reason in (
        ("model.dtype=float32", "model.dtype=float32"),
        ("parallelism=fsdp", "the model is spread over ranks"),
        ("parallelism=tensor", "the model is spread over ranks"),
        ("trainer.device=cpu", "trainer.device=cpu"),
    ):
        auto, kept = (job(tmp_path, "0.5", *LONG, f"{key}={x}", other) for x in ("auto", "false"))
        assert memory_use(auto, GPU) == memory_use(kept, GPU)
        told = [line for line in memory_lines(auto, GPU) if line not in memory_lines(kept, GPU)]
        assert told == [f"model.gradient_checkpointing=auto is false here, since {reason}"]


@pytest.mark.parametrize(
    ("more", "share", "is_shared"),
    [
        ((), "auto", True),
        (("model.dtype=float32",), "auto", False),
        (("trainer.device=cpu",), "auto", False),
        (("rollout.group_size=1", "rollout.prompts_per_batch=512"), "auto", False),
        (("model.dtype=float32",), "true", True),
        ((), "false", False),
    ],
)
def test_prompts_that_are_shared_are_counted_once_and_their_keys_for_each_completion(
    tmp_path, more, share, is_shared
):
    """A step of 64 documents of 8 prompts, of 1000 + 24 tokens each. But for keys and values 8
    prompts and 64 completions are computed, 9536 tokens in place of 65536. A layer keeps the keys
    and values of all 65536, 2 x 2 x 64 numbers for each."""
    settings = (
        *("task=prompts", "task.path=prompts.jsonl", "task.max_prompt_length=1000"),
        *("rollout.max_completion_length=24", "accumulation.docs_per_step=64"),
        *("model.gradient_checkpointing=false", "model.compile=false"),
        *(f"model.share_prompts={share}", "rollout.group_size=8", "rollout.prompts_per_batch=64"),
    )
    config = job(tmp_path, "0.5", *last_of_each_key(*settings, *more))
    update = memory_use(config, GPU).update
    size = 4 if "model.dtype=float32" in more else 2
    tokens = 8 * 1000 + 64 * 24 if is_shared else 65536
    further = size * 2 * 2 * 64 * (65536 - tokens)
    kept = size * (5 * 4864 + 12 * 896) * tokens + further
    assert update["hidden states"] == pytest.approx(24 * kept)
    a_layer = size * (8 * 4864 + 10 * 896) * tokens + 2 * further
    assert update["a layer or logits"] == pytest.approx(max(a_layer, GPU / 64))


def test_a_group_that_is_cut_fills_its_micro_batch_and_sees_keys_of_its_whole_prompt(tmp_path):
    """8192 tokens are computed either way. 8 documents of 1000 + 1000 tokens have 16 / 9 as many
    keys as the 9000 tokens that are computed of them; an update has each twice, with a gradient."""
    settings = (
        *("task=prompts", "task.path=prompts.jsonl", "task.max_prompt_length=1000"),
        *("rollout.max_completion_length=1000", "rollout.group_size=8"),
        *("accumulation.docs_per_step=64", "accumulation.max_tokens=8192"),
        *("kernel.logits_memory_mb=1",),
    )
    whole, shared = (
        memory_use(job(tmp_path, "0.5", *settings, f"model.share_prompts={share}"), GPU).update
        for share in ("false", "auto")
    )
    assert shared["hidden states"] == whole["hidden states"]
    more = shared["a layer or logits"] - whole["a layer or logits"]
    assert more == pytest.approx(2 * (2 * 2 * 2 * 64) * 8192 * (16 / 9 - 1))


def test_muon_keeps_one_moment_of_matrices_and_adamw_two_of_all(tmp_path):
    """A Qwen2 with 2 layers of width 16 (2 heads, 1 of keys; MLP of 32), its head apart, and 10
    tokens: a layer has 2 x 16 x 16 + 2 x 16 x 8 + 3 x 16 x 32 weights in matrices, and 32 in norms,
    and embedding and head have 2 x 160."""
    sizes = dict(zip(NAMES, (16, 32, 2, 2, 1), strict=True))
    config = {"model_type": "qwen2", **sizes, "vocab_size": 10, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ("model=huggingface", f"model.path={tmp_path}", "parallelism=single")

    def always(*more: str) -> dict[str, float]:
        plan = memory_use(config_of(*model, "advantage=gae", "loss=grpo", *more))
        return plan.always

    matrices = 2 * (512 + 256 + 1536)
    others = 2 * 32 + 320
    assert always()["moments"] == 8 * (matrices + others)
    assert always()["critic"] == 16 * (matrices + others - 160)
    assert always("optimizer=muon")["moments"] == 4 * matrices + 8 * others
    assert always("optimizer=muon")["critic"] == 12 * matrices + 16 * (others - 160)
    adapters = 2 * 3 * (2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 32))
    plain, muon = (
        memory_use(config_of(*model, "model.lora_rank=3", *more)).always["adapters"]
        for more in ((), ("optimizer=muon",))
    )
    assert (plain, muon) == (16 * adapters, 12 * adapters)


def test_adapters_of_experts_are_counted_where_their_names_are_targets(tmp_path):
    """5 experts of width 8 in each of 2 layers: A and B of rank 3 have 3 x 5 x (16 + 16) numbers
    for gate and up, 3 x 5 x (8 + 16) for down. Attention has 3 x (2 x (16 + 16) + 2 x (16 + 8)).
    """
    sizes = dict(zip(NAMES, (16, 32, 2, 2, 1), strict=True))
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = {"model_type": "qwen3_moe", **sizes, **experts, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ("model=huggingface", f"model.path={tmp_path}", "model.lora_rank=3")
    for targets, numbers in (
        ("all-linear", 0),
        ("q_proj,down_proj", 24),
        ("mlp.experts.gate_up_proj,experts.down_proj", 24 + 32),
    ):
        plan = memory_use(config_of(*model, f"model.lora_targets=[{targets}]"))
        assert plan.always["adapters"] == 16 * 2 * 3 * (2 * 32 + 2 * 24 + 5 * numbers)


def test_a_step_that_does_not_fill_its_micro_batch_takes_no_more_for_a_larger_one(tmp_path):
    """64 documents of at most 94 tokens. A process was measured to take 8.3 GB."""
    smaller, larger = (
        bytes_of_process(small_job(tmp_path, f"accumulation.max_tokens={max_tokens}"), H100)
        for max_tokens in (8192, 16384)
    )
    assert smaller / 1e9 == pytest.approx(8.3, rel=0.15)
    assert smaller == larger


def test_hidden_states_of_a_step_grow_with_the_length_of_its_documents(tmp_path):
    short, long = (
        memory_use(
            small_job(tmp_path, "accumulation.max_tokens=16384", f"task.num_digits={digits}"), H100
        ).update["hidden states"]
        for digits in (2, 40)
    )
    # A digit is a token; the longer prompts have 2 x 38 digits more.
    assert long / short == pytest.approx((94 + 76) / 94)


LONGEST_PROMPT = "What is 41 + 83? Answer with the number only."


@pytest.mark.parametrize(
    ("rows", "as_with"),
    [
        # The longest prompt has 46 tokens, like those of experiment=sums.
        (
            [{"prompt": "1 + 1?"}, {"prompt": [{"role": "user", "content": LONGEST_PROMPT}]}],
            (),
        ),
        # No prompt is known: micro-batches may be full.
        ([{}], ("accumulation.docs_per_step=256", "accumulation.max_tokens=16384")),
    ],
)
def test_prompts_of_a_file_are_estimated_by_the_longest_and_micro_batches_as_full_without_one(
    tmp_path, rows, as_with
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)))
    task = ("task=prompts", f"task.path={prompts}", "accumulation.max_tokens=16384")
    of_file = memory_use(small_job(tmp_path, *task), H100).update["hidden states"]
    expected = memory_use(small_job(tmp_path, *as_with), H100).update["hidden states"]
    assert of_file == pytest.approx(expected, rel=0.01)


def test_largest_micro_batch_that_fits_is_given_in_steps_of_256_tokens(tmp_path):
    full = ("accumulation.docs_per_step=256", "accumulation.max_tokens=16384")
    limit = H100 / 8
    tokens = max_tokens_for(small_job(tmp_path, *full), limit, H100)
    assert tokens == 7168
    fitting, beyond = (
        bytes_of_process(
            small_job(tmp_path, full[0], f"accumulation.max_tokens={max_tokens}"), H100
        )
        for max_tokens in (tokens, tokens + 256)
    )
    assert fitting <= limit < beyond


def test_no_micro_batch_fits_if_cuda_alone_is_too_large_or_steps_would_change(tmp_path):
    full = ("accumulation.docs_per_step=256", "accumulation.max_tokens=16384")
    assert max_tokens_for(small_job(tmp_path, *full), H100 / 40, H100) is None
    fixed = small_job(
        tmp_path,
        "accumulation.docs_per_step=0",
        "accumulation.micro_batches_per_step=2",
        "accumulation.max_tokens=16384",
    )
    assert max_tokens_for(fixed, H100 / 8, H100) is None


def test_a_job_that_does_not_fit_is_refused_with_a_change_that_fits(tmp_path):
    large = job(tmp_path, "7.6", *LONG)
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


def test_a_copy_that_samples_on_another_gpu_takes_no_memory_of_the_one_that_trains(tmp_path):
    without_copy, one_copy, two_copies = (
        memory_use(job(tmp_path, "0.5", *LONG, *more), GPU)
        for more in ((), ("sampler.gpus=[1]",), ("sampler.gpus=[1,2]",))
    )
    assert one_copy.always == without_copy.always
    assert one_copy.update == without_copy.update
    assert one_copy.sampling == {}
    assert one_copy.copies == without_copy.sampling
    # Each copy holds all weights, and half of the cache.
    assert two_copies.copies["copy"] == one_copy.copies["copy"]
    assert two_copies.copies["keys and values"] == one_copy.copies["keys and values"] / 2


def test_the_gpu_of_a_copy_is_checked_too(tmp_path):
    # The weights of the copy alone are 15.2 GB.
    large = job(tmp_path, "7.6", *LONG, "model.lora_rank=16", "sampler.gpus=[1]")
    with pytest.raises(ConfigError, match=r"needs 22.8 GB of each GPU"):
        refuse_overflow(large, 15e9)


def test_the_estimate_of_a_tiny_model_is_within_10_percent_of_the_measured_peak():
    """Eight jobs of `benchmarks/sweep_throughput.py --gpu` on one H200: nearly 4 GiB in most of
    them."""
    overrides = [f"{key}={value}" for key, value in TINY.items()]
    assert bytes_of_process(config_of(*overrides), GPU) / 2**30 == pytest.approx(3.99, rel=0.1)


def test_the_cache_of_conversations_has_room_for_two_completions(tmp_path):
    """A conversation with a full completion behind it may be sampled together with one that has all
    of its completion before it."""
    lengths = ("rollout.max_completion_length=512", "task.max_prompt_length=100")
    single_turn, conversation = (
        memory_use(job(tmp_path, "0.5", *lengths, *task)).sampling["keys and values"]
        for task in (
            ("task=prompts", "task.path=x.jsonl"),
            ("task=conversation", "task.environment=my_module.Environment"),
        )
    )
    assert conversation / single_turn == pytest.approx((100 + 2 * 512) / (100 + 512))


def test_sampling_of_a_run_that_reads_rollouts_is_estimated_by_its_evaluations(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"token_ids": [1, 2], "loss_mask": [0, 1]}\n')
    sizes = ("evaluation.prompts_per_set=256", "evaluation.completions_per_prompt=4")
    config = config_of("experiment=sft", f"rollout.path={rows}", "evaluation.every=10", *sizes)
    # 1024 rows of logits in float32, for a vocabulary of 12.
    assert memory_use(config, GPU).sampling["logits"] == 4 * 1024 * 12
