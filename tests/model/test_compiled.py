"""The compiled body computes what transformers computes, is compiled once for all lengths, and is
used by the runs that gain by it."""

import copy
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from builders.documents import document_of
from builders.models import HAS_COMPILER, VOCABULARY, save_with_tokenizer, small_llama, small_policy
from builders.runs import assert_equal, checkpoint_of, config_of, copy_as_of, metrics_of, with_model
from builders.uncompiled import forget_code, uncompiled_functions
from model.test_decoding import DEVICES, PROMPTS, decoded, expected
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PhiConfig, PhiForCausalLM
from transformers.models.llama import modeling_llama

from pgtoolkit.assembly.build import policy_of, reference_of
from pgtoolkit.assembly.train import train
from pgtoolkit.batch import MicroBatch, pack
from pgtoolkit.config.compose import compose
from pgtoolkit.config.models import compilation
from pgtoolkit.errors import ConfigError
from pgtoolkit.model import compiled, decoding, rowwise
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.setup import build_policy
from pgtoolkit.ranks.layout import ONE_PROCESS

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
LENGTHS = [(5, 7, 3), (1,), (2,), (9, 9), (14, 3, 4, 1), (1, 1)]


def packed(lengths: Sequence[int]) -> MicroBatch:
    """Return a row of documents of these lengths, without trained tokens."""
    generator = torch.Generator().manual_seed(1)
    documents = []
    for length in lengths:
        tokens = torch.randint(VOCABULARY, (length,), generator=generator)
        documents.append(document_of(tokens, torch.zeros(length, dtype=torch.bool)))
    return pack(documents)


def states_and_gradient(policy: Policy, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the hidden states, in float32, and all gradients as a vector.

    Asserts that the states are the same without a gradient.
    """
    policy.model.zero_grad()
    micro_batch = packed(lengths).to(policy.model.device)
    hidden = policy.hidden_states(micro_batch)
    with torch.no_grad():
        assert torch.equal(policy.hidden_states(micro_batch), hidden)
    weights = torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view(hidden.shape).sin()
    (hidden.float() * weights).sum().backward()
    gradients = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    return hidden.detach().float(), torch.cat(gradients)


def distances(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return the relative distance of each tensor from the expected one."""
    return [float((x - y).norm() / y.norm()) for x, y in zip(tensors, expected, strict=True)]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind",
    [
        "gpt2",
        "qwen3_checkpointed_lora_by_document",
        "gemma3_checkpointed_by_document",
        "mixture_experts_checkpointed_by_document",
    ],
)
def test_hidden_states_and_gradients_are_those_of_transformers(kind, device):
    """They differ by rounding in float32, and are in bfloat16 as near to float32 as transformers'.
    Other lengths compile nothing new. On a CPU, where compiling takes longest, only the kind with
    the fewest functions is compiled for bfloat16. A mixture is not: where two experts are nearly
    as likely, rounding may choose the other one."""
    forget_code()
    before = counters["stats"]["unique_graphs"]
    counts = []

    def count() -> None:
        counts.append(counters["stats"]["unique_graphs"] - before)

    in_bfloat16 = kind == "gpt2" or (device == "cuda" and not kind.startswith("mixture"))
    assert_states_are_those_of_transformers(kind, device, in_bfloat16, count)
    assert counts[0] > 0
    assert set(counts) == {counts[0]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen3_checkpointed_lora_by_document", "gemma3_checkpointed_by_document"]
)
def test_functions_round_where_transformers_does_before_they_are_compiled(kind):
    with uncompiled_functions():
        assert_states_are_those_of_transformers(kind, "cpu", True, lambda: None)


def assert_states_are_those_of_transformers(
    kind: str, device: str, in_bfloat16: bool, after_each: Callable[[], None]
) -> None:
    exact = replace(small_policy(kind), model=small_policy(kind).model.float().to(device))
    plain = replace(exact, compute_dtype=torch.bfloat16)
    model = copy.deepcopy(exact.model)
    compiled.switch_on(model)
    model = copy.deepcopy(model)  # a reference is such a copy, and a rank's part of the model
    for lengths in LENGTHS:
        expected_tensors = states_and_gradient(exact, lengths)
        tensors = states_and_gradient(replace(exact, model=model), lengths)
        assert max(distances(tensors, expected_tensors)) < 2e-6, lengths
        if in_bfloat16:
            rounded = states_and_gradient(plain, lengths)
            compiled_rounded = states_and_gradient(replace(plain, model=model), lengths)
            errors = distances(compiled_rounded, expected_tensors)
            errors_of_transformers = distances(rounded, expected_tensors)
            for error, error_of_transformers in zip(errors, errors_of_transformers, strict=True):
                assert 0 < error < 1.5 * error_of_transformers, lengths
        after_each()


