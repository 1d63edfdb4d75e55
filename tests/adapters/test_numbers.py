"""The adapters of verl and prime-rl without these packages: numbers that their own code has given, and its formulas.

test_verl.py and test_prime_rl.py compare with the packages themselves, where they are installed.
"""

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from adapters.padded import LENGTHS, batch

from pgtoolkit.adapters import prime_rl
from pgtoolkit.adapters.verl import VerlLoss

CLIP = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}
NARROW = {"clip_ratio_low": 0.01, "clip_ratio_high": 0.015}
DPPO = {"clip_ratio_low": 0.01, "clip_ratio_high": 0.008, "clip_ratio_c": 1.1}
MEAN, SUM = "seq-mean-token-mean", "seq-mean-token-sum-norm"
# Family and aggregation, verl's flags; loss, norm of the gradient by the log-probs, and the sum of the gradient times
# sin(1), sin(2), ..., as verl 0.9.1's ppo_loss gave them in float64, with vanilla, gspo, cispo, sapo, dppo_tv, dro and
# gpg.
VERL = [
    ("grpo", "token_mean", {}, (0.1337981107, 0.1778367668, -0.1428827642)),
    ("grpo", "sample_mean", CLIP | {"clip_ratio_c": 1.2}, (0.1182415874, 0.1601105368, -0.1258796629)),
    ("grpo", "constant", CLIP | {"loss_scale_factor": 5}, (0.1336307177, 0.1657470457, -0.0767592336)),
    ("gspo", "token_mean", NARROW, (0.133188511, 0.1789057017, -0.1331851965)),
    ("gspo", "sample_mean", NARROW, (0.1152492386, 0.1661225454, -0.1547449143)),
    ("cispo", "token_mean", CLIP, (-0.3049573397, 0.1813586353, -0.1209617174)),
    ("sapo", "sample_mean", {"tau_pos": 1.5, "tau_neg": 2.0}, (-0.0026344459, 0.1649266097, -0.1429031114)),
    ("dppo", "token_mean", DPPO, (-0.303581533, 0.1602098719, -0.0781227372)),
    ("kimi", "token_mean", {"policy_loss": {"dro_beta": 0.3}}, (-0.2604149023, 0.1807401508, -0.134458147)),
    ("reinforce", "token_mean", {}, (-0.26240045, 0.1789120244, -0.1318083661)),
]
DEFAULTS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
DEFAULTS |= {"tau_pos": 1.0, "tau_neg": 1.05, "policy_loss": {}}


class Configuration(dict):
    """The part of verl's ActorConfig that a policy loss reads, with its defaults."""

    global_batch_info = property(lambda self: self["global_batch_info"])


@pytest.mark.parametrize(("family", "aggregation", "flags", "expected"), VERL)
def test_verls_numbers(family, aggregation, flags, expected):
    """A step cut into four micro-batches on two ranks, over which verl averages."""
    new, old, advantages, mask = batch()
    totals = {"batch_num_tokens": sum(LENGTHS), "global_batch_size": len(LENGTHS), "dp_size": 2}
    config = Configuration(DEFAULTS | flags | {"global_batch_info": totals})
    mode = {"sample_mean": MEAN, "constant": SUM}.get(aggregation, "token-mean")
    leaf, total = new.clone().requires_grad_(), 0.0
    for rows in ([0], [1, 2, 3], [4], [5]):
        vectors = old[rows], leaf[rows], advantages[rows, None].expand(-1, old.shape[1]), mask[rows]
        loss, metrics = VerlLoss(family, aggregation)(*vectors, mode, config)
        (loss / 2).backward()
        total += float(loss.detach()) / 2
        assert all(math.isfinite(value) for value in metrics.values())
    pattern = torch.arange(1, old.numel() + 1, dtype=torch.float64).reshape(old.shape).sin()
    found = total, float(leaf.grad.norm()), float((leaf.grad * pattern).sum())
    assert found == pytest.approx(expected, rel=1e-7)


class LossOutputs(NamedTuple):
    """As prime_rl.trainer.rl.loss has it."""

    loss: torch.Tensor
    metrics: dict


@pytest.mark.parametrize("kl_tau", [0.0, 0.05])
@pytest.mark.parametrize("weighted", [False, True])
def test_prime_rls_formula(weighted, kl_tau, monkeypatch):
    """Its default by loops: a token's derivative is -w A r within the bounds, else 0, beside w 2 kl_tau (p - b)."""
    module = ModuleType("prime_rl.trainer.rl.loss")
    module.LossOutputs = LossOutputs
    for name in ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    new, old, advantages, mask = batch()
    weights = torch.rand(new.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    leaf, masked = new.clone().requires_grad_(), 0
    pull = {"kl": "k2", "kl_coefficient": 2 * kl_tau} if kl_tau else {}
    for d, length in enumerate(LENGTHS):
        inputs = SimpleNamespace(
            trainer_logprobs=leaf[d, :length],
            inference_logprobs=old[d, :length],
            ref_logprobs=None,
            advantages=advantages[d].expand(length),
            loss_mask=mask[d, :length],
            loss_weights=weights[d, :length] if weighted else None,
        )
        out = prime_rl.policy_loss(inputs, "dppo", delta_low=0.01, delta_high=0.008, ratio_cap=1e9, **pull)
        (out.loss / sum(LENGTHS)).backward()
        for t in range(length):
            p, b, A = float(new[d, t]), float(old[d, t]), float(advantages[d])
            moved = math.exp(p) - math.exp(b)
            outside = (A > 0 and moved > 0.008) or (A < 0 and moved < -0.01)
            slope = (0.0 if outside else -A * math.exp(p - b)) + 2 * kl_tau * (p - b)
            slope *= float(weights[d, t]) if weighted else 1.0
            assert float(leaf.grad[d, t]) == pytest.approx(slope / sum(LENGTHS), rel=1e-10, abs=1e-14)
            masked += outside
    assert 0 < masked < sum(LENGTHS) / 2
