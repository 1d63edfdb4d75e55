"""float16: its scaled loss, steps whose gradient overflows, and a sampler of another type."""

import copy
import dataclasses
import functools
import math

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.processes import layout, world
from builders.runs import (
    assert_equal,
    checkpoint_of,
    config_of,
    copy_as_of,
    metrics_of,
    module_and_loader,
    some_documents,
    with_model,
)

from pgtoolkit.errors import NumericalError
from pgtoolkit.ranks.gradients import scale_gradients
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.build import build
from pgtoolkit.training.loss_scale import LossScale
from pgtoolkit.training.train import train

HALF = "model.dtype=float16"
TOO_LARGE = 2.0**40


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = small_llama(3, num_hidden_layers=2, hidden_size=32, tie_word_embeddings=True)
    return save_with_tokenizer(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    model = small_llama(3, num_hidden_layers=2, hidden_size=32)
    return save_with_tokenizer(model, tmp_path_factory.mktemp("untied"))


def module_of(path, *overrides):
    return module_and_loader(
        *with_model(path, "optimizer.max_grad_norm=null", *overrides), dtype=None
    )[0]


def gradient_of(module, max_tokens=24, factor=1.0):
    """The gradient of a step that makes no update: as the optimizer would take it."""
    documents = [dataclasses.replace(d, advantages=factor * d.advantages) for d in some_documents()]
    module.optimizer.step = lambda closure=None: None
    metrics = module.training_step(make_step(documents, max_tokens, {}), 0)["metrics"]
    return metrics, torch.cat([p.grad.flatten() for p in module.parameters()])


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kernel", ["fused_linear", "torch"])
def test_the_gradient_is_that_of_float32_but_for_rounding(llama, untied, kernel):
    """Also where head and embedding are one matrix, whose parts of the gradient come on two
    ways."""
    for path in (llama, untied):
        exact, expected = gradient_of(module_of(path, "model.dtype=float32", f"kernel={kernel}"))
        metrics, found = gradient_of(module_of(path, HALF, f"kernel={kernel}"))
        assert relative(found, expected) < 2e-3
        assert metrics["loss"] == pytest.approx(exact["loss"], rel=1e-3, abs=1e-4)
        # The norm is that of the gradient itself, not of the scaled one.
        assert metrics["grad_norm"] == pytest.approx(float(found.double().norm()), rel=1e-5)
        assert (metrics["loss_scale"], metrics["num_overflows"]) == (65536, 0)
        assert "loss_scale" not in exact


def test_small_gradients_are_kept_by_the_scale(untied):
    """Of advantages of 1e-4: without a scale most of the body's gradient is below float16's
    smallest number."""
    _, expected = gradient_of(module_of(untied, "model.dtype=float32"), factor=1e-4)
    errors = []
    for value in (1.0, 65536.0):
        module = module_of(untied, HALF)
        module.loss_scale.value = value
        errors.append(relative(gradient_of(module, factor=1e-4)[1], expected))
    assert errors[0] > 0.03
    assert errors[1] < 3e-3


def test_a_step_is_the_same_however_it_is_cut(untied):
    whole_metrics, whole = gradient_of(module_of(untied, HALF), max_tokens=1000)
    for max_tokens in (24, 14):
        metrics, found = gradient_of(module_of(untied, HALF), max_tokens=max_tokens)
        assert metrics["num_micro_batches"] > whole_metrics["num_micro_batches"]
        assert relative(found, whole) < 1e-3
        assert metrics["grad_norm"] == pytest.approx(whole_metrics["grad_norm"], rel=1e-3)


def test_a_scale_of_a_power_of_2_changes_no_bit_within_the_range(untied):
    module = module_of(untied, HALF)
    state = copy.deepcopy(module.state_dict())
    gradients = []
    for value in (2.0**14, 2.0**15):
        module.load_state_dict(state)
        module.loss_scale.value = value
        gradients.append(gradient_of(module)[1])
    # smaller ones were subnormal in float16
    large = gradients[0].abs() > 1e-4 * gradients[0].abs().max()
    torch.testing.assert_close(gradients[0][large], gradients[1][large], rtol=1e-3, atol=0)


def test_an_overflow_changes_no_weight_and_halves_the_scale_until_there_is_none(untied):
    module = module_of(untied, HALF, "trainer.max_bad_steps=1")
    module.loss_scale.value = TOO_LARGE
    before = [p.clone() for p in module.parameters()]
    step = make_step(some_documents(), 24, {})
    for number in range(1, 60):
        metrics = module.training_step(step, 0)["metrics"]
        assert math.isfinite(metrics["loss"])
        if math.isfinite(metrics["grad_norm"]):
            break
        assert metrics["num_overflows"] == number
        assert metrics["loss_scale"] == TOO_LARGE / 2 ** (number - 1)
        assert module.loss_scale.value == TOO_LARGE / 2**number
        assert module.num_updates == metrics["num_skipped_steps"] == 0
        assert_equal(before, list(module.parameters()))
    assert number > 3
    assert module.num_updates == 1
    assert metrics["num_overflows"] == number - 1
    assert any((p != b).any() for p, b in zip(module.parameters(), before, strict=True))


def test_a_gradient_that_no_scale_makes_finite_ends_the_run(untied):
    """At a scale of 1 it is no overflow; nor is one where the loss itself is not finite."""
    module = module_of(untied, HALF, "trainer.max_bad_steps=2")
    module.loss_scale.value = 2.0
    documents = [dataclasses.replace(d, advantages=1e30 * d.advantages) for d in some_documents()]
    module.training_step(make_step(documents, 24, {}), 0)
    assert (module.loss_scale.value, module.loss_scale.num_overflows, module.num_skipped_steps) == (
        1,
        1,
        0,
    )
    module.training_step(make_step(documents, 24, {}), 0)
    assert (module.loss_scale.value, module.loss_scale.num_overflows, module.num_skipped_steps) == (
        1,
        1,
        1,
    )
    with pytest.raises(NumericalError):
        module.training_step(make_step(documents, 24, {}), 0)
    module = module_of(untied, HALF)
    documents = [
        dataclasses.replace(d, advantages=math.nan * d.advantages) for d in some_documents()
    ]
    module.training_step(make_step(documents, 24, {}), 0)
    assert (module.loss_scale.value, module.num_skipped_steps) == (65536, 1)


def test_the_scale_doubles_after_2000_finite_steps_in_a_row():
    scale = LossScale()
    for _ in range(1999):
        scale.rise()
    assert scale.fall()
    for _ in range(1999):
        scale.rise()
    assert (scale.value, scale.num_overflows) == (32768, 1)
    scale.rise()
    assert scale.value == 65536
    other = LossScale()
    other.load_state_dict(scale.state_dict())
    assert other == scale


def test_a_gradient_is_clipped_by_its_own_norm(untied):
    free, unclipped = gradient_of(module_of(untied, HALF))
    limit = free["grad_norm"] / 4
    metrics, found = gradient_of(module_of(untied, HALF, f"optimizer.max_grad_norm={limit}"))
    assert metrics["grad_norm"] == pytest.approx(free["grad_norm"])
    torch.testing.assert_close(found, unclipped / 4, rtol=1e-4, atol=1e-9)


def test_a_resume_is_bit_equal_after_and_before_overflows(untied, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "pgtoolkit.training.module.LossScale", functools.partial(LossScale, 2.0**25)
    )
    settings = with_model(untied, HALF)
    whole = tmp_path / "whole"
    train(config_of(*settings), whole)
    rows = metrics_of(whole)
    overflows = [row["num_overflows"] for row in rows]
    assert overflows[0] == 1
    assert overflows[-1] < 5
    for step in (1, 5):
        resumed = copy_as_of(whole, step, tmp_path / f"from {step}")
        train(config_of(*settings), resumed, resume=True)
        assert metrics_of(resumed) == rows
        assert_equal(checkpoint_of(resumed, 6), checkpoint_of(whole, 6))


def test_a_sampler_of_another_type_is_further_away(untied, llama):
    """The mean distance of the sampler's log-probs from the trainer's, by the number types of the
    two."""

    def gap(path, dtype, of_sampler):
        settings = with_model(path, f"model.dtype={dtype}", f"sampler.dtype={of_sampler}")
        module, loader = build(config_of(*settings, "rollout.prompts_per_batch=8"))
        source = loader.source
        documents = [source.document(place) for place in range(source.batch_size)]
        sampled = torch.cat([document.sampling_log_probs for document in documents])
        trained = []
        for micro_batch in make_step(documents, 1000, {}).micro_batches:
            trained.append(module.log_probs(micro_batch)[micro_batch.labels >= 0])
        return float((sampled - torch.cat(trained)).abs().mean())

    same = gap(untied, "float16", "auto")
    assert gap(untied, "float16", "float16") == same
    assert gap(untied, "float16", "bfloat16") > 4 * same
    assert gap(untied, "float32", "auto") < same / 20
    assert gap(llama, "float32", "bfloat16") > 4 * gap(llama, "float32", "float16")


def of_two_ranks(path, how, poison):
    """Of a step on this rank: gradient norm, scale, overflows, whether the weights stay.

    poison: whether the gradient of rank 1 alone overflows.
    """
    settings = with_model(path, HALF, f"parallelism={how}", "parallelism.data_parallel=2")
    ranks = layout(data_parallel=2)
    module, _ = build(config_of(*settings), layout=ranks)
    optimizer = module.configure_optimizers()
    module.optimizers = lambda use_pl_optimizer=True: optimizer
    module.manual_backward = lambda loss: loss.backward()
    documents = some_documents()
    step = make_step(documents, 24, {}, ranks.rank_in("data_parallel"), 2)
    if poison and ranks.rank == 1:
        scaled = module.scaled
        module.scaled = lambda loss: scaled(loss) * 2.0**40
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    metrics = module.training_step(step, 0)["metrics"]
    same = all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    return metrics["grad_norm"], module.loss_scale.value, module.loss_scale.num_overflows, same


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(untied, how):
    for poison in (False, True):
        results = world(2).run(of_two_ranks, str(untied), how, poison)
        for norm, value, overflows, same in results:
            assert math.isfinite(norm) is not poison
            assert (value, overflows, same) == ((32768, 1, True) if poison else (65536, 0, False))


def test_gradients_are_multiplied_in_place_and_missing_ones_left_out():
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    parameters[0].grad = torch.tensor([1.0, 2.0, math.inf])
    scale_gradients(parameters, 0.5)
    assert parameters[0].grad.tolist() == [0.5, 1.0, math.inf]
    assert parameters[1].grad is None
