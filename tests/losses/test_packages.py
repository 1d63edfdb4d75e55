"""Losses of other packages, where they are installed, against ours: the flags of docs/losses.md make them equal.

TRL's are those of its own `_compute_loss`, in float64 on log-probs that are given, in one piece on one process.
"""

from types import SimpleNamespace

import pytest
import torch
from builders.padded import WIDTH, batch, ours

CLIP = {"epsilon_low": 0.1, "epsilon_high": 0.15}
NARROW = {"epsilon_low": 0.01, "epsilon_high": 0.015}
SAPO = {"temperature_positive": 1.5, "temperature_negative": 2.0}
TRL = [
    # (TRL's flags, our loss with its parameters, our aggregation)
    ({"loss_type": "grpo"}, "grpo", CLIP, ("sample_mean",)),
    ({"loss_type": "dapo"}, "grpo", CLIP, ("token_mean",)),
    ({"loss_type": "bnpo"}, "grpo", CLIP, ("token_mean",)),
    ({"loss_type": "dr_grpo"}, "grpo", CLIP, ("constant", WIDTH)),
    ({"loss_type": "dapo", "delta": 1.3}, "grpo", CLIP | {"dual_clip": 1.3}, ("token_mean",)),
    ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, "gspo", NARROW, ("sample_mean",)),
    ({"loss_type": "dapo", "importance_sampling_level": "sequence"}, "gspo", NARROW, ("token_mean",)),
    ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, "gspo", NARROW, ("constant", 1)),
    ({"loss_type": "cispo", "epsilon_high": 1.15}, "cispo", {"epsilon_high": 0.15}, ("token_mean",)),
    ({"loss_type": "sapo"}, "sapo", SAPO, ("sample_mean",)),
    ({"loss_type": "vespo"}, "vespo", {}, ("token_mean",)),
]


@pytest.fixture
def trl_loss():
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer

    def compute(loss_type, importance_sampling_level="token", delta=None, epsilon_low=None, epsilon_high=None):
        new, old, advantages, mask = batch()
        leaf = new.clone().requires_grad_()
        accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
        vespo = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
        sapo = {"sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.0}
        args = SimpleNamespace(delta=delta, steps_per_generation=1, use_bias_correction_kl=False, **vespo, **sapo)

        class Logged(dict):
            def __missing__(self, name):
                return self.setdefault(name, [])

        stands_in = SimpleNamespace(
            args=args,
            accelerator=accelerator,
            loss_type=loss_type,
            importance_sampling_level=importance_sampling_level,
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
            max_completion_length=WIDTH,
            beta=0.0,
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_vllm=False,
            vllm_importance_sampling_correction=False,
            current_gradient_accumulation_steps=1,
            model=SimpleNamespace(training=True),
            get_gamma_weights=trainer.get_gamma_weights,
            _entropy_bonus_enabled=False,
            _metrics={"train": Logged()},
            _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, torch.zeros_like(leaf), None),
        )
        ids = torch.zeros(mask.shape, dtype=torch.int64)
        inputs = {"prompt_ids": ids[:, :1], "prompt_mask": mask.long()[:, :1], "completion_ids": ids}
        inputs |= {"completion_mask": mask.long(), "advantages": advantages, "old_per_token_logps": old}
        loss = trainer._compute_loss(stands_in, None, inputs | {"num_items_in_batch": mask.sum()})
        loss.backward()
        return loss.detach(), leaf.grad

    return compute


@pytest.mark.parametrize(("flags", "loss", "parameters", "aggregation"), TRL, ids=lambda one: str(one))
def test_trl_with_these_flags_is_ours(trl_loss, flags, loss, parameters, aggregation):
    clip = {name: value for name, value in parameters.items() if name.startswith("epsilon")}
    found, gradient = trl_loss(**(clip | flags))
    expected, exact = ours(loss, parameters, *aggregation)
    assert float(found) == pytest.approx(float(expected), rel=1e-12)
    torch.testing.assert_close(gradient, exact, rtol=1e-10, atol=1e-14)
    assert (exact != 0).any()
