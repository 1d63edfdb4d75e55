"""The fused LM head against materialised logits: however it is cut, in every precision, for every parameter."""

import math

import pytest
import torch
from steps import AGGREGATIONS, EPSILONS, LOSSES, make_case, objective_of, relative_error
from torch.nn.functional import linear

from pgtoolkit import linear_policy_loss, policy_loss
from pgtoolkit.batch import DocumentCounts
from pgtoolkit.errors import DataError
from pgtoolkit.kernels import fused_head as linear_module
from pgtoolkit.kernels import torch_passes, triton_passes
from pgtoolkit.kernels.fused_head import HeadOptions, linear_loss
from pgtoolkit.kernels.products import accumulate_matmul, matmul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = {"torch": torch_passes, "triton": triton_passes}
TEMPERATURE = 0.7


class Problem:
    """Hidden states and a head whose logits make a step with empty, zero-advantage, clipped and long documents."""

    def __init__(self, dtype=torch.float64, seed=12, hidden_size=16, vocabulary=13, **options):
        case = make_case(seed=seed, temperature=TEMPERATURE, vocabulary=vocabulary, **options)
        generator = torch.Generator().manual_seed(seed)
        # hidden (weight).T = logits + bias, by least squares: as many hidden units as tokens of the vocabulary.
        weight = torch.randn(vocabulary, hidden_size, generator=generator, dtype=torch.float64)
        hidden = (case.logits @ torch.linalg.pinv(weight).T).to(dtype).double()
        weight = weight.to(dtype).double()
        bias = (0.1 * torch.randn(vocabulary, generator=generator, dtype=torch.float64)).to(dtype).double()
        logits = linear(hidden, weight, bias)
        advantages = case.advantages.clone()
        advantages[case.document_index == 2] = 0
        shift = (logits / TEMPERATURE).log_softmax(-1) - (case.logits / TEMPERATURE).log_softmax(-1)
        old = case.old_log_probs + shift.gather(-1, case.labels.clamp(min=0)[:, None]).squeeze(-1)
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        self.exact = (case.labels, old, advantages, case.document_index)
        self.tensors = tuple(x.to(DEVICE, precise if x.is_floating_point() else x.dtype) for x in self.exact)
        self.group_index = case.group_index
        self.parameters = (hidden, weight, bias)
        self.dtype = dtype

    def leaves(self, dtype=None, device=None):
        return [x.clone().to(device or DEVICE, dtype or self.dtype).requires_grad_() for x in self.parameters]

    def expected(self, factor=1.0, **options):
        """(loss, gradients by hidden, weight and bias, metrics) in float64 from all logits at once."""
        leaves = self.leaves(torch.float64, "cpu")
        out = policy_loss(linear(*leaves), *self.exact, temperature=TEMPERATURE, impl="torch", **options)
        (factor * out.loss).backward()
        return out.loss.detach(), [x.grad for x in leaves], out.metrics

    def fused(
        self,
        max_rows,
        loss,
        implementation="torch",
        fp32_logits=False,
        aggregation="sample_mean",
        divisor=None,
        group_index=None,
        **epsilons,
    ):
        """(loss, log_probs) with chunks of max_rows, and the leaves."""
        leaves = self.leaves()
        precise = torch.float64 if self.dtype == torch.float64 else torch.float32
        options = {"group_index": group_index, "dtype": precise} | epsilons
        objective = objective_of(self.tensors, loss, (aggregation, divisor), **options)
        module = IMPLEMENTATIONS[implementation]
        options = HeadOptions(module, max_rows, TEMPERATURE, "with_entropy", fp32_logits, True, None)
        value, log_probs, _, _ = linear_loss(*leaves, self.tensors[0], objective, options)
        return value, log_probs, leaves


