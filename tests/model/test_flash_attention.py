"""FlashAttention 4 computes long documents, by their lengths alone, where it is installed and has
come near float64. A resumed run keeps its attention, or says that it does not."""

import json
import logging
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders.documents import document_of
from builders.models import model_config, small_policy
from builders.parts import short_module
from builders.runs import assert_equal
from model.parallel_gpu import build as build_on
from model.test_compiled import packed
from model.test_packed_attention import result_and_gradients
from torch import Tensor
from torch.nn.attention import varlen

from pgtoolkit.batch import pack
from pgtoolkit.config.models import has_window, sizes
from pgtoolkit.model import attention, fixed_order, flash_attention, recomputed
from pgtoolkit.model.attention import Documents, by_document, by_length
from pgtoolkit.model.misfits import beyond_flash_attention, flash_attention_version
from pgtoolkit.model.plain_attention import one_document, repeated
from pgtoolkit.model.policy import Policy
from pgtoolkit.training.checkpoint import load_newest, save_checkpoint
from pgtoolkit.training.state import restore, snapshot

QUERIES = [3, 2, 4, 1]
KEYS = [1100, 7, 1023, 1024]

CPU = torch.device("cpu")
needs_package = pytest.mark.skipif(
    flash_attention_version() is None, reason="needs FlashAttention 4"
)


def inputs(queries: int, keys: int, heads: int, key_heads: int, width: int) -> list[Tensor]:
    """Return query, key and value in float64."""
    draw = torch.Generator().manual_seed(1)
    shapes = [(queries, heads, width), (keys, key_heads, width), (keys, key_heads, width)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def test_each_document_is_computed_by_its_own_length_alone():
    """Both ways get their documents in order, and the output is in the order of all."""
    documents = Documents(QUERIES, KEYS, CPU)
    seen = []

    def way(factor: float):
        def compute(query: Tensor, key: Tensor, value: Tensor, some: Documents) -> Tensor:
            seen.append((factor, some.queries, some.keys))
            return factor * by_document(query, key, value, some, 0.3, None)

        return compute

    qkv = inputs(sum(QUERIES), sum(KEYS), 2, 1, 3)
    result = result_and_gradients(lambda *x: by_length(*x, documents, way(2), way(1)), qkv)
    assert seen == [(2, [3, 1], [1100, 1024]), (1, [2, 4], [7, 1023])]
    factors = torch.ones(sum(QUERIES), 1, 1, dtype=torch.float64)
    factors[[0, 1, 2, 9]] = 2
    expected = result_and_gradients(lambda *x: factors * by_document(*x, documents, 0.3, None), qkv)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)


def test_inputs_are_not_copied_where_all_documents_are_long():
    documents = Documents([2, 1], [1024, 1500], CPU)
    qkv = inputs(3, 2524, 1, 1, 2)
    seen = []
    out = by_length(*qkv, documents, lambda *got: seen.append(got) or got[0], None)
    assert out is qkv[0]
    (got,) = seen
    assert all(x is y for x, y in zip(got, (*qkv, documents), strict=True))


@pytest.mark.parametrize(
    ("capability", "width", "window", "problem"),
    [
        ((9, 0), 256, False, None),
        ((9, 0), 200, False, None),
        ((10, 0), 128, False, None),
        ((10, 3), 256, False, None),
        ((11, 0), None, False, None),
        ((10, 0), 136, False, "on this GPU it has no heads of 136"),
        ((9, 0), 128, True, "it is not used in layers with a sliding window"),
        ((8, 9), 64, False, "it needs a GPU of compute capability 9.0 to 11.9 (got 8.9)"),
        ((12, 0), 64, True, "it needs a GPU of compute capability 9.0 to 11.9 (got 12.0)"),
    ],
)
def test_what_the_kernels_lack_is_known_before_a_run(capability, width, window, problem):
    assert beyond_flash_attention(capability, width, window) == problem


@pytest.mark.parametrize(
    ("shape", "head", "window"),
    [
        ({"model_type": "gpt2", "n_embd": 96, "n_head": 2, "n_layer": 1}, 48, False),
        ({"model_type": "llama", "sliding_window": None}, 16, False),
        ({"model_type": "mistral", "head_dim": 24}, 24, True),
        ({"model_type": "gemma3_text", "head_dim": 32, "sliding_window": 512}, 32, True),
        ({"model_type": "mistral", "head_dim": None, "sliding_window": None}, 16, False),
        ({"model_type": "qwen2", "sliding_window": 131072}, 16, False),
        ({"model_type": "qwen3", "use_sliding_window": False, "sliding_window": 99}, 16, False),
        ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 99}, 16, True),
        ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": None}, 16, False),
    ],
)
def test_heads_and_windows_are_those_of_the_models_file(tmp_path, shape, head, window):
    sizes_of_all = {
        "vocab_size": 9,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes_of_all | shape))
    model = model_config(tmp_path)
    assert (sizes(model).head, has_window(model)) == (head, window)


