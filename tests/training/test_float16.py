"""Training in float16: the scaled loss, steps whose gradient overflows, samplers of other types.

Gradients are compared with those of float32, resumed runs with uninterrupted ones bit for bit.
"""

import copy
import dataclasses
import functools
import math
from pathlib import Path
from typing import NamedTuple

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

from pgtoolkit.assembly.build import build
from pgtoolkit.assembly.train import train
from pgtoolkit.errors import NumericalError
from pgtoolkit.ranks.gradients import scale_gradients
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.loss_scale import LossScale
from pgtoolkit.training.module import PolicyGradientModule

HALF = "model.dtype=float16"
TOO_LARGE = 2.0**40


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    model = small_llama(3, num_hidden_layers=2, hidden_size=32, tie_word_embeddings=True)
    return save_with_tokenizer(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory) -> Path:
    model = small_llama(3, num_hidden_layers=2, hidden_size=32)
    return save_with_tokenizer(model, tmp_path_factory.mktemp("untied"))


def module_of(path: Path, *overrides: str) -> PolicyGradientModule:
    return module_and_loader(
        *with_model(path, "optimizer.max_grad_norm=null", *overrides), dtype=None
    )[0]


def metrics_and_gradient(
    module: PolicyGradientModule, max_tokens: int = 24, factor: float = 1.0
) -> tuple[dict, torch.Tensor]:
    """Return metrics of a step without an update, and the gradient that the optimizer would take.

    factor: multiplies the advantages.
    """
    documents = [dataclasses.replace(d, advantages=factor * d.advantages) for d in some_documents()]
    module.optimizer.step = lambda closure=None: None
    metrics = module.training_step(make_step(documents, max_tokens, {}), 0)["metrics"]
    return metrics, torch.cat([p.grad.flatten() for p in module.parameters()])


def relative_difference(x: torch.Tensor, expected: torch.Tensor) -> float:
    return float((x - expected).norm() / expected.norm())


def scale_overflows_and_skipped(module: PolicyGradientModule) -> tuple[float, int, int]:
    scale = module.loss_scale
    return scale.value, scale.num_overflows, module.num_skipped_steps


@pytest.mark.parametrize("kernel", ["fused_linear", "torch"])
def test_the_gradient_is_that_of_float32_but_for_rounding(llama, untied, kernel):
    """Also where head and embedding are one matrix, whose gradient has two parts."""
    for path in (llama, untied):
        expected_metrics, expected = metrics_and_gradient(
            module_of(path, "model.dtype=float32", f"kernel={kernel}")
        )
        metrics, gradient = metrics_and_gradient(module_of(path, HALF, f"kernel={kernel}"))
        assert relative_difference(gradient, expected) < 2e-3
        assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=1e-3, abs=1e-4)
        # The norm is that of the gradient itself, not of the scaled one.
        assert metrics["grad_norm"] == pytest.approx(float(gradient.double().norm()), rel=1e-5)
        assert metrics["loss_scale"] == 65536
        assert metrics["num_overflows"] == 0
        assert "loss_scale" not in expected_metrics


def test_the_scale_keeps_small_gradients(untied):
    """At advantages of 1e-4 and without a scale, most of the body's gradient is below the smallest
    number of float16."""
    _, expected = metrics_and_gradient(module_of(untied, "model.dtype=float32"), factor=1e-4)
    errors = []
    for value in (1.0, 65536.0):
        module = module_of(untied, HALF)
        module.loss_scale.value = value
        _, gradient = metrics_and_gradient(module, factor=1e-4)
        errors.append(relative_difference(gradient, expected))
    assert errors[0] > 0.03
    assert errors[1] < 3e-3


def test_the_gradient_does_not_depend_on_the_cut(untied):
    expected_metrics, expected = metrics_and_gradient(module_of(untied, HALF), max_tokens=1000)
    for max_tokens in (24, 14):
        metrics, gradient = metrics_and_gradient(module_of(untied, HALF), max_tokens=max_tokens)
        assert metrics["num_micro_batches"] > expected_metrics["num_micro_batches"]
        assert relative_difference(gradient, expected) < 1e-3
        assert metrics["grad_norm"] == pytest.approx(expected_metrics["grad_norm"], rel=1e-3)


def test_another_power_of_2_as_scale_gives_the_same_gradient_within_the_range(untied):
    module = module_of(untied, HALF)
    state = copy.deepcopy(module.state_dict())
    gradients = []
    for value in (2.0**14, 2.0**15):
        module.load_state_dict(state)
        module.loss_scale.value = value
        gradients.append(metrics_and_gradient(module)[1])
    # Smaller ones are subnormal in float16.
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
    """An infinite gradient at a scale of 1 is a bad step, not an overflow."""
    module = module_of(untied, HALF, "trainer.max_bad_steps=2")
    module.loss_scale.value = 2.0
    documents = [dataclasses.replace(d, advantages=1e30 * d.advantages) for d in some_documents()]
    step = make_step(documents, 24, {})
    module.training_step(step, 0)
    assert scale_overflows_and_skipped(module) == (1, 1, 0)
    module.training_step(step, 0)
    assert scale_overflows_and_skipped(module) == (1, 1, 1)
    with pytest.raises(NumericalError):
        module.training_step(step, 0)


