"""Our losses inside verl are verl's own: both go through the function that its workers call, with
its data.

A step is cut into micro-batches on several ranks, as verl cuts it: each adds up the gradients of
its micro-batches, and verl averages over ranks.
"""

import math
import os
import subprocess
import sys

import pytest
import torch
from adapters.padded import LENGTHS, WIDTH, batch, ours, summary
from adapters.test_numbers import CLIP, NARROW, VERL

pytest.importorskip("verl", reason="the extra verl")

from adapters.verl_steps import CUT, ONE, step
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask
from verl.workers.config import FSDPActorConfig

from pgtoolkit.adapters import verl as adapter
from pgtoolkit.corrections import SequenceMask
from pgtoolkit.losses.aggregation import AGGREGATIONS

THEIRS = {"grpo": "vanilla", "dppo": "dppo_tv", "kimi": "dro", "reinforce": "gpg"}
"""verl's names of losses that it calls otherwise."""


@pytest.mark.parametrize(("family", "aggregation", "flags", "expected"), VERL, ids=str)
def test_verls_own_loss_with_these_flags_is_ours_however_the_step_is_cut(
    family, aggregation, flags, expected
):
    flags = {"loss_agg_mode": adapter.MODES[aggregation]} | flags
    flags |= flags.pop("policy_loss", {})
    for cut in (ONE, CUT):
        loss, gradient, _ = step(f"pgtk_{family}_{aggregation}", flags, cut)
        verls_loss, verls_gradient, _ = step(THEIRS.get(family, family), flags, cut)
        assert float(loss) == pytest.approx(float(verls_loss), rel=1e-8)
        torch.testing.assert_close(gradient, verls_gradient, rtol=1e-8, atol=1e-14)
        assert summary(loss, gradient) == pytest.approx(expected, rel=1e-7)