@pytest.mark.skipif(torch.cuda.is_available(), reason="where no GPU is")
def test_an_installed_package_is_found_but_not_taken_without_a_gpu(tmp_path, monkeypatch):
    info = tmp_path / "flash_attn_4-4.5.6.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.5.6\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert flash_attention_version() == "4.5.6"
    flash_attention.switch(True)
    assert flash_attention.version() is None
    long = torch.zeros(1024, 2, 8)
    assert not flash_attention.serves(long, long, None)


PACKAGE = """
import torch
from pgtoolkit.model.plain_attention import one_document, repeated

calls = 0

def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                           softmax_scale, causal, deterministic):
    global calls
    calls += 1
    assert causal and deterministic
    queries, keys = (ends.diff().tolist() for ends in (cu_seqlens_q, cu_seqlens_k))
    assert (max(queries), max(keys)) == (max_seqlen_q, max_seqlen_k)
    parts = zip(q.split(queries), repeated(k, q).split(keys), repeated(v, q).split(keys))
    out = torch.cat([one_document(*part, softmax_scale, None) for part in parts])
    return ({fault}), None
"""
"""A package that computes on the CPU, with or without a fault."""

TRIAL_CALLS = 6
"""For the comparison with float64, for four calls with gradients, and for one without."""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs PACKAGE with a fault. It is tried with small documents."""
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("ENABLED", "DIR"):
        monkeypatch.setenv(f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}", "")
    for name, value in (("_QUERIES", (20, 9)), ("_KEYS", (20, 15)), ("_REPEATED", (30, 20))):
        monkeypatch.setattr(flash_attention, name, value)
    kept = (flash_attention._kernels, flash_attention._problem)
    for function in kept:
        function.cache_clear()
    yield lambda fault: (package / "__init__.py").write_text(PACKAGE.format(fault=fault))
    for function in kept:
        function.cache_clear()
    for name in ("flash_attn", "flash_attn.cute"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("dtype", "fault", "problem"),
    [
        (torch.bfloat16, "out", "None"),
        (torch.float16, "out", "None"),
        (torch.bfloat16, "1.03 * out", r"its output is 0\.03\d* off float64's, more than 0\.016"),
        (torch.float16, "1.004 * out", r"its output is 0\.00\d+ off float64's, more than 0\.002"),
        (
            torch.bfloat16,
            "out + 0.03 * (q - q.detach())",
            r"its gradient by queries is 0\.\d+ off .*",
        ),
        (torch.bfloat16, "out * torch.nan", r"its output is nan off .*"),
        (
            torch.bfloat16,
            "out if calls != 3 else out * (1 + 2**-7)",
            "two calls do not give the same bits",
        ),
        (
            torch.bfloat16,
            "out if q.requires_grad else out * (1 + 2**-7)",
            "a call without gradients does not give the same bits",
        ),
    ],
)
def test_kernels_are_tried_before_they_are_taken(install, dtype, fault, problem):
    install(fault)
    assert re.fullmatch(problem, str(flash_attention._trial(CPU, dtype, 8, 3)))


@pytest.mark.parametrize(
    ("options", "kept", "calls"),
    [
        ("", (), 2),
        ("_checkpointed", (), 4),
        *(
            pytest.param("_compiled", kept, calls, marks=pytest.mark.slow)
            for kept, calls in (((False, False), 4), ((True, False), 2), ((True, True), 2))
        ),
    ],
)
def test_a_model_tries_them_in_its_first_pass_and_takes_them_in_each(
    request, install, monkeypatch, options, kept, calls
):
    """The first pass is one with gradients. Of two layers each calls the kernels for its long
    documents once, and once more where it computes attention again. The kernels here compute what
    PyTorch does for a document, so states and gradients have the bits of a model without them."""
    if options == "_compiled":
        request.getfixturevalue("uncompiled")
    policy = small_policy(f"qwen2{options}_by_document")
    policy = replace(policy, model=policy.model.float(), compute_dtype=torch.bfloat16)
    if kept:
        for layer in policy.model.base_model.layers:
            recomputed.keep(layer, *kept)
    expected = model_pass(policy)
    install("out")
    monkeypatch.setattr(flash_attention, "_version", "4.5.6")
    monkeypatch.setattr(flash_attention, "LONG", 5)
    monkeypatch.setattr(attention, "has_kernel", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(varlen, "varlen_attn", by_document_on_a_cpu)
    for number in (1, 2):
        assert_equal(model_pass(policy), expected)
        assert sys.modules["flash_attn.cute"].calls == TRIAL_CALLS + number * calls


def model_pass(policy: Policy) -> list[Tensor]:
    """Return the states of documents below and above LONG, and all gradients."""
    policy.model.zero_grad(set_to_none=True)
    states = policy.hidden_states(packed((7, 3, 5)))
    weights = torch.linspace(-1, 1, states.numel()).view_as(states).sin()
    (states.float() * weights).sum().backward()
    gradients = [p.grad for p in policy.model.parameters() if p.grad is not None]
    return [states.detach(), *gradients]


def by_document_on_a_cpu(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, *_, **options
) -> Tensor:
    """Compute what `varlen_attn` does on a GPU."""
    queries, keys = (ends.diff().tolist() for ends in (query_ends, key_ends))
    parts = zip(
        query.split(queries),
        repeated(key, query).split(keys),
        repeated(value, query).split(keys),
        strict=True,
    )
    return torch.cat([one_document(*part, options["scale"], None) for part in parts])


@pytest.fixture(scope="module")
def module():
    return short_module()


@pytest.mark.parametrize(
    ("saved", "here", "after", "level", "sentence"),
    [
        (None, None, None, None, None),
        ("4.1", "4.1", "4.1", None, None),
        (
            None,
            "4.1",
            None,
            logging.INFO,
            "flash-attn-4 is installed, but this run goes on with PyTorch's attention, with which "
            "it has begun.",
        ),
        (
            "4.1",
            None,
            None,
            logging.WARNING,
            "note: so far this run had the attention of flash-attn-4 4.1, and goes on with "
            "PyTorch's, since the package is not installed or not for this device. ",
        ),
        (
            "4.1",
            "4.2",
            "4.2",
            logging.WARNING,
            "note: so far this run had the attention of flash-attn-4 4.1, and goes on with that "
            "of 4.2. ",
        ),
    ],
)
def test_a_resumed_run_keeps_its_attention_or_says_that_it_does_not(
    module, tmp_path, monkeypatch, caplog, saved, here, after, level, sentence
):
    data = {"num_steps": 1, "position": 0, "source": {}}
    monkeypatch.setattr(flash_attention, "_version", saved)
    save_checkpoint(tmp_path, *snapshot(module, data), lambda folder: None, keep=1)
    monkeypatch.setattr(flash_attention, "_version", here)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="pgtoolkit"):
        restore(module, load_newest(tmp_path))
    assert flash_attention.version() == after
    if sentence is None:
        assert caplog.messages == []
        return
    (record,) = caplog.records
    assert record.levelno == level
    ending = (
        "Numbers of documents of 1024 tokens or more are rounded in another way from here on. Use "
        "pip install flash-attn-4==4.1, on a GPU such as it had, to go on as before."
    )
    assert record.getMessage() == sentence + (ending if level == logging.WARNING else "")


@pytest.fixture
def taken(monkeypatch):
    """Let this process take the kernels, with a fixed order for PyTorch's."""
    monkeypatch.setattr(flash_attention, "_version", None)
    monkeypatch.setattr(fixed_order, "_on", True)
    flash_attention.switch(True)
    assert flash_attention.version() == flash_attention_version()