@pytest.mark.slow
@needs_compiler
def test_each_function_of_recomputed_layers_is_compiled_once_with_its_derivative():
    """States and gradients are those of transformers. The backward pass runs in a thread of its
    own, as on a GPU, where it does not see the forward pass's autocast."""
    forget_code()
    policy = small_policy("qwen2_checkpointed_by_document")
    plain = replace(policy, model=copy.deepcopy(policy.model.float()))
    compiled.switch_on(policy.model)
    counts = []
    for lengths in ((5, 7, 3), (2, 9)):
        counts.append(counters["stats"]["unique_graphs"])
        hidden = policy.hidden_states(packed(lengths))
        loss = hidden.square().sum()
        counts.append(counters["stats"]["unique_graphs"])
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        expected_hidden = plain.hidden_states(packed(lengths))
        expected_hidden.square().sum().backward()
        assert distances([hidden.detach()], [expected_hidden.detach()])[0] < 2e-6
    counts.append(counters["stats"]["unique_graphs"])
    vectors = [
        torch.cat([p.grad.flatten() for p in each.model.parameters() if p.grad is not None])
        for each in (policy, plain)
    ]
    assert distances(vectors[:1], vectors[1:])[0] < 2e-6
    # A norm, a norm of a sum, the heads and the gate. The derivatives of the heads, the gate, the
    # last norm, and a norm that also returns its input.
    assert [count - counts[0] for count in counts] == [0, 4, 8, 8, 8]
    dtype = torch.float32
    epsilon = policy.model.base_model.norm.variance_epsilon
    functions = [rowwise.rms_norm(epsilon, dtype, both, False) for both in (False, True)]
    functions += [rowwise.turned_heads(8, 4, None, dtype), rowwise.gate("silu")]
    codes = [code for function in functions for code in function._compiled.values()]
    assert len(codes) == 8
    assert all(code.direct is not None for code in codes)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_a_cuda_graph_of_decoding_compiles_nothing_new_as_rows_end(monkeypatch, kind):
    """Rows that have ended are dropped, until none is left."""
    monkeypatch.setattr(decoding, "_CHECK_EVERY", 1)
    policy = small_policy(kind)
    compiled.switch_on(policy.model.cuda())
    graphs = []
    for ends in ((), (4, 17)):
        tokens, log_probs = decoded(policy, 15, ends)
        for prompt, row, row_log_probs in zip(PROMPTS, tokens.tolist(), log_probs, strict=True):
            length = next((place + 1 for place, token in enumerate(row) if token in ends), 15)
            torch.testing.assert_close(
                row_log_probs[:length], expected(policy, prompt, row[:length]), rtol=0, atol=2e-6
            )
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]


@pytest.mark.gpu
def test_more_than_two_to_the_31_numbers_are_computed_right_and_compiled_once():
    gate = rowwise.activation("silu")
    graphs = []
    for rows in (4096, 600_000, 700_000):
        x = torch.ones(rows, 4096, device="cuda", dtype=torch.bfloat16)
        x[-1] = 2
        (products,) = gate(x, x)
        assert products[[0, -1], -1].tolist() == pytest.approx([0.7311, 3.5232], rel=4e-3)
        graphs.append(counters["stats"]["unique_graphs"])
        del x, products
    assert graphs[1] == graphs[2]


PROGRAM = """
import torch
from builders.models import small_policy
from model.test_compiled import compiled, states_and_gradient
policy = small_policy("qwen3_by_document")
compiled.switch_on(policy.model.float().cuda())
import dataclasses, hashlib, sys
policy = dataclasses.replace(policy, compute_dtype=torch.bfloat16)
for lengths in eval(sys.argv[1]):
    numbers = torch.cat([x.flatten() for x in states_and_gradient(policy, lengths)])
print(hashlib.sha256(numbers.cpu().numpy().tobytes()).hexdigest())
"""


@pytest.mark.gpu
def test_another_process_that_compiles_anew_computes_the_same_bits(tmp_path):
    """So it does in a run that is resumed, whatever lengths come first."""
    digests = []
    for number, lengths in enumerate(("[(14, 3, 4)]", "[(2, 2), (14, 3, 4)]")):
        more = {
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / str(number)),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-c", PROGRAM, lengths]
        digests.append(
            subprocess.run(
                command, env=os.environ | more, capture_output=True, text=True, check=True
            ).stdout
        )
    assert digests[0] == digests[1] != ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = small_llama(num_hidden_layers=2, tie_word_embeddings=True)
    return save_with_tokenizer(model, tmp_path_factory.mktemp("llama"))


def config(folder, *overrides):
    return config_of(*with_model(folder, "trainer.max_steps=4", *overrides))


@pytest.mark.slow
@needs_compiler
def test_a_run_resumes_bit_equal_and_does_not_depend_on_its_cuts(folder, tmp_path):
    settings = (
        "model.compile=true",
        "kl=k3",
        "kl.coefficient=0.1",
        "kl.reference=initial",
        "sampler.static_cache=true",
    )
    with uncompiled_functions():
        train(config(folder, *settings), tmp_path / "whole")
        rows = metrics_of(tmp_path / "whole")
        resumed = copy_as_of(tmp_path / "whole", 2, tmp_path / "resumed")
        train(config(folder, *settings), resumed, resume=True)
        assert metrics_of(resumed) == rows
        assert_equal(checkpoint_of(resumed, 4), checkpoint_of(tmp_path / "whole", 4))
        for name, changed in (
            ("cut", ["accumulation.max_tokens=12"]),
            ("plain", ["model.compile=false"]),
        ):
            train(config(folder, *settings, *changed), tmp_path / name)
            for row, changed_row in zip(rows, metrics_of(tmp_path / name), strict=True):
                assert row["loss"] == pytest.approx(changed_row["loss"], rel=1e-4, abs=1e-6), name
                assert row["grad_norm"] == pytest.approx(changed_row["grad_norm"], rel=1e-4), name


