"""The adapters of verl and prime-rl compute the numbers that verl's own code gave, and prime-rl's
formula in loops. Neither package is needed.

test_verl.py and test_prime_rl.py compare with the packages themselves, where they are installed.
"""

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from adapters.padded import LENGTHS, batch, ours, summary
from torch import Tensor

from pgtoolkit import kl
from pgtoolkit.adapters import prime_rl
from pgtoolkit.adapters.verl import MODES, VerlLoss
from pgtoolkit.api import log_prob_loss
from pgtoolkit.batch import StepTotals

CLIP = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}
NARROW = {"clip_ratio_low": 0.01, "clip_ratio_high": 0.015}
DPPO = {"clip_ratio_low": 0.01, "clip_ratio_high": 0.008, "clip_ratio_c": 1.1}
# Family and aggregation, verl's flags, and the `summary` of the loss and gradient that ppo_loss of
# verl 0.9.1 gave in float64, with vanilla, gspo, cispo, sapo, dppo_tv, dppo_kl, dro and gpg.
VERL = [
    ("grpo", "token_mean", {}, (0.1337981107, 0.1778367668, -0.1428827642)),
    (
        "grpo",
        "sample_mean",
        CLIP | {"clip_ratio_c": 1.2},
        (0.1182415874, 0.1601105368, -0.1258796629),
    ),
    (
        "grpo",
        "constant",
        CLIP | {"loss_scale_factor": 5},
        (0.1336307177, 0.1657470457, -0.0767592336),
    ),
    ("gspo", "token_mean", NARROW, (0.133188511, 0.1789057017, -0.1331851965)),
    ("gspo", "sample_mean", NARROW, (0.1152492386, 0.1661225454, -0.1547449143)),
    ("cispo", "token_mean", CLIP, (-0.3049573397, 0.1813586353, -0.1209617174)),
    (
        "sapo",
        "sample_mean",
        {"tau_pos": 1.5, "tau_neg": 2.0},
        (-0.0026344459, 0.1649266097, -0.1429031114),
    ),
    ("dppo", "token_mean", DPPO, (-0.303581533, 0.1602098719, -0.0781227372)),
    (
        "dppo_kl",
        "token_mean",
        {"clip_ratio_low": 1e-3, "clip_ratio_high": 5e-4, "clip_ratio_c": 1.1},
        (-0.3814470495, 0.1647086174, -0.116040942),
    ),
    (
        "kimi",
        "token_mean",
        {"policy_loss": {"dro_beta": 0.3}},
        (-0.2604149023, 0.1807401508, -0.134458147),
    ),
    ("reinforce", "token_mean", {}, (-0.26240045, 0.1789120244, -0.1318083661)),
]
DEFAULTS = {
    "clip_ratio": 0.2,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "policy_loss": {},
}


class Configuration(dict):
    """The part of verl's ActorConfig that a policy loss reads, with its defaults."""

    global_batch_info = property(lambda self: self["global_batch_info"])


@pytest.mark.parametrize(("family", "aggregation", "flags", "expected"), VERL)
def test_our_loss_in_verl_has_the_numbers_of_verls_own_loss(family, aggregation, flags, expected):
    """The step is cut into four micro-batches on two ranks, over which verl averages."""
    new, old, advantages, mask = batch()
    totals = {"batch_num_tokens": sum(LENGTHS), "global_batch_size": len(LENGTHS), "dp_size": 2}
    config = Configuration(DEFAULTS | flags | {"global_batch_info": totals})
    leaf = new.clone().requires_grad_()
    total = 0.0
    for rows in ([0], [1, 2, 3], [4], [5]):
        loss, metrics = VerlLoss(family, aggregation)(
            old[rows],
            leaf[rows],
            advantages[rows, None].expand(-1, old.shape[1]),
            mask[rows],
            MODES[aggregation],
            config,
        )
        (loss / 2).backward()
        total += float(loss.detach()) / 2
        assert all(math.isfinite(value) for value in metrics.values())
    assert summary(total, leaf.grad) == pytest.approx(expected, rel=1e-7)


class LossOutputs(NamedTuple):
    """The result of a loss as prime_rl.trainer.rl.loss declares it."""

    loss: torch.Tensor
    metrics: dict