def exact(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Return attention in the inputs' type, one head of one document after the other."""
    outputs = []
    repeats = query.shape[1] // key.shape[1]
    parts = zip(
        query.split(documents.queries),
        key.split(documents.keys),
        value.split(documents.keys),
        strict=True,
    )
    for q, k, v in parts:
        heads = []
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // repeats].T / math.sqrt(q.shape[2])
            future = torch.ones_like(scores, dtype=torch.bool).triu(len(k) - len(q) + 1)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[:, head // repeats])
        outputs.append(torch.stack(heads, 1))
    return torch.cat(outputs)


@pytest.mark.gpu
@needs_package
@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "dtype"),
    [
        (14, 2, 64, torch.bfloat16),
        (16, 8, 128, torch.bfloat16),
        (4, 4, 96, torch.bfloat16),
        (4, 1, 256, torch.bfloat16),
        (4, 2, 128, torch.float16),
    ],
)
def test_on_a_gpu_the_kernels_come_near_float64_and_repeat(heads, key_heads, width, dtype):
    """Also where some documents are short, and keys come before a document's first query."""
    device = torch.device("cuda")
    documents = Documents([4200, 300, 700], [4200, 300, 4500], device)
    qkv = [x.to(device, dtype) for x in inputs(5200, 9000, heads, key_heads, width)]
    assert flash_attention.serves(qkv[0], qkv[1], None)
    result = result_and_gradients(lambda *x: by_document(*x, documents, None, None), qkv)
    again = result_and_gradients(lambda *x: by_document(*x, documents, None, None), qkv)
    assert all(torch.equal(a, b) for a, b in zip(result, again, strict=True))
    by_torch = result_and_gradients(lambda *x: attention.by_torch(*x, documents, None, None), qkv)
    assert not torch.equal(result[0][:4200], by_torch[0][:4200])
    assert torch.equal(result[0][4200:4500], by_torch[0][4200:4500])
    expected = result_and_gradients(lambda *x: exact(*x, documents), [x.double() for x in qkv])
    for a, b, c in zip(result, by_torch, expected, strict=True):
        errors = [float((x.double() - c).norm() / c.norm()) for x in (a, b)]
        assert errors[0] < 1.3 * errors[1] + torch.finfo(dtype).eps / 8
    alone = Documents([4200], [4200], device)
    qkv_of_first = [x[:4200] for x in qkv]
    assert torch.equal(by_document(*qkv_of_first, alone, None, None), result[0][:4200])


