"""Adapters of LoRA have the gradient of their plain formulation, merge into the model's weights,
and leave the frozen weights as they are."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import models
from builders.models import model_config, save_with_tokenizer, small_llama
from builders.parts import ROLLOUT, short_loader, short_module
from builders.runs import sampler_of
from model import spread
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from pgtoolkit.document import Document
from pgtoolkit.errors import ConfigError
from pgtoolkit.model import mixture
from pgtoolkit.model.lora import (
    adapted_layers,
    adapter_weights,
    merge,
    settings,
    without_adapters,
)
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.settings import NumberType
from pgtoolkit.model.setup import build_policy
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.rollouts.settings import OldLogProbs
from pgtoolkit.training.settings import OptimizerSettings

RANK = 3
ALPHA = 4.0
SAMPLING = replace(ROLLOUT, old_log_probs=OldLogProbs.sampling)


@pytest.fixture(scope="module", params=["llama", "gpt2", "mixture"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small model whose head is its embedding. GPT-2 stores its matrices
    transposed, a mixture those of all experts of a layer as one tensor."""
    if request.param == "llama":
        model = small_llama(num_hidden_layers=2, tie_word_embeddings=True)
    elif request.param == "mixture":
        model = models.small_policy("mixture_tied").model.float()
    else:
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=12, bos_token_id=None, eos_token_id=11, **sizes)
        )
    for weight in model.parameters():
        weight.data += 0.2 * torch.randn(weight.shape)
    return save_with_tokenizer(model, tmp_path_factory.mktemp(request.param))


def targets_in(folder: Path) -> list[str]:
    """Return the layers of the folder's model that get adapters."""
    is_mixture = folder.name.startswith("mixture")
    return ["q_proj", "gate_up_proj", "down_proj"] if is_mixture else ["all-linear"]


def new_policy(folder: Path, rank: int, **changes: object) -> Policy:
    """Return the folder's model with new adapters. changes: other settings."""
    settings = model_config(folder, lora_rank=rank, lora_targets=targets_in(folder), **changes)
    return build_policy(settings, None, False)


def adapted_policy(folder: Path, **changes: object) -> Policy:
    """Return a policy whose adapters change its logits."""
    policy = new_policy(folder, RANK, lora_alpha=ALPHA, **changes)
    draw_adapters(policy.model, std=0.1)
    return policy


def draw_adapters(model: nn.Module, std: float) -> None:
    """Draw the matrices that are zero at the start."""
    for name, weight in adapter_weights(model).items():
        if "lora_B" in name:
            nn.init.normal_(weight, std=std)


def adapted_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen weights that have an adapter, by their names in the plain model."""
    weights = {}
    for name, layer in adapted_layers(model).items():
        part = getattr(layer, "parameter_name", "weight")
        owner = name.removesuffix(".base_layer")
        weights[f"{owner}.{part}"] = getattr(layer.get_base_layer(), part)
    return weights


def plain_model(folder: Path) -> nn.Module:
    """Return transformers' model, with its loop over experts."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    if folder.name.startswith("mixture"):
        model.set_experts_implementation("eager")
    return model


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits


TOKENS = torch.tensor([[1, 2, 3, 10, 3, 2, 1, 11], [4, 4, 4, 4, 9, 0, 7, 2]])


