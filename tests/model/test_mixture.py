"""A mixture's experts in sampling are compared with those in training; what knows no experts
refuses them."""

import functools
import re

import pytest
import torch
from builders.losses import DEVICE
from builders.models import model_config, save_with_tokenizer, small_policy
from builders.runs import (
    assert_equal,
    checkpoint_of,
    config_of,
    copy_as_of,
    metrics_of,
    module_and_loader,
    sampler_of,
    with_model,
)
from model.test_decoding import PROMPTS
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from pgtoolkit.assembly.build import build, policy_of
from pgtoolkit.assembly.train import train
from pgtoolkit.cli import main
from pgtoolkit.completion import Request
from pgtoolkit.config.models import Sizes
from pgtoolkit.config.validate import validate
from pgtoolkit.errors import ConfigError
from pgtoolkit.model import lora
from pgtoolkit.model.architectures import has_experts
from pgtoolkit.model.decoding import Routing
from pgtoolkit.model.mixture import num_others
from pgtoolkit.model.setup import build_policy
from pgtoolkit.model.weight_files import open_model
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.training.checkpoint import load_newest
from pgtoolkit.training.state import load_weights


@torch.no_grad()
def chosen_by(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Return the experts with the largest logits of transformers' routers, (layers, T, k)."""
    outputs = model(input_ids=torch.tensor([tokens]), output_router_logits=True)
    return torch.stack(outputs.router_logits).topk(2).indices


def test_the_experts_of_the_first_completions_are_those_of_a_forward_pass():
    """Some rows end before others, and some share a prompt."""
    policy = small_policy("mixture_experts")
    prompts = [PROMPTS[1], PROMPTS[0], PROMPTS[1], *PROMPTS]
    routing = Routing(policy.model, 4)
    tokens, _ = policy.decode(
        prompts,
        60,
        False,
        draw=likeliest_or_not,
        uniform=torch.arange(60.0).expand(len(prompts), -1) + torch.arange(len(prompts))[:, None],
        check=lambda: None,
        ends=[4, 17],
        routing=routing,
    )
    lengths = []
    for row, prompt in enumerate(prompts[:4]):
        completion = tokens[row].tolist()
        ends = (place + 1 for place, token in enumerate(completion) if token in (4, 17))
        lengths.append(next(ends, 60))
        document = [*prompt, *completion[: lengths[-1]]][:-1]
        expected = chosen_by(policy.model, document)
        actual = routing.chosen[:, row, : len(document)]
        assert torch.equal(actual.sort(-1).values, expected.sort(-1).values)
    assert len(set(lengths)) > 2


def likeliest_or_not(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens, or where uniform is a multiple of 3 the second ones."""
    log_probs, tokens = logits.log_softmax(-1).topk(2)
    second = (uniform % 3 == 0).long()[:, None]
    return tokens.gather(1, second)[:, 0], log_probs.gather(1, second)[:, 0].float()


def test_choices_with_an_expert_that_is_not_among_others_are_counted():
    chosen = torch.tensor([[[0, 1], [2, 3]], [[4, 0], [1, 2]]])
    others = torch.tensor([[[1, 0], [3, 4]], [[2, 3], [2, 1]]])
    assert num_others(chosen, others) == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = small_policy("mixture").model.float()
    return save_with_tokenizer(model, tmp_path_factory.mktemp("mixture"))


def test_a_run_says_how_many_choices_for_its_first_completions_are_others_in_training(
    folder, caplog
):
    """Here the last router in training, and not its copy in sampling, takes the next experts."""
    caplog.set_level("INFO", "pgtoolkit")
    settings = ("sampler.static_cache=true", "model.dtype=bfloat16")
    module, loader = build(config_of(*with_model(folder, *settings)))
    model = module.policy.model
    requests = [Request(PROMPTS[0], 2, 1), Request(PROMPTS[3], 3, 2)]
    counted = {}
    warned = {}
    for taken in (0, 1):
        caplog.clear()
        handle = model.model.layers[-1].mlp.gate.register_forward_hook(
            lambda _router, _inputs, outputs, taken=taken: (*outputs[:2], (outputs[2] + taken) % 5)
        )
        sampler = sampler_of(loader)
        sampler._compares_routing = True
        completions = sampler.complete(requests)
        handle.remove()
        (line,) = [message for message in caplog.messages if message.startswith("routing ")]
        warned[taken] = "Use correction=token_truncate, in" in caplog.text
        counted[taken] = [int(x) for x in re.findall(r"\((\d+) of (\d+),", line)[0]]
    prompts = [PROMPTS[0]] * 2 + [PROMPTS[3]] * 3
    documents = [
        [*prompt, *completion.tokens.tolist()][:-1]
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    num_tokens = sum(len(document) for document in documents)
    assert counted[0][1] == counted[1][1] == 2 * num_tokens
    assert counted[0][0] <= 0.02 * num_tokens
    assert counted[1][0] == pytest.approx(num_tokens, abs=0.02 * num_tokens)
    assert warned == {0: False, 1: True}
    caplog.clear()
    sampler.complete(requests)
    assert "routing" not in caplog.text


def test_a_checkpoint_with_the_experts_of_a_layer_as_one_tensor_is_a_model_folder(folder, tmp_path):
    model = small_policy("mixture").model.float()
    save_with_tokenizer(model, tmp_path)
    published = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.4.up_proj.weight" in published
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    for path in (folder, tmp_path):
        policy = build_policy(model_config(path), None, on_gpu=False)
        assert all(map(torch.equal, policy.model.state_dict().values(), weights.values()))
    weights["model.layers.1.mlp.experts.down_proj"] = torch.zeros(5, 8, 16)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"experts\.0\.down_proj.weight of shape \[8, 16\]"):
        open_model(str(tmp_path))


FULL = ("model.gradient_checkpointing=true", "optimizer.learning_rate=0.01")
ADAPTERS = (
    "model.lora_rank=2",
    "model.lora_targets=[q_proj,gate_up_proj,down_proj]",
    "optimizer.learning_rate=0.05",
)


@pytest.mark.parametrize("settings", [FULL, ADAPTERS])
@torch.no_grad()
def test_a_resumed_run_is_bit_equal_and_its_export_is_the_trained_model(folder, tmp_path, settings):
    """transformers loads what was exported, from the names of published models, and a checkpoint of
    adapters as peft does."""
    config = config_of(*with_model(folder, *settings, "trainer.max_steps=2"))
    train(config, tmp_path / "run")
    resumed = copy_as_of(tmp_path / "run", 1, tmp_path / "resumed")
    train(config, resumed, resume=True)
    assert metrics_of(resumed) == metrics_of(tmp_path / "run")
    first, last = (checkpoint_of(tmp_path / "run", step)["model"] for step in (1, 2))
    assert_equal(checkpoint_of(resumed, 2)["model"], last)
    of_experts = [name for name in last if ".experts." in name]
    assert len(of_experts) == 2 * (2 if settings != ADAPTERS else 4)
    assert all((first[name] - last[name]).abs().max() > 1e-7 for name in of_experts)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    names = load_file(tmp_path / "model" / "model.safetensors").keys()
    assert names == load_file(folder / "model.safetensors").keys()
    policy = build_policy(config.model, None, on_gpu=False)
    text = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    before = policy.model(text).logits
    load_weights(policy, load_newest(tmp_path / "run" / "checkpoints"))
    expected = policy.model(text).logits
    of_transformers = functools.partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    loaded = [of_transformers(tmp_path / "model")]
    if settings == ADAPTERS:
        checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
        loaded.append(of_transformers(checkpoint))
        loaded.append(PeftModel.from_pretrained(of_transformers(folder), checkpoint))
    for model in loaded:
        torch.testing.assert_close(model(text).logits, expected, rtol=0, atol=3e-6)
    assert (before - expected).abs().max() > 1e-4


MIXTRAL = {
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("kind", "target", "known", "others"),
    [
        ("qwen3_moe", "experts", "down_proj, gate_up_proj, k_proj, ", " and routers"),
        ("qwen3_moe", "gate", "down_proj, gate_up_proj, k_proj, ", " and routers"),
        ("mixtral", "down_proj", "k_proj, ", ", routers and experts"),
    ],
)
def test_adapters_for_what_has_no_matrices_of_its_own_are_refused(
    folder, tmp_path, kind, target, known, others
):
    if kind == "mixtral":
        folder = save_with_tokenizer(MixtralForCausalLM(MixtralConfig(**MIXTRAL)), tmp_path)
    message = (
        rf"\(got {target}\)\. It has {known}o_proj, q_proj, v_proj; its head{others} are not "
        r"adapted\. Use model.lora_targets=\[all-linear\]"
    )
    with pytest.raises(ConfigError, match=message):
        build_policy(model_config(folder, lora_rank=2, lora_targets=[target]), None, False)


def test_vllm_samples_from_no_mixture_whose_published_names_are_unknown(tmp_path):
    folder = save_with_tokenizer(MixtralForCausalLM(MixtralConfig(**MIXTRAL)), tmp_path)
    config = config_of(*with_model(folder, "sampler=vllm"))
    message = (
        r"sampler=vllm needs .*, or one of type qwen3_moe \(got mixtral\)\. vLLM reads each expert "
        r"under a name of its own.*Use sampler=transformers\."
    )
    with pytest.raises(ConfigError, match=message):
        policy_of(config, None, ONE_PROCESS)
    assert not has_experts(small_policy("qwen3").model)


MUON = (
    r"optimizer=muon needs matrices to train \(got experts\).*"
    r"Use optimizer=adamw, in Python name='adamw'\."
)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3_moe", ()),
        ("qwen3_moe", ("model.lora_rank=2", "model.lora_targets=[q_proj,experts.down_proj]")),
        ("mixtral", ()),
    ],
)
def test_experts_are_not_updated_by_muon(folder, tmp_path, kind, settings):
    """`check` knows qwen3_moe, and the run every type."""
    if kind == "mixtral":
        folder = save_with_tokenizer(MixtralForCausalLM(MixtralConfig(**MIXTRAL)), tmp_path)
    settings = with_model(folder, "optimizer=muon", *settings)
    (problem,) = validate(config_of(*settings))[1].problems or [""]
    assert bool(re.search(MUON, problem)) == (kind == "qwen3_moe")
    with pytest.raises(ConfigError, match=MUON):
        module_and_loader(*settings, dtype=None)


def test_the_weights_of_a_published_mixture_are_counted():
    """Qwen3-30B-A3B has 30.5 billion (https://huggingface.co/Qwen/Qwen3-30B-A3B)."""
    settings = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "vocab_size": 151936,
    }
    assert Sizes(settings).weights == pytest.approx(30.5e9, rel=2e-3)


@pytest.mark.gpu
def test_on_a_gpu_experts_repeat_to_the_bit_and_are_as_near_to_float32_as_transformers():
    torch.manual_seed(0)
    policy = small_policy("mixture")
    block = policy.model.model.layers[0].mlp.float().cuda()
    tokens = torch.randn(1, 3000, 16, device="cuda")
    results = {}
    for name, implementation in (("ours", "pgtoolkit"), ("again", "pgtoolkit"), ("eager", "eager")):
        small_policy("mixture_experts")  # registers ours
        block.experts.config._experts_implementation = implementation
        for kind, enabled in (("bfloat16", True), ("float32", False)):
            x = tokens.clone().requires_grad_()
            block.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
                out = block(x)
            (out * torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)).sum().backward()
            gradients = [x.grad, *(weight.grad for weight in block.parameters())]
            results[name, kind] = [out.detach().clone(), *(g.clone() for g in gradients)]
    for kind in ("bfloat16", "float32"):
        assert all(map(torch.equal, results["ours", kind], results["again", kind]))
    for ours, eager, exact in zip(
        results["ours", "bfloat16"],
        results["eager", "bfloat16"],
        results["eager", "float32"],
        strict=True,
    ):
        errors = [float((x.double() - exact.double()).norm()) for x in (ours, eager)]
        assert errors[0] < 1.3 * errors[1] + 1e-3 * float(exact.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [3, 8])
def test_on_a_gpu_adapters_of_experts_repeat_to_the_bit_and_are_near_to_float32(rank):
    """Rank 8 has the products of all experts as one kernel, rank 3 has not."""
    torch.manual_seed(0)
    model = small_policy("mixture_experts").model.float()
    targets = ["gate_up_proj", "down_proj"]
    lora.add_adapters(model, model_config("", lora_rank=rank, lora_alpha=4.0, lora_targets=targets))
    experts = model.model.layers[0].mlp.experts.to(DEVICE)
    for weight in experts.parameters():
        weight.data += 0.2 * torch.randn_like(weight)
    tokens = torch.randn(3000, 16, device=DEVICE)
    choice = torch.rand(3000, 5, device=DEVICE).topk(2)
    results = {}
    for kind in ("bfloat16", "again", "float32"):
        x = tokens.clone().requires_grad_()
        experts.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=kind != "float32"):
            out = experts(x, choice.indices, choice.values)
        (out * torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out)).sum().backward()
        gradients = [x.grad, *(p.grad for p in experts.parameters() if p.requires_grad)]
        results[kind] = [out.detach().clone(), *(gradient.clone() for gradient in gradients)]
    assert len(results["float32"]) == 2 + 4
    assert all(map(torch.equal, results["bfloat16"], results["again"]))
    for half, exact in zip(results["bfloat16"], results["float32"], strict=True):
        assert float((half.double() - exact.double()).norm()) < 0.02 * float(exact.double().norm())
