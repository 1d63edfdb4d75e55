"""The compiled body: as transformers computes it, whatever is asked for; compiled once for all
lengths; who uses it."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from builders.models import HAS_COMPILER, VOCABULARY, save_with_tokenizer, small_llama, small_policy
from builders.runs import assert_equal, checkpoint_of, config_of, copy_as_of, metrics_of, with_model
from model.test_decoding import DEVICES, PROMPTS, decoded, expected
from torch._dynamo.utils import counters

from pgtoolkit.batch import Document, pack
from pgtoolkit.config.compilation import compilation
from pgtoolkit.errors import ConfigError
from pgtoolkit.model import compiled, decoding, rowwise
from pgtoolkit.model.setup import build_policy
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.training.build import policy_of, reference_of
from pgtoolkit.training.train import train

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
LENGTHS = [(5, 7, 3), (1,), (2,), (9, 9), (14, 3, 4, 1), (1, 1)]


def packed(lengths):
    draw, nothing = torch.Generator().manual_seed(1), torch.zeros(0)
    documents = [
        Document(
            torch.randint(VOCABULARY, (n,), generator=draw),
            torch.zeros(n, dtype=torch.bool),
            nothing,
            nothing,
            0,
            "",
        )
        for n in lengths
    ]
    return pack(documents)


def states_and_gradient(policy, lengths):
    """Hidden states, float32, and all gradients as one vector; without a gradient the states are
    the same."""
    policy.model.zero_grad()
    micro_batch = packed(lengths).to(policy.model.device)
    hidden = policy.hidden_states(micro_batch)
    with torch.no_grad():
        assert torch.equal(policy.hidden_states(micro_batch), hidden)
    weights = torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view(hidden.shape).sin()
    (hidden.float() * weights).sum().backward()
    gradients = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    return hidden.detach().float(), torch.cat(gradients)


def distance(found, expected):
    return [float((x - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gpt2", "qwen2_checkpointed_lora", "qwen3_by_document"])
def test_hidden_states_and_gradients_are_those_of_transformers(kind, device):
    """In float32 but for rounding; in bfloat16 as near to float32 as without. All lengths are
    computed by one code. On a CPU, where compiling takes longest, one kind is bfloat16, too."""
    in_bfloat16 = device == "cuda" or "lora" in kind
    exact = replace(small_policy(kind), model=small_policy(kind).model.float().to(device))
    plain = replace(exact, compute_dtype=torch.bfloat16)
    model = copy.deepcopy(exact.model)
    compiled.switch_on(model)
    model = copy.deepcopy(model)  # as a reference is one, or a rank's part
    graphs = []
    for lengths in LENGTHS:
        aim = states_and_gradient(exact, lengths)
        actual = states_and_gradient(replace(exact, model=model), lengths)
        assert max(distance(actual, aim)) < 2e-6, lengths
        if in_bfloat16:
            rounded = distance(states_and_gradient(plain, lengths), aim)
            compiled_rounded = distance(
                states_and_gradient(replace(plain, model=model), lengths), aim
            )
            for error, usual in zip(compiled_rounded, rounded, strict=True):
                assert 0 < error < 1.5 * usual, lengths
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert set(graphs) == {graphs[0]}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_a_graph_of_a_token_holds_compiled_code(monkeypatch, kind):
    """Which was compiled before; rows that have ended are dropped, down to the last."""
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
def test_more_numbers_than_fit_into_32_bits():
    """2^31 numbers and more; the code for them is compiled once as well, for any number of rows."""
    gate, graphs = rowwise.activation("silu"), []
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
from model.test_compiled import build, compiled, states_and_gradient
policy = build("qwen3_by_document")
compiled.switch_on(policy.model.float().cuda())
import dataclasses, hashlib, sys
policy = dataclasses.replace(policy, compute_dtype=torch.bfloat16)
for lengths in eval(sys.argv[1]):
    found = torch.cat([x.flatten() for x in states_and_gradient(policy, lengths)])
print(hashlib.sha256(found.cpu().numpy().tobytes()).hexdigest())
"""


@pytest.mark.gpu
def test_another_process_that_compiles_anew_computes_the_same_bits(tmp_path):
    """Whatever lengths it saw first: as a run that is resumed."""
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


def replaced(policy):
    """How many modules compute otherwise than transformers has them."""
    return sum("forward" in vars(module) for module in policy.model.modules())


def test_the_copies_of_a_policy_compute_as_it_does(folder):
    """model.compile: two layers, each with two norms, an MLP and an attention; and the last
    norm."""
    for value, count in (("true", 9), ("false", 0), ("auto", 0)):
        path = f"kl.reference={folder}"
        chosen = config(folder, f"model.compile={value}", "kl=k3", "kl.coefficient=0.1", path)
        policy = policy_of(chosen, None, ONE_PROCESS, chosen)
        initial = replace(chosen.kl, reference="initial")
        references = [reference_of(replace(chosen, kl=kl), policy) for kl in (chosen.kl, initial)]
        assert [
            replaced(copied)
            for copied in (policy, policy.copied(policy.compute_dtype), *references)
        ] == [count] * 4


def test_a_model_whose_parts_are_not_known_is_refused_or_left_as_it_is(tmp_path):
    from transformers import PhiConfig, PhiForCausalLM

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
        ConfigError, match=r"model.compile=true needs a model of type gpt2, .* \(got phi\)"
    ):
        policy_of(chosen, None, ONE_PROCESS, chosen)
    left = config(tmp_path, "model.compile=auto")
    assert [replaced(policy_of(left, None, ONE_PROCESS, run)) for run in (left, None)] == [0, 0]


@pytest.mark.parametrize("part", ["LlamaDecoderLayer", "LlamaAttention"])
def test_another_computation_of_transformers_is_refused_or_left_as_it_is(
    tmp_path, monkeypatch, caplog, part
):
    from transformers.models.llama import modeling_llama

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
        config(tmp_path, "model.compile=auto").model, None, on_gpu=False, compiles=True
    )
    assert not policy.compiled
    assert replaced(policy) == 0
    assert f"Its {part} computes something else" in caplog.text


QWEN = {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864}
QWEN |= {
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def test_auto_is_on_for_long_runs_of_models_of_known_types_on_a_gpu(tmp_path):
    """0.494e9 weights by 8 operations by 256 documents of 512 tokens take 1.7 s an update at 3e14 a
    second."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    long = (
        "accumulation.docs_per_step=256",
        "rollout.prompts_per_batch=32",
        "rollout.group_size=8",
    )
    long += (
        "rollout.max_completion_length=512",
        "accumulation.max_tokens=65536",
        "trainer.max_steps=70",
    )

    def chosen(on_gpu, *overrides):
        return compilation(config_of(*with_model(tmp_path, *long, *overrides)), on_gpu)

    on, why = chosen(True)
    assert on
    assert "20 % of about 121 s of updates, each of up to 131072 tokens" in why
    assert not chosen(False)[0]
    assert chosen(True, "trainer.max_steps=30")[0]
    assert not chosen(True, "trainer.max_steps=28")[0]
    assert not chosen(True, "parallelism.data_parallel=4")[0]
    assert not chosen(True, "accumulation.docs_per_step=64")[0]
    assert chosen(True, "accumulation=fixed", "accumulation.micro_batches_per_step=2")[0]
    assert chosen(False, "model.compile=true")[0]
    assert not chosen(True, "model.compile=false")[0]
    assert not compilation(config_of("model=tiny"), True)[0]
