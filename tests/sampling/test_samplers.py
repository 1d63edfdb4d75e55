"""Sampling by transformers: log-probs against a distribution in plain loops, whatever the model's
folder suggests, with either cache, and from copies of the weights."""

import gc
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import transformers
from builders.models import save_with_tokenizer, small_llama
from builders.parts import ROLLOUT
from builders.runs import config_of, metrics_of, with_model
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaForCausalLM

from pgtoolkit.assembly.train import train
from pgtoolkit.completion import Request
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, NumericalError
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.settings import HuggingFaceModelSettings, NumberType
from pgtoolkit.model.setup import build_policy
from pgtoolkit.sampling.samplers import TransformersSampler, check_sampled
from pgtoolkit.sampling.settings import SamplingSettings, TransformersSamplerSettings

PROMPT = [4, 8, 2, 10]
OTHER = [9, 10]
END = 11

SUGGESTED = {
    "repetition_penalty": 1.5,
    "min_p": 0.3,
    "top_k": 2,
    "top_p": 0.5,
    "temperature": 0.2,
    "typical_p": 0.3,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.2,
    "suppress_tokens": [0, 1, 2, 3, 4],
    "begin_suppress_tokens": [0, 1, 2, 3, 4],
    "min_new_tokens": 4,
    "min_length": 8,
    "num_beams": 3,
    "num_return_sequences": 2,
    "stop_strings": ["1", "2", "3"],
    "forced_eos_token_id": 6,
    "no_repeat_ngram_size": 1,
    "bad_words_ids": [[1], [2], [3]],
    "sequence_bias": [[[7], 5.0]],
    "exponential_decay_length_penalty": [1, 3.0],
    "guidance_scale": 2.0,
    "max_time": 0.0001,
    "prompt_lookup_num_tokens": 2,
}
"""Settings of a generation_config.json, each with a value that acts on this model in
transformers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def save_llama(path: Path) -> Path:
    """Save a small Llama that gives some tokens a high probability; return its folder."""
    model = small_llama(num_hidden_layers=2, max_position_embeddings=128)
    with torch.no_grad():
        model.lm_head.weight *= 15
    return save_with_tokenizer(model, path)


def with_generation_config(folder: Path, **settings: object) -> Path:
    """Write a generation_config.json into the folder, and return the folder."""
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def config_with(folder: Path, *overrides: str) -> Config:
    return config_of(*with_model(folder, *overrides))


def policy_of(folder: Path, **settings: object) -> Policy:
    return build_policy(HuggingFaceModelSettings(path=str(folder), **settings), None, on_gpu=False)


def sampler_of(
    policy: Policy,
    is_async: bool = False,
    rollout: Mapping[str, object] = MappingProxyType({}),
    **settings: object,
) -> TransformersSampler:
    """Return a sampler. rollout: changes of ROLLOUT. settings: of the sampler."""
    sampling = replace(ROLLOUT, **rollout).sampling
    chosen = TransformersSamplerSettings(**settings)
    check_sampled(policy, chosen)
    return TransformersSampler(policy, sampling, chosen, is_async)


def model_and_sampler(
    folder: Path, **settings: object
) -> tuple[transformers.PreTrainedModel, TransformersSampler]:
    """Return the model of a folder and a sampler. settings: see `sampler_of`."""
    policy = policy_of(folder)
    return policy.model, sampler_of(policy, **settings)


def single_requests(prompts: list[list[int]]) -> list[Request]:
    """Return requests for one completion of each prompt."""
    return [Request(prompt, 1, number) for number, prompt in enumerate(prompts)]


def complete_each(
    sampler: TransformersSampler, prompts: list[list[int]]
) -> list[tuple[list[int], list[float], str]]:
    """Return a completion of each prompt: its tokens, their log-probs, and why it ends."""
    return [
        (completion.tokens.tolist(), completion.log_probs.tolist(), completion.finish_reason)
        for completion in sampler.complete(single_requests(prompts))
    ]


def are_equal(
    actual: list[tuple[list[int], list[float], str]],
    expected: list[tuple[list[int], list[float], str]],
) -> bool:
    """Return whether the tokens are the same; log-probs may differ in the last digit."""
    for completion, other in zip(actual, expected, strict=True):
        tokens, log_probs, reason = completion
        other_tokens, other_log_probs, other_reason = other
        if (tokens, reason) != (other_tokens, other_reason):
            return False
        if log_probs != pytest.approx(other_log_probs, abs=1e-6):
            return False
    return True


def test_settings_that_the_folder_suggests_do_not_act(folder):
    """Each of them would act by itself, so that all of them are ignored."""
    prompts = [PROMPT, OTHER] * 8
    _, sampler = model_and_sampler(with_generation_config(folder, eos_token_id=END))
    expected = complete_each(sampler, prompts)
    model, sampler = model_and_sampler(
        with_generation_config(folder, eos_token_id=END, do_sample=True, **SUGGESTED)
    )
    for name in SUGGESTED:  # transformers has read it
        assert getattr(model.generation_config, name) is not None
    assert complete_each(sampler, prompts) == expected


def test_a_note_names_the_ignored_settings_of_the_folder_once(folder, tmp_path, capsys):
    folder = with_generation_config(
        folder, repetition_penalty=1.1, temperature=0.6, top_k=20, top_p=1.0, min_p=0.0, num_beams=1
    )
    train(config_with(folder, "rollout.temperature=0.6", "trainer.max_steps=3"), tmp_path / "run")
    output = capsys.readouterr().out
    notes = [line for line in output.splitlines() if "generation_config" in line]
    assert notes == [
        f"note: {folder}/generation_config.json suggests top_k=20, repetition_penalty=1.1, which "
        "is ignored: only rollout.temperature, rollout.top_p and rollout.top_k decide how "
        "completions are sampled."
    ]


def test_an_end_that_is_not_a_token_number_is_refused(folder):
    with pytest.raises(
        ConfigError, match=r"eos_token_id of the model needs the numbers of tokens \(got <end>\)"
    ):
        model_and_sampler(with_generation_config(folder, eos_token_id=[3, "<end>"]))


def test_each_end_of_the_folder_and_of_the_tokenizer_ends_a_completion(folder):
    _, sampler = model_and_sampler(
        with_generation_config(folder, eos_token_id=[3, 7]), rollout={"max_completion_length": 12}
    )
    completions = sampler.complete(single_requests([PROMPT] * 64))
    ends = {3, 7, END}
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    assert {completion.tokens[-1].item() for completion in stopped} == ends
    for completion in completions:
        is_stopped = completion.finish_reason == "stop"
        inner = completion.tokens[:-1] if is_stopped else completion.tokens
        assert not ends & set(inner.tolist())
        assert is_stopped or (len(inner) == 12 and completion.finish_reason == "length")
        assert len(completion.log_probs) == len(completion.tokens)


@torch.no_grad()
def distributions(
    model: transformers.PreTrainedModel,
    prompt: list[int],
    tokens: list[int],
    temperature: float,
    top_p: float,
) -> list[list[float]]:
    """Return the probabilities of all tokens at the place of each of a completion's."""
    document = torch.tensor([prompt + tokens])
    logits = model(input_ids=document).logits[0, len(prompt) - 1 : -1].double().tolist()
    return [distribution(at_place, temperature, top_p) for at_place in logits]