@pytest.mark.parametrize("max_rows", [1, 4, 7, 12, 1000])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_however_it_is_cut(loss, aggregation, max_rows):
    """Documents longer than a chunk, of zero advantage, and clipped, under a scaled loss: all to 1e-12."""
    problem = Problem()
    options = {
        "aggregation": aggregation,
        "divisor": 8.0 if aggregation == "constant" else None,
        "group_index": problem.group_index.to(DEVICE),
    }
    value, log_probs, leaves = problem.fused(max_rows, loss, **options)
    (3 * value).backward()
    options["group_index"] = problem.group_index
    expected_value, gradients, _ = problem.expected(3.0, loss=loss, **EPSILONS[loss], **options)
    assert relative_error(value.detach(), expected_value) < 1e-12
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert relative_error(leaf.grad, gradient) < 1e-12
    assert (log_probs[problem.tensors[0] < 0] == 0).all()
    assert (leaves[0].grad[problem.tensors[0] < 0] == 0).all()


HALF = tuple((dtype, fp32_logits) for dtype in (torch.bfloat16, torch.float16) for fp32_logits in (False, True))


@pytest.mark.parametrize(
    ("loss", "implementation", "dtype", "fp32_logits"),
    [
        *((loss, implementation, torch.float32, False) for loss in LOSSES for implementation in IMPLEMENTATIONS),
        *((loss, "torch", *kind) for loss in LOSSES for kind in HALF),
        *(("gspo", "triton", *kind) for kind in HALF),
    ],
)
def test_precision(loss, implementation, dtype, fp32_logits):
    """The clip is wide, so that rounded logits clip what exact ones do."""
    wide = {"epsilon_low": 0.9, "epsilon_high": 9.0}
    # With logits rounded to the dtype the ratios move; float32 logits leave the rounding of the gradient.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2 if fp32_logits else 3e-2, torch.float16: 3e-3}[dtype]
    problem = Problem(dtype)
    for max_rows in (4, 1000):
        value, _, leaves = problem.fused(max_rows, loss, implementation, fp32_logits, **wide)
        value.backward()
        expected_value, gradients, _ = problem.expected(loss=loss, **wide)
        assert relative_error(value.detach(), expected_value) < tolerance
        for leaf, gradient in zip(leaves, gradients, strict=True):
            assert leaf.grad.dtype == dtype
            assert relative_error(leaf.grad, gradient) < tolerance