@pytest.mark.gpu
@needs_package
@pytest.mark.usefixtures("taken")
def test_on_a_gpu_compiled_kernels_are_kept_and_windows_are_pytorchs(caplog):
    device = torch.device("cuda")
    query, key, value = (x.to(device, torch.bfloat16) for x in inputs(4200, 4200, 2, 2, 64))
    assert flash_attention.serves(query, key, None)
    kept = Path.home() / ".cache" / "pgtoolkit" / "flash_attention"
    assert [*kept.rglob("*.o")]
    flash_attention._problem.cache_clear()
    with caplog.at_level(logging.INFO, logger="pgtoolkit"):
        assert not flash_attention.serves(query, key, 100)
        documents = Documents([4200], [4200], device)
        windowed = by_document(query, key, value, documents, None, 100)
    assert caplog.messages == [
        "note: PyTorch's attention takes the place of flash-attn-4's for heads of 64: it is not "
        "used in layers with a sliding window."
    ]
    assert torch.equal(windowed, attention.by_torch(query, key, value, documents, None, 100))


@pytest.mark.gpu
@needs_package
@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("options", ["", "compiled"])
def test_on_a_gpu_a_model_of_long_documents_repeats_to_the_bit(options, monkeypatch):
    """States and gradients in bfloat16 are as far from float32's as those by PyTorch's kernels. A
    pass without gradients, as for old log-probs, has the bits of one with them."""
    device = torch.device("cuda")
    policy = build_on(device, torch.bfloat16, options)
    draw = torch.Generator().manual_seed(2)
    texts = [
        torch.randint(0, policy.vocabulary_size, (length,), generator=draw)
        for length in (4200, 250, 4100)
    ]
    batch = pack([document_of(text, torch.arange(len(text)) > 0) for text in texts]).to(device)

    def states_and_gradients(policy) -> list[Tensor]:
        policy.model.zero_grad(set_to_none=True)
        states = policy.hidden_states(batch)
        weights = torch.linspace(-1, 1, states.numel(), device=device).view_as(states)
        (states.float() * weights).sum().backward()
        return [states.detach(), *(p.grad for p in policy.model.parameters() if p.grad is not None)]

    by_kernels = states_and_gradients(policy)
    again = states_and_gradients(policy)
    assert all(torch.equal(a, b) for a, b in zip(by_kernels, again, strict=True))
    with torch.no_grad():
        assert torch.equal(policy.hidden_states(batch), by_kernels[0])
    exact = build_on(device, torch.float32)
    attention.use_packed_attention(exact.model)
    expected = states_and_gradients(exact)
    monkeypatch.setattr(flash_attention, "_version", None)
    by_torch = states_and_gradients(policy)
    assert not torch.equal(by_torch[0], by_kernels[0])
    for a, b, c in zip(by_kernels, by_torch, expected, strict=True):
        errors = [float((x.double() - c.double()).norm()) for x in (a, b)]
        assert errors[0] < 1.3 * errors[1] + 1e-3 * float(c.double().norm())