def distance(gradient: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative distance of two gradients."""
    return float((gradient - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("theirs", "flags", "mode", "apart"),
    [
        (
            "geo_mean",
            CLIP | {"loss_agg_mode": "seq-mean-token-mean"},
            "pgtk_gmpo_sample_mean",
            1.26,
        ),  # a mean over each micro-batch
        ("sapo", {}, "pgtk_sapo_token_mean", 0.56),  # whatever loss_agg_mode says
    ],
)
def test_where_verl_computes_something_else_the_gradients_differ_by_as_much(
    theirs, flags, mode, apart
):
    _, verls_gradient, _ = step(theirs, flags)
    _, gradient, _ = step(mode, flags)
    assert distance(verls_gradient, gradient) == pytest.approx(apart, abs=0.01)


def test_verls_geometric_mean_in_a_single_micro_batch_is_ours():
    exact = ours("gmpo", {"epsilon_low": 0.1, "epsilon_high": 0.15}, "sample_mean")
    for loss_mode in ("geo_mean", "pgtk_gmpo_sample_mean"):
        loss, gradient, _ = step(loss_mode, CLIP | {"loss_agg_mode": "seq-mean-token-mean"}, ONE)
        assert float(loss) == pytest.approx(float(exact[0]), rel=1e-8)
        torch.testing.assert_close(gradient, exact[1], rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("threshold", [0.01, 0.02])
def test_verl_rejects_the_documents_that_our_mask_by_the_worst_token_rejects(threshold):
    """verl bounds k2, half of the squared log-ratio. Our bounds of the ratio are exp of plus and
    minus the root of twice that threshold."""
    new, old, _, mask = batch()
    kept, _ = compute_rollout_rejection_mask(new - old, mask.double(), "seq_max_k2", threshold)
    bound = math.exp(math.sqrt(2 * threshold))
    correction = SequenceMask(mean="worst", low=1 / bound, high=bound, factor="one")
    _, gradient = ours(
        "reinforce",
        {},
        "token_mean",
        step=(new, new, torch.ones(len(new)), mask),
        correction=correction,
        sampling_log_probs=old,
    )
    assert torch.equal(gradient != 0, kept > 0)
    assert 0 < int((kept > 0).any(1).sum()) < len(new)


@pytest.mark.parametrize(
    ("theirs", "flags", "mode", "apart"),
    [
        ("vanilla", {}, "pgtk_grpo_token_mean", 0.0),
        ("dro", {"dro_beta": 0.3}, "pgtk_kimi_token_mean", 0.0),
        # With a ratio of documents verl multiplies each token's gradient by its own factor; the
        # derivative has the mean of the document's factors.
        ("gspo", NARROW | {"loss_agg_mode": "seq-mean-token-mean"}, "pgtk_gspo_sample_mean", 0.247),
    ],
)
def test_our_loss_has_verls_correction_by_token(theirs, flags, mode, apart):
    factors = 0.5 + torch.rand(
        len(LENGTHS), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    verls_loss, verls_gradient, _ = step(theirs, flags, CUT, factors)
    loss, gradient, _ = step(mode, flags, CUT, factors)
    uncorrected_loss, _, _ = step(mode, flags)
    assert float(verls_loss) == pytest.approx(float(loss), rel=1e-8)
    assert float(loss) != pytest.approx(float(uncorrected_loss), rel=0.01)
    assert distance(verls_gradient, gradient) == pytest.approx(apart, abs=1e-3)


def test_metrics_are_means_over_the_micro_batchs_documents():
    new, old, _, mask = batch()
    _, _, metrics = step("pgtk_grpo_token_mean", CLIP, ONE)
    ratio = (new - old).exp()
    clipped = mask & ((ratio < 0.9) | (ratio > 1.15))
    expected = (clipped.sum(1) / mask.sum(1)).mean()
    assert metrics["pgtk/clipped_ratio_fraction"].aggregate() == pytest.approx(float(expected))
    assert {name for name in metrics if name.startswith("pgtk/")} == {
        f"pgtk/{name}" for name in adapter.METRICS
    }


@pytest.mark.parametrize(
    ("mode", "flags", "messages"),
    [
        (
            "pgtk_grpo_prompt_mean",
            {},
            ["prompt_mean needs each document's prompt: verl does not tell"],
        ),
        (
            "pgtk_gspo_constant",
            {"clip_ratio": 0.3, "clip_ratio_c": 2.0},
            [
                "actor.loss_agg_mode=token-mean needs seq-mean-token-sum-norm: it means constant",
                "actor.loss_scale_factor=null needs a number, the divisor",
                "actor.clip_ratio=0.3 has no effect: gspo reads clip_ratio_high, clip_ratio_low",
                "actor.clip_ratio_c=2.0 has no effect",
            ],
        ),
    ],
)
def test_settings_that_verl_and_we_both_have_or_that_verl_lacks_are_refused(mode, flags, messages):
    with pytest.raises(ValueError, match=f"policy_loss.loss_mode={mode}\n") as raised:
        step(mode, flags)
    assert [
        line
        for line, message in zip(str(raised.value).split("\n")[1:], messages, strict=True)
        if message not in line
    ] == []


def test_without_the_totals_of_the_step_there_is_no_loss():
    new, old, advantages, mask = batch()
    config = FSDPActorConfig(ppo_micro_batch_size_per_gpu=1, rollout_n=2)
    loss = adapter.VerlLoss("grpo", "token_mean")
    with pytest.raises(
        ValueError, match="batch_num_tokens needs the number of the whole mini-batch"
    ):
        loss(old, new, advantages[:, None].expand_as(old), mask, config=config)


def test_a_side_without_a_bound_of_its_own_has_the_common_one():
    loss, _, _ = step(
        "pgtk_gspo_token_mean",
        {"clip_ratio": 0.01, "clip_ratio_low": None, "clip_ratio_high": None},
    )
    expected, _, _ = step("pgtk_gspo_token_mean", {"clip_ratio_low": 0.01, "clip_ratio_high": 0.01})
    other_loss, _, _ = step("pgtk_gspo_token_mean")
    assert float(loss) == float(expected) != float(other_loss)


def test_verl_registers_our_losses_by_its_environment_variable():
    script = (
        "import verl\nfrom verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY\n"
        "print(len([name for name in POLICY_LOSS_REGISTRY if name.startswith('pgtk_')]))"
    )
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "pgtoolkit.adapters.verl"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    families = len(adapter.PARAMETERS) + 2  # tpo and lpo, which are refused with the reason
    assert done.stdout.split() == [str(families * len(AGGREGATIONS))], done.stderr


def soft_clip(log_ratio, advantages, ratio, *, softness=0.3):
    far = (log_ratio.detach().abs() > 0.1).to(log_ratio)
    losses = -softness * torch.tanh((ratio(log_ratio) - 1) / softness) * advantages
    return losses, {"far": far}


def above_the_mean(log_ratio, advantages, documents):
    mean = documents.spread(documents.mean(log_ratio.detach()))
    return -documents.mean(advantages * log_ratio.exp() * (log_ratio.detach() >= mean))


def by_loops(name):
    """Return the loss of `batch` by plain loops, and its gradient by the log-probs.

    soft_clip has the mean over tokens, above_the_mean the mean over documents.
    """
    new, old, advantages, _ = batch()
    leaf = new.clone().requires_grad_()
    total = 0.0
    for row, length in enumerate(LENGTHS):
        ratios = [leaf[row, t] - old[row, t] for t in range(length)]
        if name == "soft_clip":
            for ratio in ratios:
                tanh = torch.tanh((ratio.exp() - 1) / 0.2)
                total -= 0.2 * tanh * advantages[row] / sum(LENGTHS)
            continue
        mean = sum(float(ratio.detach()) for ratio in ratios) / length
        for ratio in ratios:
            if float(ratio.detach()) >= mean:
                total -= advantages[row] * ratio.exp() / (length * len(LENGTHS))
    total.backward()
    return total.detach(), leaf.grad


@pytest.mark.parametrize(
    ("function", "parameters", "aggregation"),
    [(soft_clip, {"softness": 0.2}, "token_mean"), (above_the_mean, {}, "sample_mean")],
)
def test_a_function_is_that_of_plain_loops_however_the_step_is_cut(
    function, parameters, aggregation
):
    adapter.register_function(function, **parameters)
    exact, gradient_of_loops = by_loops(function.__name__)
    for cut in (ONE, CUT):
        flags = {"loss_agg_mode": adapter.MODES[aggregation]}
        loss, gradient, metrics = step(f"pgtk_{function.__name__}_{aggregation}", flags, cut)
        assert float(loss) == pytest.approx(float(exact), rel=1e-12)
        torch.testing.assert_close(gradient, gradient_of_loops, rtol=1e-10, atol=1e-14)
        assert ("pgtk/far" in metrics) == (function is soft_clip)


def of_groups(log_probs, documents, groups):
    return groups.mean(documents.mean(log_probs))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            of_groups,
            "loss=of_groups needs each document's prompt: verl does not tell a policy loss",
        ),
        (lambda log_ratio, step: log_ratio - step.mean(log_ratio), "needs the whole step: verl"),
        (lambda log_ratio, rewards: -log_ratio * rewards, "asks for rewards, which verl does not"),
    ],
)
def test_what_verl_does_not_tell_a_function_is_refused(function, message):
    adapter.register_function(function)
    with pytest.raises(ValueError, match=message):
        step(f"pgtk_{function.__name__}_sample_mean", {"loss_agg_mode": "seq-mean-token-mean"})
    with pytest.raises(ValueError, match="loss=tpo needs each document's prompt: verl does not"):
        step("pgtk_tpo_sample_mean", {"loss_agg_mode": "seq-mean-token-mean"})