@pytest.mark.parametrize("impl", ["auto", "torch", "fused_linear"])
@pytest.mark.parametrize("loss", LOSSES)
def test_front_door(loss, impl):
    """Large enough for the default cut to matter: one MiB holds the logits of three tokens."""
    problem = Problem(vocabulary=40000, hidden_size=32)
    options = {"loss": loss, "metrics": "with_entropy", **EPSILONS[loss]}
    expected_value, gradients, metrics = problem.expected(**options)
    hidden, weight, bias = problem.leaves()
    out = linear_policy_loss(
        hidden,
        weight,
        *problem.tensors,
        bias=bias,
        temperature=TEMPERATURE,
        impl=impl,
        logits_memory_mb=None if impl == "torch" else 1,
        **options,
    )
    out.loss.backward()
    assert relative_error(out.loss.detach(), expected_value) < 1e-12
    for leaf, gradient in zip((hidden, weight, bias), gradients, strict=True):
        assert relative_error(leaf.grad, gradient) < 1e-11
    found = {name: float(value) for name, value in out.metrics.items()}
    assert found == pytest.approx({k: float(v) for k, v in metrics.items()}, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("num_splits", [1, 2, 5, 1000])
def test_num_splits_do_not_matter(num_splits):
    problem = Problem()
    expected_value, gradients, _ = problem.expected(loss="grpo", **EPSILONS["grpo"])
    for impl in ("auto", "torch"):
        hidden, weight, bias = problem.leaves()
        out = linear_policy_loss(
            hidden,
            weight,
            *problem.tensors,
            bias=bias,
            temperature=TEMPERATURE,
            loss="grpo",
            num_splits=num_splits,
            impl=impl,
            **EPSILONS["grpo"],
        )
        out.loss.backward()
        assert relative_error(out.loss.detach(), expected_value) < 1e-12
        for leaf, gradient in zip((hidden, weight, bias), gradients, strict=True):
            assert relative_error(leaf.grad, gradient) < 1e-12


@pytest.mark.parametrize("loss", LOSSES)
def test_no_grad_gives_loss_and_metrics_only(loss):
    problem = Problem()
    hidden, weight, bias = problem.leaves()
    options = {"loss": loss, "bias": bias, "metrics": "with_entropy", "impl": "fused_linear", **EPSILONS[loss]}
    with_gradient = linear_policy_loss(hidden, weight, *problem.tensors, **options)
    with torch.no_grad():
        without = linear_policy_loss(hidden, weight, *problem.tensors, **options)
    assert not without.loss.requires_grad
    assert relative_error(without.loss, with_gradient.loss.detach()) < 1e-13
    assert relative_error(without.log_probs, with_gradient.log_probs) < 1e-13
    assert relative_error(without.metrics["entropy"], with_gradient.metrics["entropy"]) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weight_gradient_adds_up_over_micro_batches(dtype):
    """Two calls add to one float32 buffer, which autograd does not see; bfloat16 sums are not rounded in between."""
    problem = Problem(dtype)
    total = torch.zeros(13, 16, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=DEVICE)
    for _ in range(2):
        hidden, weight, _ = problem.leaves()
        out = linear_policy_loss(
            hidden, weight, *problem.tensors, loss="grpo", weight_gradient=total, **EPSILONS["grpo"]
        )
        out.loss.backward()
        assert weight.grad is None
    other_hidden, other_weight, _ = problem.leaves()
    linear_policy_loss(other_hidden, other_weight, *problem.tensors, loss="grpo", **EPSILONS["grpo"]).loss.backward()
    tolerance = 1e-13 if dtype == torch.float64 else 5e-3
    assert relative_error(total, 2 * other_weight.grad.double()) < tolerance
    assert torch.equal(hidden.grad, other_hidden.grad)


@pytest.mark.skipif(DEVICE == "cuda", reason="a device-side assertion ends the process's use of the GPU")
def test_weight_gradient_refuses_a_scaled_loss():
    problem = Problem()
    hidden, weight, _ = problem.leaves()
    out = linear_policy_loss(hidden, weight, *problem.tensors, weight_gradient=torch.zeros_like(weight).detach())
    with pytest.raises(RuntimeError, match="as it was returned"):
        (2 * out.loss).backward()


@pytest.mark.parametrize("given", [False, True])
def test_the_weight_gradient_adds_up_in_float32_over_chunks(given):
    """1024 equal tokens, one a chunk: a bfloat16 total no longer grows once it is 256 times what is added."""
    rows, ones = 1024, torch.ones(1024, 1, device=DEVICE)
    hidden = ones.bfloat16().requires_grad_()
    weight = torch.zeros(4, 1, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    zeros = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    total = torch.zeros(4, 1, device=DEVICE) if given else None
    out = linear_policy_loss(
        hidden,
        weight,
        zeros,
        -math.log(4) * ones[:, 0],
        ones[:, 0],
        zeros,
        loss="grpo",
        impl="fused_linear",
        logits_memory_mb=1e-6,
        weight_gradient=total,
    )
    out.loss.backward()
    # The mean of -(onehot - softmax): -3/4 for the label, 1/4 for the others.
    found = (total if given else weight.grad).double().cpu()
    expected = torch.tensor([[-0.75], [0.25], [0.25], [0.25]], dtype=torch.float64)
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_add_to_a_float32_total_without_rounding_in_between(dtype):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).to(DEVICE, dtype) for shape in ((300, 50), (50, 130)))
    total = torch.full((300, 130), 100.0, device=DEVICE)
    accumulate_matmul(total, a, b, alpha=0.25)
    accumulate_matmul(total, a, b, alpha=0.25)
    assert relative_error(total, 100 + 0.5 * (a.double() @ b.double())) < 1e-6
    product = matmul(a, b, torch.empty(300, 130, device=DEVICE))
    assert relative_error(product, a.double() @ b.double()) < 1e-6