def distribution(logits: list[float], temperature: float, top_p: float) -> list[float]:
    """Return the probabilities of the next token, in plain loops: tempered, cut to the likeliest,
    renormalised."""
    largest = max(logits)
    weights = [math.exp((logit - largest) / temperature) for logit in logits]
    probabilities = [weight / sum(weights) for weight in weights]
    kept = [0.0] * len(logits)
    mass = 0.0
    for token in sorted(range(len(logits)), key=lambda token: -probabilities[token]):
        if mass >= top_p:
            break
        kept[token] = probabilities[token]
        mass += probabilities[token]
    return [probability / sum(kept) for probability in kept]


CUTS = [(1.0, None), (0.5, None), (1.0, 0.7), (0.6, 0.8)]
"""Temperatures, each with a value of top_p."""


@pytest.mark.parametrize(("temperature", "top_p"), CUTS)
def test_log_probs_are_those_of_the_distribution_sampled_from(folder, temperature, top_p):
    rollout = {"temperature": temperature, "top_p": top_p}
    model, sampler = model_and_sampler(with_generation_config(folder), rollout=rollout)
    model.eval()
    for prompt in (PROMPT, OTHER):
        for completion in sampler.complete(single_requests([PROMPT, prompt] * 4))[1::2]:
            tokens = completion.tokens.tolist()
            expected = distributions(model, prompt, tokens, temperature, top_p or 1.0)
            for place, token in enumerate(tokens):
                assert completion.log_probs[place].item() == pytest.approx(
                    math.log(expected[place][token]), abs=1e-5
                )


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("temperature", "top_p"), CUTS)
def test_a_static_cache_gives_the_same_distribution(folder, device, temperature, top_p):
    """Also for tokens after the end of other rows, which are dropped."""
    rollout = {"temperature": temperature, "top_p": top_p, "max_completion_length": 100}
    model, sampler = model_and_sampler(
        with_generation_config(folder), rollout=rollout, static_cache=True
    )
    model.to(device)
    completions = sampler.complete(single_requests([PROMPT, OTHER] * 8))
    model.to("cpu").eval()
    assert len({len(completion.tokens) for completion in completions}) > 5
    for i, completion in enumerate(completions):
        prompt = (PROMPT, OTHER)[i % 2]
        tokens = completion.tokens.tolist()
        assert (tokens[-1] == END) == (completion.finish_reason == "stop")
        assert END not in tokens[:-1]
        expected = distributions(model, prompt, tokens, temperature, top_p or 1.0)
        for place, token in enumerate(tokens):
            assert completion.log_probs[place].item() == pytest.approx(
                math.log(expected[place][token]), abs=2e-5
            )