@pytest.fixture(autouse=True)
def prime_rl_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the module of prime-rl that our loss imports."""
    module = ModuleType("prime_rl.trainer.rl.loss")
    module.LossOutputs = LossOutputs
    for name in ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def prime_rl_step(
    loss: str, weights: Tensor | None = None, reference: Tensor | None = None, **kwargs: Any
) -> tuple[float, Tensor, list[dict]]:
    """Return loss, gradient by the log-probs (B, WIDTH) and each document's metrics, of the step as
    prime-rl adds it up."""
    new, old, advantages, mask = batch()
    leaf = new.clone().requires_grad_()
    total = 0.0
    metrics = []
    for d, length in enumerate(LENGTHS):
        inputs = SimpleNamespace(
            trainer_logprobs=leaf[d, :length],
            inference_logprobs=old[d, :length],
            ref_logprobs=None if reference is None else reference[d, :length],
            advantages=advantages[d].expand(length),
            loss_mask=mask[d, :length],
            loss_weights=None if weights is None else weights[d, :length],
        )
        out = prime_rl.policy_loss(inputs, loss, **kwargs)
        (out.loss / sum(LENGTHS)).backward()
        total += float(out.loss.detach()) / sum(LENGTHS)
        metrics.append(out.metrics)
    return total, leaf.grad, metrics


@pytest.mark.parametrize("kl_tau", [0.0, 0.05])
@pytest.mark.parametrize("weighted", [False, True])
def test_our_dppo_in_prime_rl_has_the_gradient_of_its_default_loss(weighted, kl_tau):
    """In loops: the derivative by a token's log-prob p is w (-A r + 2 kl_tau (p - b)), without its
    first term outside the bounds."""
    new, old, advantages, _ = batch()
    weights = torch.rand(new.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    pull = {"kl": "k2", "kl_coefficient": 2 * kl_tau} if kl_tau else {}
    bounds = {"delta_low": 0.01, "delta_high": 0.008, "ratio_cap": 1e9}
    _, gradient, _ = prime_rl_step("dppo", weights if weighted else None, **bounds, **pull)
    num_masked = 0
    for d, length in enumerate(LENGTHS):
        A = float(advantages[d])
        for t in range(length):
            p = float(new[d, t])
            b = float(old[d, t])
            moved = math.exp(p) - math.exp(b)
            outside = (A > 0 and moved > 0.008) or (A < 0 and moved < -0.01)
            slope = (0.0 if outside else -A * math.exp(p - b)) + 2 * kl_tau * (p - b)
            slope *= float(weights[d, t]) if weighted else 1.0
            assert float(gradient[d, t]) == pytest.approx(
                slope / sum(LENGTHS), rel=1e-10, abs=1e-14
            )
            num_masked += outside
    assert 0 < num_masked < sum(LENGTHS) / 2


def test_in_prime_rl_kl_reference_reference_sets_the_penalty_against_the_reference():
    """Metrics are those of each document."""
    new, old, _, mask = batch()
    reference = old - 0.2
    options = {"kl": "k3", "kl_coefficient": 0.5, "kl_reference": "reference"}
    loss, gradient, metrics = prime_rl_step("grpo", reference=reference, **options)
    exact_loss, exact_gradient = ours(
        "grpo", {}, "token_mean", kl=kl.KL("k3", 0.5), ref_log_probs=reference
    )
    assert loss == pytest.approx(float(exact_loss), rel=1e-12)
    torch.testing.assert_close(gradient, exact_gradient, rtol=1e-10, atol=1e-14)
    mean_ratios = [float(of_document["pgtk/ratio_new_old"]) for of_document in metrics]
    expected = torch.where(mask, (new - old).exp(), 0).sum(1) / mask.sum(1)
    assert mean_ratios == pytest.approx(expected.tolist(), rel=1e-6)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"aggregation": "sample_mean"}, "needs totals of the step that prime-rl does not tell"),
        ({"kl_coefficient": 0.1}, "have no effect without kl"),
        (
            {"kl": "k3", "kl_coefficient": 0.1, "kl_reference": "initial"},
            "kl_reference='initial' is unknown",
        ),
        (
            {"kl": "k3", "kl_coefficient": 0.1, "kl_reference": "reference"},
            "kl needs ref_log_probs",
        ),
        ({"epsilon": 0.1}, "has no epsilon; its parameters are"),
    ],
)
def test_settings_that_prime_rl_has_no_numbers_for_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        prime_rl_step("grpo", **kwargs)


@pytest.mark.parametrize("num_trained", [0, 1, 4])
def test_each_document_has_finite_metrics_in_prime_rl(num_trained):
    numbers = -torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(4) < num_trained
    out = log_prob_loss(
        *numbers,
        torch.zeros(4, dtype=torch.int64),
        mask,
        loss="grpo",
        aggregation="token_mean",
        num_documents=1,
        totals=StepTotals(1, num_trained, int(num_trained == 0)),
        metrics="basic",
    )
    shown = prime_rl._shown(out.metrics, mask)
    assert len(shown) == len(out.metrics) - 3
    assert all(bool(torch.isfinite(value)) for value in shown.values())
    if num_trained == 0:
        assert {float(value) for value in shown.values()} == {0.0}
    else:
        assert float(shown["pgtk/max_advantage"]) == float(numbers[2][mask].max())
