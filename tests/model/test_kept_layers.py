"""How many layers keep how much is decided by the memory of a first step, and kept by a resume."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY, Mock

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
from model.test_compiled import packed, states_and_gradient
from torch.nn import functional

from pgtoolkit.assembly.train import train
from pgtoolkit.config.schema import Config
from pgtoolkit.model.architectures import architecture_of
from pgtoolkit.model.kept_layers import (
    KeepsByMemory,
    KeptLayers,
    StepMemory,
    can_keep,
    least_of,
    room,
)
from pgtoolkit.model.recomputed import BytesOfToken, bytes_of_token
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
    size = bytes_of_token(layers[0], policy.compute_dtype)
    # A rank that had no document says that a token takes nothing.
    nothing = BytesOfToken(0, 0, 0)
    memory = replace(MEMORY, room=-(-room * 10 // 9))
    kept = keeps.decided([(memory, nothing), (memory, size)])
    expected = PEAK + 160_000 * attention + 512_000 * products
    assert kept == KeptLayers(attention, products, expected)
    # Of a layer of autograd attention's output alone is not kept.
    kept = keeps.decided([(memory, size._replace(attention=0))])
    whole = min(2, max(0, room - PEAK) // 512_000)
    assert kept == KeptLayers(whole, whole, PEAK + 512_000 * whole)


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


def test_layers_can_be_kept_where_their_memory_follows_from_the_number_of_tokens():
    kinds = ("qwen3", "qwen3_by_document", "qwen3_lora_by_document", "gpt2_by_document")
    policies = {kind: small_policy(kind) for kind in (*kinds, "mixture_by_document")}
    able = [name for name, policy in policies.items() if can_keep(policy, ONE_PROCESS)]
    assert able == [*kinds[1:]]


@pytest.mark.parametrize("kind", ["qwen3_lora", "qwen3_lora_compiled", "gemma3", "gpt2"])
@pytest.mark.usefixtures("uncompiled")
def test_gradients_are_the_same_bits_whichever_layers_of_autograd_are_kept(monkeypatch, kind):
    """The memory is that for so many layers. In the layers before them attention is computed again
    for each of two documents."""
    policy = replace(small_policy(f"{kind}_by_document"), compute_dtype=torch.bfloat16)
    policy.model.float()
    lengths = (9, 12)
    expected = states_and_gradient(policy, lengths)
    layers = architecture_of(policy.model).layers_of(policy.model)
    for number in (0, 1, 2):
        keeps = KeepsByMemory([policy], 21, ONE_PROCESS)
        keeps.begin_step()
        assert_equal(states_and_gradient(policy, lengths), expected)
        of_token = max(layer._gradient_checkpointing_func.size.products for layer in layers)
        free = 10 * (1000 + 21 * number * of_token) // 9 + 1
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 10**12))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
        keeps.end_step(1000, [packed(lengths)])
        assert keeps.kept == KeptLayers(number, number, 1000 + 21 * number * of_token)
        assert not any(hasattr(layer._gradient_checkpointing_func, "size") for layer in layers)
        again = [layer.gradient_checkpointing for layer in layers]
        assert again == [True] * (2 - number) + [False] * number
        assert_equal(states_and_gradient(policy, lengths), expected)
        hidden = policy.hidden_states(packed(lengths))
        with monkeypatch.context() as patch:
            attend = Mock(wraps=functional.scaled_dot_product_attention)
            patch.setattr(functional, "scaled_dot_product_attention", attend)
            hidden.sum().backward()
        assert attend.call_count == 2 * (2 - number)


def test_what_autograd_would_keep_of_a_layer_is_what_it_does_keep():
    """By the memory of a process, which has the layer's output too, but has cosines and sines of
    the positions, 2 x 4 numbers a token, for all layers. The largest micro-batch is measured, and
    no pass without gradients, which transformers 5.17 checkpoints too."""
    policy = small_policy("qwen3_lora_by_document")
    policy.model.float()
    KeepsByMemory([policy], 1000, ONE_PROCESS)
    layer = policy.model.base_model.layers[1]
    measured = layer._gradient_checkpointing_func
    for length in (3, 90, 40):
        policy.hidden_states(packed((length,)))
    with torch.no_grad():
        measured(lambda hidden: 2 * hidden, torch.ones(1, 100, 16))
    layer.gradient_checkpointing = False
    inputs = []
    layer.register_forward_pre_hook(
        lambda _, arguments, options: inputs.append((arguments, options)), with_kwargs=True
    )
    policy.hidden_states(packed((90,)))
    arguments, options = inputs[0]
    with torch.profiler.profile(profile_memory=True) as profiler:
        out = layer(*arguments, **options)
    taken = sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    assert measured.size == (4 * 16, 0, pytest.approx((taken - out.nbytes) / 90 + 4 * 2 * 4, abs=1))


def test_nothing_is_decided_by_a_step_without_documents(monkeypatch):
    policy = small_policy("qwen3_lora_by_document")
    keeps = KeepsByMemory([policy], 9, ONE_PROCESS)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 10**12))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    keeps.begin_step()
    keeps.end_step(1000, [])
    assert keeps.kept is None
    policy.hidden_states(packed((9,)))
    keeps.end_step(1000, [packed((9,))])
    assert keeps.kept == KeptLayers(2, 2, 1000 + 2 * 9 * keeps._measured[0].size.products)


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
@pytest.mark.parametrize("lora", [(), ("model.lora_rank=2",)])
def test_on_a_gpu_a_run_keeps_all_from_its_second_step_on_and_a_resumed_run_does(
    folder, tmp_path, lora
):
    settings = (
        *lora,
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