@pytest.mark.parametrize(
    ("kind", "loss", "aggregation"),
    [
        ("gpt2_tied_lora", "gspo", "sample_mean"),
        ("qwen2_checkpointed_lora", "grpo", "token_mean"),
        ("mixture_checkpointed_experts_lora", "grpo", "sample_mean"),
    ],
)
def test_the_gradient_is_that_of_the_plain_formulation(kind, loss, aggregation):
    """By the chain rule from the gradient of W + alpha / rank B A in the place of each W, in
    float64; of experts in transformers' loop over them."""
    transposed = "gpt2" in kind
    policy = models.small_policy(kind)
    objective = {"loss": loss, "aggregation": aggregation}
    step = spread.step(policy, ONE_PROCESS, **objective)
    plain = models.small_policy(kind.partition("_")[0] + "_tied" * ("_tied" in kind))
    scale = 4.0 / 3
    adapted = dict(policy.model.named_parameters())
    frozen = {
        name.replace(".base_layer", ""): weight.detach().clone()
        for name, weight in adapted.items()
        if "lora_" not in name
    }
    with_adapter = adapted_weights(policy.model).keys()
    pairs = {}
    for name, weight in plain.model.named_parameters():
        weight.data = frozen[name]
        if name in with_adapter:
            pairs[name] = names_of_adapter(name)
            a, b = (adapted[adapter] for adapter in pairs[name])
            for place, own_a, own_b in own_matrices(weight, a, b):
                change = scale * own_b @ own_a
                weight.data[place] += change.T if transposed else change
    assert len(pairs) == len(with_adapter) == (6 if "mixture" in kind else 8 if transposed else 14)
    plain_step = spread.step(plain, ONE_PROCESS, **objective)
    expected = {}
    for name, (name_a, name_b) in pairs.items():
        gradient = plain_step[name] / clip_factor(plain_step["norm"])
        gradient = gradient.T if transposed else gradient
        a, b = adapted[name_a].detach(), adapted[name_b].detach()
        expected[name_a] = torch.empty_like(a)
        expected[name_b] = torch.empty_like(b)
        of_matrices = own_matrices(gradient, expected[name_a], expected[name_b])
        for (place, own_a, own_b), (_, to_a, to_b) in zip(
            own_matrices(gradient, a, b), of_matrices, strict=True
        ):
            to_a.copy_(scale * own_b.T @ gradient[place])
            to_b.copy_(scale * gradient[place] @ own_a.T)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    torch.testing.assert_close(step["loss"], plain_step["loss"], rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(step["norm"], norm, rtol=1e-9, atol=1e-12)
    for name, gradient in expected.items():
        clipped = clip_factor(norm) * gradient
        torch.testing.assert_close(step[name], clipped, rtol=1e-9, atol=1e-12)
        assert gradient.abs().max() > 1e-5


def names_of_adapter(weight: str) -> tuple[str, str]:
    """Return the names of A and B. peft's layer of an experts' matrix is around that of another."""
    owner, _, part = weight.rpartition(".")
    owner += ".base_layer" if part == "gate_up_proj" else ""
    return f"{owner}.lora_A.default.weight", f"{owner}.lora_B.default.weight"


def own_matrices(weight: Tensor, a: Tensor, b: Tensor) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Yield the place of each matrix in a weight, with its own part of A and B: of experts the next
    rows of A, and the columns of B that are as far apart as there are experts."""
    if weight.ndim == 2:
        yield ..., a, b
        return
    for expert in range(len(weight)):
        yield expert, a[3 * expert : 3 * expert + 3], b[:, expert :: len(weight)]


def clip_factor(norm: Tensor) -> float:
    """Return the factor by which a gradient of this norm is clipped."""
    return min(1.0, 0.5 / (norm.item() + 1e-6))


@torch.no_grad()
def test_the_merged_weights_are_the_policy(folder):
    policy = adapted_policy(folder)
    plain = plain_model(folder)
    base_logits = logits(plain, TOKENS)
    policy_logits = logits(policy.model, TOKENS)
    weights = policy.weights()
    saved = dict(plain.named_parameters())
    assert weights.keys() == saved.keys()
    changed = {name for name, weight in weights.items() if not torch.equal(weight, saved[name])}
    assert changed == adapted_weights(policy.model).keys()
    assert len(changed) == (6 if "mixture" in folder.name else 14 if "llama" in folder.name else 8)
    assert not any(weight.requires_grad for weight in weights.values())
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(logits(plain, TOKENS), policy_logits, rtol=1e-5, atol=1e-5)
    assert (policy_logits - base_logits).abs().max() > 0.01
    with without_adapters(policy.model):
        torch.testing.assert_close(logits(policy.model, TOKENS), base_logits, rtol=1e-5, atol=1e-5)
    merge(policy.model)
    if "mixture" in folder.name:
        plain.set_experts_implementation(mixture.NAME)  # as in the other model
    assert policy.model.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(logits(policy.model, TOKENS), logits(plain, TOKENS))


@torch.no_grad()
def test_in_bfloat16_the_merged_weights_are_rounded_once(folder):
    wide = adapted_policy(folder)
    half = adapted_policy(folder, dtype=NumberType.bfloat16)
    for name, weight in adapter_weights(half.model).items():
        weight.copy_(adapter_weights(wide.model)[name])
    rounded = {name: weight.bfloat16().float() for name, weight in wide.weights().items()}
    for name, weight in half.weights().items():
        assert weight.dtype == torch.bfloat16
        if name not in adapted_weights(half.model):
            assert torch.equal(weight.float(), rounded[name])
        torch.testing.assert_close(weight.float(), rounded[name], rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("static_cache", [True, None])
@torch.no_grad()
def test_completions_have_the_log_probs_of_the_merged_model(folder, static_cache):
    """The sampler computes with the adapters beside the weights, and keeps the log-probs."""
    module = short_module(policy=new_policy(folder, RANK, lora_alpha=ALPHA))
    loader = short_loader(module, SAMPLING, static_cache=static_cache)
    draw_adapters(module.model, std=0.3)
    documents = next(iter(loader)).documents
    plain = plain_model(folder).double()
    base = [log_probs_of(plain, document) for document in documents]
    plain.load_state_dict(module.policy.weights(), strict=False)
    merged = [log_probs_of(plain, document) for document in documents]
    for document, expected in zip(documents, merged, strict=True):
        torch.testing.assert_close(document.old_log_probs.double(), expected, rtol=0, atol=1e-5)
    assert max((a - b).abs().max() for a, b in zip(base, merged, strict=True)) > 0.02
    assert sampler_of(loader)._policy is module.policy


def test_in_bfloat16_completions_are_sampled_from_a_merged_copy(folder):
    """The copy has no adapters. Its log-probs differ from those of training by rounding."""
    policy = new_policy(folder, 2, dtype=NumberType.bfloat16)
    module = short_module(policy=policy, dtype=None)
    loader = short_loader(module, SAMPLING)
    draw_adapters(module.model, std=0.05)
    step = next(iter(loader))
    copy = sampler_of(loader)._policy
    weights = module.policy.weights()
    assert adapted_layers(copy.model) == {}
    copy.load(weights)  # the sampler does so for every batch, and frees the weights after it
    assert all(
        torch.equal(weight, weights[name].to(weight.dtype))
        for name, weight in copy.model.named_parameters()
    )
    metrics = module.training_step(step, 0)["metrics"]
    assert metrics["ratio_new_old"] == pytest.approx(1, abs=0.02)


def log_probs_of(model: nn.Module, document: Document) -> Tensor:
    """Return the log-probs of the document's trained tokens."""
    rows = model(input_ids=document.tokens[None]).logits[0].log_softmax(-1)
    return rows[:-1].gather(-1, document.tokens[1:, None])[document.loss_mask[1:], 0]


def test_frozen_weights_are_in_the_compute_type_and_adapters_in_float32_with_moments(folder):
    """Seen in the bytes of weights, gradients and moments. Steps change the adapters alone."""
    policy = new_policy(folder, 2, dtype=NumberType.bfloat16)
    optimizer = OptimizerSettings(learning_rate=0.01)
    module = short_module(policy=policy, optimizer=optimizer, dtype=None)
    loader = short_loader(module)
    saved = load_file(folder / "model.safetensors")
    before = {name: weight.clone() for name, weight in module.model.named_parameters()}
    steps = iter(loader)
    for _ in range(2):
        module.training_step(next(steps), 0)
    trained = adapter_weights(module.model).values()
    base = [weight for weight in module.model.parameters() if not weight.requires_grad]
    shapes = [weight.shape for weight in adapted_weights(module.model).values()]
    count = sum(2 * math.prod(shape[:-2]) * sum(shape[-2:]) for shape in shapes)
    assert bytes_by_type(base) == {
        torch.bfloat16: 2 * sum(weight.numel() for weight in saved.values())
    }
    assert bytes_by_type(trained) == {torch.float32: 4 * count}
    assert bytes_by_type([weight.grad for weight in trained]) == {torch.float32: 4 * count}
    assert all(weight.grad is None for weight in base)
    moments = [x for state in module.optimizer.state.values() for x in state.values() if x.ndim > 0]
    assert bytes_by_type(moments) == {torch.float32: 8 * count}
    changed = {
        name
        for name, weight in module.model.named_parameters()
        if not torch.equal(weight, before[name])
    }
    assert changed == {name for name in before if "lora_" in name}


def bytes_by_type(tensors: Iterable[Tensor]) -> dict[torch.dtype, int]:
    num_bytes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        num_bytes[tensor.dtype] += tensor.nbytes
    return dict(num_bytes)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ["q_proj", "query"],
            (
                r"lora_targets=\[q_proj,query\] needs names of .*\(got query\)\. It has down_proj, "
                r"gate_proj"
            ),
        ),
        (
            ["lm_head"],
            (
                r"\(got lm_head\)\. .*; its head is not adapted\. Use "
                r"model.lora_targets=\[all-linear\]"
            ),
        ),
        (["proj"], r"\(got proj\)"),
    ],
    ids=["misspelt", "the head", "a part of a name"],
)
def test_targets_that_are_no_linear_layer_of_the_body_are_refused(tmp_path, targets, message):
    save_with_tokenizer(small_llama(), tmp_path)
    with pytest.raises(ConfigError, match=message):
        build_policy(model_config(tmp_path, lora_rank=2, lora_targets=targets), None, False)