def num_replaced(policy: Policy) -> int:
    """Return how many modules have another forward pass than transformers gives them."""
    return sum("forward" in vars(module) for module in policy.model.modules())


def test_the_copies_of_a_policy_compute_as_it_does(folder):
    """model.compile=true replaces nine modules: two layers with two norms, an MLP and an attention
    each, and the last norm."""
    for value, count in (("true", 9), ("false", 0), ("null", 0)):
        path = f"kl.reference={folder}"
        settings = (f"model.compile={value}", "trainer.device=cpu")
        chosen = config(folder, *settings, "kl=k3", "kl.coefficient=0.1", path)
        policy = policy_of(chosen, None, ONE_PROCESS)
        initial = replace(chosen.kl, reference="initial")
        references = [reference_of(replace(chosen, kl=kl), policy) for kl in (chosen.kl, initial)]
        assert [
            num_replaced(copied)
            for copied in (policy, policy.copied(policy.compute_dtype), *references)
        ] == [count] * 4


def test_a_model_of_an_unknown_type_is_refused_or_left_as_it_is(tmp_path):
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    save_with_tokenizer(
        PhiForCausalLM(PhiConfig(vocab_size=12, intermediate_size=32, **sizes)), tmp_path
    )
    chosen = config(tmp_path, "model.compile=true")
    with pytest.raises(
        ConfigError, match=r"model.compile=true needs a model of type gemma3_text, .* \(got phi\)"
    ):
        policy_of(chosen, None, ONE_PROCESS)
    left = config(tmp_path, "model.compile=null")
    assert num_replaced(policy_of(left, None, ONE_PROCESS)) == 0


@pytest.mark.parametrize("part", ["LlamaDecoderLayer", "LlamaAttention"])
def test_a_module_that_transformers_computes_otherwise_is_refused_or_left_as_it_is(
    tmp_path, monkeypatch, caplog, part
):
    def forward(self, hidden_states, **options):
        return hidden_states if part == "LlamaDecoderLayer" else (hidden_states, None)

    save_with_tokenizer(small_llama(), tmp_path)
    monkeypatch.setattr(getattr(modeling_llama, part), "forward", forward)
    needs = (
        r"model.compile=true needs a version of transformers that it knows \(5.17, .* Its "
        rf"{part} computes"
    )
    with pytest.raises(ConfigError, match=needs):
        build_policy(
            config(tmp_path, "model.compile=true").model, None, on_gpu=False, compiles=True
        )
    policy = build_policy(
        config(tmp_path, "model.compile=null").model, None, on_gpu=False, compiles=True
    )
    assert not policy.compiled
    assert num_replaced(policy) == 0
    assert f"Its {part} computes something else" in caplog.text


@pytest.mark.parametrize(
    ("override", "kind", "on_gpu", "expected"),
    [
        ("null", "qwen2", True, "yes, since it makes steps on a GPU faster"),
        ("null", "qwen2", False, "no, since only a GPU gains by it"),
        ("null", "phi", True, "no, since the parts of a model of type phi are not known"),
        (
            "null",
            None,
            True,
            "if the model is of type gemma3_text, gpt2, llama, mistral, qwen2, qwen3, "
            "qwen3_moe, which loading it tells",
        ),
        ("true", "qwen2", False, "yes, as configured"),
        ("false", "qwen2", True, "no, as configured"),
    ],
)
def test_models_of_known_types_are_compiled_on_a_gpu_by_default(
    tmp_path, override, kind, on_gpu, expected
):
    if kind is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert compilation(config(tmp_path, f"model.compile={override}").model, on_gpu) == expected


@pytest.mark.gpu
def test_a_run_on_a_gpu_compiles_by_default_and_the_tiny_model_does_not(folder):
    assert num_replaced(policy_of(config(folder), None, ONE_PROCESS)) == 9
    assert num_replaced(policy_of(config_of(), "0123456789=", ONE_PROCESS)) == 0


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (["model=tiny"], r"needs true or false \(got 'auto'\).* Use model.compile=false\."),
        (
            ["model=huggingface", "model.path=x/y"],
            r"needs true or false or null \(got 'auto'\).* Use model.compile=null\.",
        ),
    ],
)
def test_auto_is_answered_with_the_default(overrides, answer):
    problems = compose([*overrides, "model.compile=auto"]).problems
    assert len(problems) == 1
    assert re.fullmatch(f"model.compile=auto {answer}", problems[0])
    assert compose([*overrides, re.findall(r"Use (\S+)\.$", problems[0])[0]]).problems == []
