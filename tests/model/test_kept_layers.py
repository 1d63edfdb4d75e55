"""How many layers keep how much is decided by the memory of a first step, and kept by a resume."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama, small_policy
from builders.processes import layout, world
from builders.runs import (
    assert_equal,
    checkpoint_of,
    config_of,
    copy_as_of,
    metrics_of,
    with_model,
)
from builders.uncompiled import uncompiled_functions

from pgtoolkit.assembly.train import train
from pgtoolkit.config.schema import Config
from pgtoolkit.model import compiled
from pgtoolkit.model.kept_layers import (
    KeepsByMemory,
    KeptLayers,
    StepMemory,
    can_keep,
    least_of,
    room,
)
from pgtoolkit.ranks.layout import ONE_PROCESS

MEMORY = StepMemory(before=1_000_000, after=3_000_000, peak=5_000_000, room=0, tokens=800)
"""Of a step that made moments of 2 MB."""

PEAK = 7_000_000 + 200 * (2 * 64 + 4 * 512)
"""With them, in a micro-batch of 200 tokens more: two layers' hidden states, and four times the
results of a layer's products."""


@pytest.mark.parametrize(
    ("room", "attention", "products"),
    [
        (PEAK - 1, 0, 0),
        (PEAK + 160_000 - 1, 0, 0),
        (PEAK + 160_000, 1, 0),
        (PEAK + 320_000 + 512_000 - 1, 2, 0),
        (PEAK + 320_000 + 512_000, 2, 1),
        (PEAK + 320_000 + 1_024_000, 2, 2),
        (10 * PEAK, 2, 2),
    ],
)
def test_attention_is_kept_before_products_in_nine_tenths_of_the_memory(room, attention, products):
    """A token takes 64 bytes for 16 hidden numbers. Kept are 32 numbers of attention's output with
    8 logarithms, and 128 of products: of query, key and value 64, of attention's output 16, of gate
    and up 48. The largest micro-batch has 1000 tokens."""
    policy = small_policy("qwen2_by_document")
    policy.model.float()
    keeps = KeepsByMemory([policy], 1000, ONE_PROCESS)
    layers = policy.model.base_model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, True]
    kept = keeps.fitting(replace(MEMORY, room=-(-room * 10 // 9)))
    expected = PEAK + 160_000 * attention + 512_000 * products
    assert kept == KeptLayers(attention, products, expected)


@pytest.mark.parametrize(
    ("jobs", "free", "expected"), [(None, 60, 65), ("4", 60, 19.3), ("4", 3, 8), ("40", 60, 1.3)]
)
def test_a_job_has_its_share_of_a_gpu_less_what_cuda_takes(monkeypatch, jobs, free, expected):
    """In GB, on a GPU of 80, of which the process has 5."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 * 10**9)
    if jobs:
        monkeypatch.setenv("PGTK_JOBS_ON_GPU", jobs)
    assert room() == round(expected * 1e9)


def test_the_rank_with_the_least_memory_decides():
    of_ranks = [KeptLayers(2, 1, 900), KeptLayers(3, 0, 800)]
    assert least_of(of_ranks) == KeptLayers(2, 0, 900)


def test_layers_of_known_models_that_are_compiled_can_keep_parts():
    policies = {}
    for kind in ("qwen3", "qwen3_lora", "gpt2"):
        policy = small_policy(f"{kind}_by_document")
        compiled.switch_on(policy.model)
        policies[kind] = replace(policy, compiled=True)
    policies["not by document"] = replace(small_policy("qwen3"), compiled=True)
    policies["not compiled"] = small_policy("qwen3_by_document")
    able = [name for name, policy in policies.items() if can_keep(policy, ONE_PROCESS)]
    assert able == ["qwen3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose heads are wide enough for the kernel of attention on a GPU."""
    model = small_llama(hidden_size=32, num_hidden_layers=2)
    return save_with_tokenizer(model, tmp_path_factory.mktemp("llama"))


def train_on_rank(config: Config, folder: Path) -> None:
    with uncompiled_functions():
        train(config, folder, layout=layout(data_parallel=2))


@pytest.mark.slow
def test_with_ddp_on_a_cpu_a_run_is_the_same_to_the_bit_whatever_is_kept(folder, tmp_path):
    """Layers are computed as on a GPU, since completions share their prompts."""
    settings = (
        "trainer.max_steps=2",
        "trainer.device=cpu",
        "model.compile=true",
        "model.share_prompts=true",
        "parallelism.data_parallel=2",
    )
    results = []
    for value in ("true", "auto"):
        key = f"model.gradient_checkpointing={value}"
        config = config_of(*with_model(folder, *settings, key))
        run = tmp_path / value
        world(2).run(train_on_rank, config, run)
        results.append([metrics_of(run), checkpoint_of(run, 2)])
    assert_equal(results[1], results[0])


def of_run(folder, run, value, *overrides):
    """Train four steps with a value of the key; return metrics and the last checkpoint."""
    settings = ("trainer.max_steps=4", f"model.gradient_checkpointing={value}")
    train(config_of(*with_model(folder, *settings, *overrides)), run)
    return metrics_of(run), checkpoint_of(run, 4)


@pytest.mark.gpu
def test_on_a_gpu_a_run_keeps_all_from_its_second_step_on_and_a_resumed_run_does(folder, tmp_path):
    settings = (
        "trainer.device=cuda",
        "model.dtype=bfloat16",
        "trainer.deterministic=true",
        "trainer.checkpoint_every=1",
    )
    metrics, checkpoint = of_run(folder, tmp_path / "true", "true", *settings)
    assert "kept_layers" not in checkpoint
    for value in ("auto", "false"):
        others, other = of_run(folder, tmp_path / value, value, *settings)
        kept = other.pop("kept_layers", None)
        if value == "auto":
            assert kept == {"attention": 2, "products": 2, "peak_bytes": ANY}
            assert 0 < kept["peak_bytes"] < torch.cuda.mem_get_info()[1]
            assert_equal(checkpoint_of(tmp_path / "auto", 1)["kept_layers"], kept)
        assert_equal([others, other], [metrics, checkpoint])
    resumed = copy_as_of(tmp_path / "auto", 2, tmp_path / "resumed")
    settings = ("trainer.max_steps=4", "model.gradient_checkpointing=auto", *settings)
    train(config_of(*with_model(folder, *settings)), resumed, resume=True)
    assert metrics_of(resumed) == metrics
    assert (
        checkpoint_of(resumed, 4).pop("kept_layers")
        == checkpoint_of(tmp_path / "auto", 4)["kept_layers"]
    )
    # A GPU that had less memory would decide anew.
    policy = small_policy("qwen2_by_document")
    keeps = KeepsByMemory([policy], 1000, ONE_PROCESS)
    total = torch.cuda.mem_get_info()[1]
    keeps.load_state_dict({"attention": 2, "products": 1, "peak_bytes": total})
    assert keeps.kept is None
    keeps.load_state_dict({"attention": 2, "products": 1, "peak_bytes": 1000})
    assert keeps.kept == KeptLayers(2, 1, 1000)
    layers = policy.model.base_model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, False]
    assert [layer.keeps_attention for layer in layers] == [True, True]