@pytest.mark.parametrize(
    "targets", [["all-linear"], ["q_proj", "v_proj", "mlp.up_proj", "1.self_attn.o_proj"]]
)
def test_the_layers_that_are_named_get_adapters(tmp_path, targets):
    """transformers finds them by the stored settings, though peft shortens a list of more than
    twenty names."""
    save_with_tokenizer(small_llama(num_hidden_layers=8), tmp_path / "base")
    policy = build_policy(
        model_config(tmp_path / "base", lora_rank=2, lora_targets=targets), None, False
    )
    names = [
        name
        for name, module in small_llama(num_hidden_layers=8).named_modules()
        if isinstance(module, nn.Linear)
    ]
    ends = ("proj",) if targets == ["all-linear"] else tuple(f".{target}" for target in targets)
    expected = {name for name in names if name.endswith(ends)}
    assert len(expected) == (56 if targets == ["all-linear"] else 25)
    assert adapted_layers(policy.model).keys() == expected
    draw_adapters(policy.model, std=0.1)
    settings(policy.model, str(tmp_path / "base")).save_pretrained(tmp_path / "adapters")
    weights = {name: weight.detach() for name, weight in adapter_weights(policy.model).items()}
    save_file(weights, tmp_path / "adapters" / "adapter_model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapters")
    torch.testing.assert_close(
        logits(loaded, TOKENS), logits(policy.model, TOKENS), rtol=1e-6, atol=1e-6
    )