def test_bad_data_is_named_before_it_reaches_the_buffer():
    problem = Problem()
    labels, old, advantages, index = problem.tensors
    old = old.clone()
    old[(index == 3).nonzero()[4]] = torch.nan
    hidden, weight, _ = problem.leaves()
    total = torch.zeros_like(weight).detach()
    for loss in LOSSES:
        with pytest.raises(DataError, match="document 3"):
            linear_policy_loss(hidden, weight, labels, old, advantages, index, loss=loss, weight_gradient=total)
        assert (total == 0).all()
    hidden = hidden.detach().clone()
    hidden[(index == 1).nonzero()[0]] = torch.inf
    with pytest.raises(DataError, match="document 1"):
        linear_policy_loss(hidden.requires_grad_(), weight, *problem.tensors)


def test_untrained_rows_are_not_multiplied():
    """Hidden states of NaN at untrained positions reach neither the loss nor any gradient."""
    problem = Problem()
    for loss in LOSSES:
        expected_value, gradients, _ = problem.expected(loss=loss, **EPSILONS[loss])
        hidden, weight, bias = problem.leaves()
        untrained = problem.tensors[0] < 0
        poisoned = torch.where(untrained[:, None], torch.nan, hidden.detach()).requires_grad_()
        out = linear_policy_loss(
            poisoned, weight, *problem.tensors, bias=bias, loss=loss, temperature=TEMPERATURE, **EPSILONS[loss]
        )
        out.loss.backward()
        assert relative_error(out.loss.detach(), expected_value) < 1e-12
        assert relative_error(poisoned.grad, gradients[0]) < 1e-12
        assert relative_error(weight.grad, gradients[1]) < 1e-12


def test_frozen_weight_and_frozen_body():
    problem = Problem()
    _, gradients, _ = problem.expected(loss="gspo")
    for frozen in (0, 1, 2):
        leaves = problem.leaves()
        leaves[frozen].requires_grad_(False)
        out = linear_policy_loss(*leaves[:2], *problem.tensors, bias=leaves[2], temperature=TEMPERATURE)
        out.loss.backward()
        for i, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
            assert leaf.grad is None if i == frozen else relative_error(leaf.grad, gradient) < 1e-12


def test_tied_embeddings_and_checkpointed_body():
    """The embedding's share of the gradient and the head's add up; a recomputed body changes nothing."""
    problem = Problem()
    _, weight, _ = problem.leaves()
    body = torch.nn.Linear(16, 16, dtype=torch.float64, device=DEVICE)
    tokens = problem.tensors[0].clamp(min=0)

    def run(checkpointed, head):
        weight.grad = body.weight.grad = None
        hidden = torch.nn.functional.embedding(tokens, weight)
        hidden = torch.utils.checkpoint.checkpoint(body, hidden, use_reentrant=False) if checkpointed else body(hidden)
        head(hidden).backward()
        return weight.grad, body.weight.grad

    expected = run(False, lambda hidden: policy_loss(hidden @ weight.T, *problem.tensors, impl="torch").loss)
    found = run(True, lambda hidden: linear_policy_loss(hidden, weight, *problem.tensors).loss)
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-12


def test_float32_weight_under_a_bfloat16_model():
    problem = Problem(torch.bfloat16)
    hidden, weight, _ = problem.leaves()
    wide = weight.detach().float().requires_grad_()
    linear_policy_loss(hidden, wide, *problem.tensors).loss.backward()
    linear_policy_loss(hidden, weight, *problem.tensors).loss.backward()
    assert wide.grad.dtype == torch.float32
    assert torch.equal(wide.grad.bfloat16(), weight.grad)


