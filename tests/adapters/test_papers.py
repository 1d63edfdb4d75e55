"""Every experiment that a paper describes, against TRL's and verl's own code with the flags that docs/papers.md names.

Both compute the loss of the same tensors, (6, 9) in float64, one micro-batch that is the whole step; loss and gradient.
What is compared is the loss of `pgtk experiment=NAME`, from its configuration; advantages are the same on all sides.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from builders.padded import LENGTHS, WIDTH, batch, ours
from builders.runs import config_of
from omegaconf import OmegaConf
from torch import nn

from pgtoolkit.losses.family import clamped
from pgtoolkit.training.loss import loss_of

SEQUENCE = {"importance_sampling_level": "sequence"}
BOUNDS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
NO_DUAL_CLIP = {"clip_ratio_c": 1e6}
NARROW = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
BY_DOCUMENT, SUM = {"loss_agg_mode": "seq-mean-token-mean"}, {"loss_agg_mode": "seq-mean-token-sum"}
L = 7
"""max_completion_length of experiment=dr_grpo without other settings, which is its divisor."""
PAPERS = {
    # experiment: (TRL's flags, verl's loss_mode and flags); None where they have none
    "grpo": (
        {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.04, "use_bias_correction_kl": False},
        (
            "vanilla",
            BOUNDS
            | NO_DUAL_CLIP
            | BY_DOCUMENT
            | {"use_kl_loss": True, "kl_loss_coef": 0.04, "kl_loss_type": "low_var_kl"},
        ),
    ),
    "dapo": (
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
        ("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28} | NO_DUAL_CLIP),
    ),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "epsilon": 0.2, "max_completion_length": L},
        (
            "vanilla",
            BOUNDS | NO_DUAL_CLIP | {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": L},
        ),
    ),
    "gspo_paper": (
        SEQUENCE | {"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4},
        ("gspo", NARROW | BY_DOCUMENT),
    ),
    "luspo": (SEQUENCE | {"loss_type": "luspo", "epsilon": 3e-4, "epsilon_high": 4e-4}, ("gspo", NARROW | SUM)),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 5.0},
        ("cispo", {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0}),
    ),
    "sapo": (
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
        ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05} | BY_DOCUMENT),
    ),
    "gmpo": (None, ("geo_mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4} | BY_DOCUMENT)),
    "dppo": (None, ("dppo_tv", BOUNDS | {"clip_ratio_c": 20.0})),
    "vespo": ({"loss_type": "vespo"}, None),
    "kimi": (None, ("dro", {"dro_beta": 0.1})),
    "icepop": (
        {
            "loss_type": "grpo",
            "epsilon": 0.2,
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_min": 0.5,
            "vllm_importance_sampling_clip_max": 5.0,
        },
        None,
    ),
    "reinforce": (None, ("gpg", SUM)),
    "rloo": (None, ("vanilla", BOUNDS | NO_DUAL_CLIP | SUM)),
}


def sampled():
    """(log-probs of the sampler, of a reference), (6, 9), some of them beyond the bounds of the masks."""
    draw = torch.Generator().manual_seed(8)
    old = batch()[1]
    return [old + scale * torch.randn(old.shape, generator=draw, dtype=torch.float64) for scale in (0.6, 0.3)]


def of_experiment(name):
    """(loss, gradient) by the configuration of the experiment."""
    config = OmegaConf.to_object(config_of(f"experiment={name}"))
    loss, (sampling, reference) = loss_of(config), sampled()
    given = {"correction": loss.correction, "kl": loss.kl}
    given |= {"sampling_log_probs": sampling} if loss.correction is not None else {}
    given |= {"ref_log_probs": reference} if loss.kl is not None else {}
    return ours(loss.family, {}, loss.aggregation.name, config.aggregation.divisor, **given)


@pytest.mark.parametrize("name", [name for name, (flags, _) in PAPERS.items() if flags is not None])
def test_trl_with_these_flags_is_the_experiment(name):
    pytest.importorskip("trl", reason="the extra trl")
    found, exact = by_trl(PAPERS[name][0]), of_experiment(name)
    # The temperatures of its `sapo` are float32.
    same(found, exact, 1e-6 if name == "sapo" else 1e-12)


@pytest.mark.parametrize("name", [name for name, (_, flags) in PAPERS.items() if flags is not None])
def test_verl_with_these_flags_is_the_experiment(name):
    pytest.importorskip("verl", reason="the extra verl")
    from adapters.verl_steps import ONE, step

    mode, flags = PAPERS[name][1]
    found, exact = step(mode, flags, ONE, reference=sampled()[1]), of_experiment(name)
    same(found[:2], exact, 1e-7)  # verl adds 1e-8 to a document's length


def same(found, exact, tolerance):
    assert float(found[0]) == pytest.approx(float(exact[0]), rel=tolerance)
    torch.testing.assert_close(found[1], exact[1], rtol=tolerance, atol=1e-13)
    assert (exact[1] != 0).any()


def by_trl(flags):
    """(loss, gradient by the log-probs) of TRL's own `_compute_loss`, to which only the log-probs are given."""
    import tempfile

    from accelerate import Accelerator
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(tempfile.mkdtemp(), report_to=[], bf16=False, use_cpu=True, **flags)
    new, old, advantages, mask = batch()
    sampling, reference = sampled()
    leaf = new.clone().requires_grad_()
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    names = "loss_type", "importance_sampling_level", "beta", "off_policy_mask_threshold", "top_entropy_quantile"
    vars(trainer).update({name: getattr(args, name) for name in (*names, "max_completion_length")})
    trainer.args, trainer.model, trainer.accelerator = args, nn.Identity().train(), Accelerator(cpu=True)
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer.use_vllm = "vllm_importance_sampling_mode" in flags
    trainer.vllm_importance_sampling_correction = True
    trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = False
    trainer.current_gradient_accumulation_steps = args.steps_per_generation = 1
    trainer._metrics = {"train": defaultdict(list)}
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, torch.zeros_like(leaf), None)
    ids = torch.ones(len(LENGTHS), WIDTH, dtype=torch.int64)
    inputs = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask.long()}
    inputs |= {"advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": reference}
    inputs["num_items_in_batch"] = mask.sum()
    if trainer.use_vllm:  # as TRL makes it where it samples, which tests/adapters/test_trl.py has it do
        ratio = clamped(old - sampling).exp()
        low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
        inputs["importance_sampling_ratio"] = ratio.where((ratio >= low) & (ratio <= high), 0.0)
    loss = trainer._compute_loss(None, inputs)
    loss.backward()
    return loss.detach(), leaf.grad