@pytest.mark.slow
def test_tensors_as_wide_as_the_vocabulary_exist_for_a_few_tokens_at_a_time(folder):
    model, sampler = model_and_sampler(
        with_generation_config(folder), rollout={"max_completion_length": 20, "top_p": 0.9}
    )
    model.generation_config.eos_token_id = None
    sampler.settings.eos_token_id = None
    counts = []

    def count(*_: object) -> None:
        tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
        counts.append(len([x for x in tensors if x.shape[-1:] == (12,) and len(x) == 5]))

    model.lm_head.register_forward_hook(count)
    completions = sampler.complete(single_requests([PROMPT] * 5))
    assert [len(completion.log_probs) for completion in completions] == [20] * 5
    assert len(counts) == 20
    assert max(counts) <= 8


@pytest.mark.parametrize("static", [False, True])
def test_a_copy_samples_as_the_policy_did_when_it_was_published(folder, static):
    """In float32, token by token. The policy's updates act once they are published.

    Log-probs are compared with a tolerance, since the last digit of a product on a CPU depends on
    the addresses of its operands.
    """
    policy = policy_of(with_generation_config(folder))
    live = sampler_of(policy, static_cache=static)
    copy = sampler_of(policy, is_async=True, static_cache=static)
    copy.publish(policy.weights, 0)
    before = complete_each(live, [PROMPT, OTHER] * 8)
    assert are_equal(complete_each(copy, [PROMPT, OTHER] * 8), before)
    with torch.no_grad():
        policy.head.weight.neg_()
    live.publish(policy.weights, 7)
    after = complete_each(live, [PROMPT, OTHER] * 8)
    assert not are_equal(after, before)
    assert {
        completion.model_version for completion in live.complete(single_requests([PROMPT]))
    } == {7}
    assert are_equal(complete_each(copy, [PROMPT, OTHER] * 8), before)
    copy.publish(policy.weights, 1)
    assert are_equal(complete_each(copy, [PROMPT, OTHER] * 8), after)
    assert {
        completion.model_version for completion in copy.complete(single_requests([PROMPT]))
    } == {1}


@pytest.mark.parametrize("static", [False, True])
def test_in_bfloat16_a_rounded_copy_of_the_current_weights_samples(folder, static):
    """The copy gives its memory back afterwards."""
    policy = policy_of(with_generation_config(folder), dtype=NumberType.bfloat16)
    sampler = sampler_of(policy, static_cache=static)
    head_calls = []
    policy.head.register_forward_hook(lambda *_: head_calls.append("a call"))
    before = complete_each(sampler, [PROMPT] * 8)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.copy_(weight.bfloat16())
    assert complete_each(sampler, [PROMPT] * 8) == before
    with torch.no_grad():
        policy.head.weight.neg_()
    assert complete_each(sampler, [PROMPT] * 8) != before
    assert head_calls == []
    assert sum(weight.numel() for weight in sampler._policy.weights().values()) == 0
    assert all(weight.dtype == torch.float32 for weight in policy.model.parameters())


@pytest.mark.parametrize("static", [False, True])
def test_probabilities_that_are_not_finite_are_refused(folder, static):
    model, sampler = model_and_sampler(with_generation_config(folder), static_cache=static)
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    with pytest.raises(NumericalError, match="probabilities are not finite"):
        sampler.complete(single_requests([PROMPT]))