def test_the_gradients_are_handed_out_once():
    problem = Problem()
    hidden, weight, _ = problem.leaves()
    out = linear_policy_loss(hidden, weight, *problem.tensors)
    out.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="first backward"):
        out.loss.backward()


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_to_train(loss):
    problem = Problem()
    _, old, advantages, index = problem.tensors
    for rows in (0, len(old)):
        hidden, weight, _ = problem.leaves()
        hidden = hidden.detach()[:rows].requires_grad_()
        labels = torch.full((rows,), -1, device=DEVICE)
        out = linear_policy_loss(
            hidden, weight, labels, old[:rows], advantages[:rows], index[:rows], loss=loss, num_documents=6
        )
        out.loss.backward()
        assert float(out.loss.detach()) == 0
        assert (hidden.grad == 0).all()
        assert (weight.grad == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "gspo", "num_splits": 2}, "needs a family by token"),
        ({"loss": "grpo", "num_splits": 2, "impl": "fused_linear"}, "no effect"),
        ({"impl": "nonsense"}, "unknown"),
        ({"impl": "torch", "weight_gradient": torch.zeros(13, 16, dtype=torch.float64)}, "needs impl='fused_linear'"),
    ],
)
def test_refusals(options, message):
    problem = Problem()
    options = {key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    hidden, weight, _ = problem.leaves()
    with pytest.raises(ValueError, match=message):
        linear_policy_loss(hidden, weight, *problem.tensors, **options)
    with pytest.raises(ValueError, match="lm_head_weight needs shape"):
        linear_policy_loss(hidden, weight.T, *problem.tensors)


def test_only_the_pieces_before_the_last_come_twice(monkeypatch):
    """A document of 12 tokens in chunks of 5: the logits of 2 + 5 tokens are computed again, not the last 5."""
    computed = []
    real = linear_module.matmul
    monkeypatch.setattr(
        linear_module, "matmul", lambda a, *rest, **more: computed.append(len(a)) or real(a, *rest, **more)
    )
    problem = Problem(lengths=(12,))
    problem.tensors[0][:] = 1  # all trained
    problem.fused(5, "gspo")
    assert computed == [2, 5, 5, 2, 5]


@pytest.mark.parametrize("loss", LOSSES)
def test_counts_known_on_the_host(loss):
    """The same chunks, hence the same bits, without asking the device; refused for another number of documents."""
    problem = Problem(vocabulary=40000, hidden_size=32)
    labels, _, advantages, index = (x.cpu() for x in problem.tensors)
    trained = [int(((labels >= 0) & (index == d)).sum()) for d in range(6)]
    informative = [int(((labels >= 0) & (index == d) & (advantages != 0)).sum()) for d in range(6)]
    assert trained != informative
    results = []
    for counts in (None, DocumentCounts(trained, informative)):
        leaves = problem.leaves()
        options = {"loss": loss, "logits_memory_mb": 1, "check_finite": False, "num_documents": 6, **EPSILONS[loss]}
        out = linear_policy_loss(*leaves[:2], *problem.tensors, bias=leaves[2], counts=counts, **options)
        out.loss.backward()
        results.append([out.loss.detach(), *(x.grad for x in leaves)])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    with pytest.raises(ValueError, match="counts needs 6 documents"):
        linear_policy_loss(*leaves[:2], *problem.tensors, counts=DocumentCounts([1], [1]), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", LOSSES)
def test_deterministic(loss):
    """Two runs on the same GPU agree to the last bit, clipped and zero-advantage documents included."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows, columns = 2000, 32000
    hidden = torch.randn(rows, 256, generator=generator, device=DEVICE).bfloat16()
    weight = (0.1 * torch.randn(columns, 256, generator=generator, device=DEVICE)).bfloat16()
    labels = torch.randint(-1, columns, (rows,), generator=generator, device=DEVICE)
    index = torch.randint(0, 20, (rows,), generator=generator, device=DEVICE)
    advantages = torch.randint(-1, 2, (20,), generator=generator, device=DEVICE).float()[index]
    with torch.no_grad():
        new = linear_policy_loss(hidden, weight, labels, advantages, advantages, index, check_finite=False).log_probs
    old = new + 0.002 * torch.randn(rows, generator=generator, device=DEVICE)
    results = []
    for _ in range(2):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = linear_policy_loss(
            *leaves, labels, old, advantages, index, loss=loss, logits_memory_mb=20, metrics="with_entropy"
        )
        out.loss.backward()
        results.append([out.loss.detach(), *(x.grad for x in leaves), *out.metrics.values()])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