def test_a_loss_that_is_not_finite_is_a_bad_step_and_keeps_the_scale(untied):
    module = module_of(untied, HALF)
    documents = [
        dataclasses.replace(d, advantages=math.nan * d.advantages) for d in some_documents()
    ]
    module.training_step(make_step(documents, 24, {}), 0)
    assert scale_overflows_and_skipped(module) == (65536, 0, 1)


def test_the_scale_doubles_after_2000_finite_steps_in_a_row():
    scale = LossScale()
    for _ in range(1999):
        scale.rise()
    assert scale.fall()
    for _ in range(1999):
        scale.rise()
    assert scale.value == 32768
    assert scale.num_overflows == 1
    scale.rise()
    assert scale.value == 65536
    for _ in range(1999):
        scale.rise()
    assert scale.value == 65536
    scale.rise()
    assert scale.value == 131072


def test_a_scale_is_equal_after_it_was_saved_and_loaded():
    scale = LossScale()
    assert scale.fall()
    scale.rise()
    loaded = LossScale()
    assert loaded != scale
    loaded.load_state_dict(scale.state_dict())
    assert loaded == scale


def test_a_gradient_is_clipped_by_the_norm_without_the_scale(untied):
    unclipped_metrics, unclipped = metrics_and_gradient(module_of(untied, HALF))
    norm = unclipped_metrics["grad_norm"]
    module = module_of(untied, HALF, f"optimizer.max_grad_norm={norm / 4}")
    metrics, gradient = metrics_and_gradient(module)
    assert metrics["grad_norm"] == pytest.approx(norm)
    torch.testing.assert_close(gradient, unclipped / 4, rtol=1e-4, atol=1e-9)


@pytest.mark.slow
def test_a_resume_is_bit_equal_after_and_before_overflows(untied, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "pgtoolkit.training.module.LossScale", functools.partial(LossScale, 2.0**25)
    )
    settings = with_model(untied, HALF)
    uninterrupted = tmp_path / "uninterrupted"
    train(config_of(*settings), uninterrupted)
    rows = metrics_of(uninterrupted)
    overflows = [row["num_overflows"] for row in rows]
    assert overflows[0] == 1
    assert overflows[-1] < 5
    for step in (1, 5):
        resumed = copy_as_of(uninterrupted, step, tmp_path / f"from {step}")
        train(config_of(*settings), resumed, resume=True)
        assert metrics_of(resumed) == rows
        assert_equal(checkpoint_of(resumed, 6), checkpoint_of(uninterrupted, 6))


def test_a_sampler_of_another_number_type_has_log_probs_further_from_the_trainers(untied, llama):
    def mean_distance(path: Path, dtype: str, sampler_dtype: str) -> float:
        settings = with_model(path, f"model.dtype={dtype}", f"sampler.dtype={sampler_dtype}")
        module, loader = build(config_of(*settings, "rollout.prompts_per_batch=8"))
        source = loader.source
        documents = [
            dataclasses.replace(source.document(place), on_policy=False)  # of several updates
            for place in range(source.batch_size)
        ]
        sampled = torch.cat([document.sampling_log_probs for document in documents])
        trained = []
        for micro_batch in make_step(documents, 1000, {}).micro_batches:
            trained.append(module.log_probs(micro_batch)[micro_batch.labels >= 0])
        return float((sampled - torch.cat(trained)).abs().mean())

    same = mean_distance(untied, "float16", "auto")
    assert mean_distance(untied, "float16", "float16") == same
    assert mean_distance(untied, "float16", "bfloat16") > 4 * same
    assert mean_distance(untied, "float32", "auto") < same / 20
    of_float16 = mean_distance(llama, "float32", "float16")
    assert mean_distance(llama, "float32", "bfloat16") > 4 * of_float16


class StepOnRank(NamedTuple):
    grad_norm: float
    loss_scale: float
    num_overflows: int
    weights_are_unchanged: bool


def step_on_rank(path: str, parallelism: str, overflows: bool) -> StepOnRank:
    """Take a step on this rank; with `overflows`, the gradient of rank 1 alone is infinite."""
    settings = with_model(
        Path(path), HALF, f"parallelism={parallelism}", "parallelism.data_parallel=2"
    )
    ranks = layout(data_parallel=2)
    module, _ = build(config_of(*settings), layout=ranks)
    (optimizer,), _ = module.configure_optimizers()
    module.optimizers = lambda use_pl_optimizer=True: optimizer
    module.manual_backward = lambda loss: loss.backward()
    documents = some_documents()
    step = make_step(documents, 24, {}, ranks.rank_in("data_parallel"), 2)
    if overflows and ranks.rank == 1:
        scaled = module.scaled
        module.scaled = lambda loss: scaled(loss) * 2.0**40
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    metrics = module.training_step(step, 0)["metrics"]
    unchanged = all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    scale = module.loss_scale
    return StepOnRank(metrics["grad_norm"], scale.value, scale.num_overflows, unchanged)


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(untied, parallelism):
    for step in world(2).run(step_on_rank, str(untied), parallelism, False):
        assert math.isfinite(step.grad_norm)
        assert step[1:] == (65536, 0, False)
    for step in world(2).run(step_on_rank, str(untied), parallelism, True):
        assert not math.isfinite(step.grad_norm)
        assert step[1:] == (32768, 1, True)


def test_gradients_are_scaled_in_place_where_parameters_have_one():
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    parameters[0].grad = torch.tensor([1.0, 2.0, math.inf])
    scale_gradients(parameters, 0.5)
    assert parameters[0].grad.tolist() == [0.5, 1.0, math.inf]
    assert parameters[1].grad is None