def test_a_static_cache_is_refused_for_models_with_which_it_was_not_tested(folder, tmp_path):
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    other = GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=12, max_position_embeddings=128, eos_token_id=END, **sizes)
    )
    save_with_tokenizer(other, tmp_path)
    with pytest.raises(
        ConfigError, match=r"sampler.static_cache=true needs a model of type .* \(got gpt_neox\)"
    ):
        model_and_sampler(tmp_path, static_cache=True)
    assert len(model_and_sampler(tmp_path)[1].complete(single_requests([PROMPT] * 3))) == 3


@pytest.mark.parametrize("top_p", [None, 0.8])
def test_a_completion_is_drawn_by_its_request_alone(folder, top_p):
    """Its tokens are the same alone or with others, in any order, in batches of any size, and with
    either cache."""
    policy = policy_of(with_generation_config(folder))
    rollout = {"max_completion_length": 20, "top_p": top_p}
    sampler = sampler_of(policy, rollout=rollout)
    requests = [Request(PROMPT, 3, 8), Request(OTHER, 2, 9), Request(PROMPT, 2, 2**32 - 1)]
    expected = [completion.tokens.tolist() for completion in sampler.complete(requests)]
    # All seven differ.
    assert len({str(tokens) for tokens in expected}) == 7
    alone = [sampler.complete([request]) for request in reversed(requests)]
    assert [
        completion.tokens.tolist() for group in reversed(alone) for completion in group
    ] == expected
    first = sampler.complete([replace(request, completions=1) for request in requests])
    assert [completion.tokens.tolist() for completion in first] == [expected[i] for i in (0, 3, 5)]
    for other in ({"max_sequences": 3}, {"static_cache": True}):
        torch.rand(3)
        completions = sampler_of(policy, rollout=rollout, **other).complete(requests)
        assert [completion.tokens.tolist() for completion in completions] == expected


@pytest.mark.gpu
@pytest.mark.parametrize(("top_p", "static"), [(None, True), (0.8, True), (None, False)])
def test_a_gpu_draws_the_same_tokens_as_a_cpu(folder, top_p, static):
    """In float32. A GPU draws by a kernel unless there is top_p, in a CUDA graph or in
    `generate`."""
    rollout = {"max_completion_length": 60, "top_p": top_p}
    model, sampler = model_and_sampler(
        with_generation_config(folder), rollout=rollout, static_cache=static
    )
    requests = [Request(PROMPT, 20, 8), Request(OTHER, 20, 9)]
    expected = sampler.complete(requests)
    model.to("cuda")
    for on_gpu, on_cpu in zip(sampler.complete(requests), expected, strict=True):
        assert on_gpu.tokens.tolist() == on_cpu.tokens.tolist()
        torch.testing.assert_close(on_gpu.log_probs, on_cpu.log_probs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("fp32_lm_head", [True, False])
def test_sampling_computes_the_head_in_the_number_type_of_training(folder, tmp_path, fp32_lm_head):
    """In bfloat16 with old_log_probs=sampling. The layers add nothing here, so that the head alone
    rounds."""
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = model.get_input_embeddings().weight
        embedding.copy_(embedding.bfloat16())  # the copy that is sampled from holds bfloat16
    save_with_tokenizer(model, tmp_path / "model")
    overrides = [
        "model.dtype=bfloat16",
        f"model.fp32_lm_head={str(fp32_lm_head).lower()}",
        "trainer.max_steps=1",
        "rollout.old_log_probs=sampling",
    ]
    train(config_with(tmp_path / "model", *overrides), tmp_path / "run")
    (row,) = metrics_of(tmp_path / "run")
    assert row["clipped_ratio_fraction"] == 0
    assert (row["min_ratio_new_old"], row["max_ratio_new_old"]) == pytest.approx((1, 1), abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 0),
        ({"top_p": 1.0}, 0),
        ({"top_p": 0.9}, 32),
        ({"top_k": 3}, 32),
        ({"top_k": 50}, 50),
        ({"top_p": 0.9, "keep_top": 0}, 0),
        ({"top_p": 0.9, "keep_top": 64}, 64),
    ],
)
def test_truncated_sampling_keeps_the_likeliest_tokens_as_in_a_configuration(changes, kept):
    sampling = SamplingSettings(4, **changes)
    assert sampling.kept == kept
    truncated = {*changes} & {"top_p", "top_k"} and changes.get("top_p") != 1
    assert sampling.likeliest == (kept + 1 if truncated and kept else kept)
