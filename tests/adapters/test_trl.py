"""TRL's trainer with its own loss against the same with ours: the weights after real steps, sampling included.

Two updates are made with each batch, so that ratios leave 1 and the clips act; an update takes two micro-batches.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="the extra trl")

from adapters import trl_runs
from builders.models import small_llama

from pgtoolkit import corrections, families
from pgtoolkit.adapters.trl import CORRECTIONS, PolicyGradientTrainer

TWICE = {"num_iterations": 2, "max_steps": 4, "learning_rate": 2.0}
NARROW = {"epsilon": 0.01, "epsilon_high": 0.015}
GSPO = families.Gspo(epsilon_low=0.01, epsilon_high=0.015)
SAPO = families.Sapo(temperature_positive=1.5, temperature_negative=2.0)
VESPO = families.Vespo()
SEQUENCE = {"importance_sampling_level": "sequence"}
EQUAL = [
    # (TRL's flags, our trainer's keywords, flags of both)
    ({"loss_type": "grpo"}, {"loss": "grpo", "aggregation": "sample_mean"}, {}),
    ({"loss_type": "dapo"}, {"loss": "grpo", "aggregation": "token_mean"}, {}),
    ({"loss_type": "dr_grpo"}, {"loss": "grpo", "aggregation": "constant", "divisor": 8}, {}),
    (
        {"epsilon_high": 0.28, "delta": 1.4},
        {"loss": families.Grpo(epsilon_high=0.28, dual_clip=1.4), "aggregation": "token_mean"},
        {},
    ),
    ({"loss_type": "grpo"} | SEQUENCE | NARROW, {"loss": GSPO, "aggregation": "sample_mean"}, {}),
    ({"loss_type": "dapo"} | SEQUENCE | NARROW, {"loss": GSPO, "aggregation": "token_mean"}, {}),
    ({"loss_type": "luspo"} | SEQUENCE | NARROW, {"loss": GSPO, "aggregation": "constant", "divisor": 1}, {}),
    (
        {"loss_type": "cispo", "epsilon_high": 1.2},
        {"loss": families.Cispo(epsilon_high=0.2), "aggregation": "token_mean"},
        {},
    ),
    (
        {"loss_type": "sapo", "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.0},
        {"loss": SAPO, "aggregation": "sample_mean"},
        {},
    ),
    ({"loss_type": "vespo"}, {"loss": "vespo", "aggregation": "token_mean"}, {}),
    ({}, {"loss": "grpo", "aggregation": "token_mean"}, {"beta": 0.3}),
    ({}, {"loss": "grpo", "aggregation": "token_mean"}, {"beta": 0.3, "use_bias_correction_kl": False}),
    (
        {"loss_type": "grpo"},
        {"loss": "grpo", "aggregation": "sample_mean"},
        {"steps_per_generation": 4, "mask_truncated_completions": True, "scale_rewards": "none"},
    ),
    ({}, {"loss": "grpo", "aggregation": "token_mean"}, {"gradient_accumulation_steps": 1, "entropy_coef": 0.3}),
]
APART = [
    # (TRL's flags, our trainer's keywords, flags of both, difference of the weights' way)
    ({"loss_type": "bnpo"}, {"loss": "grpo", "aggregation": "token_mean"}, {}, 0),
    ({"loss_type": "dapo"}, {"loss": "grpo", "aggregation": "token_mean"}, {"steps_per_generation": 4}, 0),
    ({}, {"loss": "grpo", "aggregation": "token_mean"}, {"entropy_coef": 0.3}, 0),
    (SEQUENCE | NARROW, {"loss": GSPO, "aggregation": "token_mean"}, {"beta": 0.3}, 0),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The small model, saved: TRL reads the reference again."""
    folder = tmp_path_factory.mktemp("llama")
    small_llama().save_pretrained(folder)
    return str(folder)


def both(flags, ours, common, folder):
    """(weights and log with TRL's own loss, the same with ours)."""
    return (
        trl_runs.trained(trl_runs.trainer(folder, *one))
        for one in ((None, TWICE | common | flags), (ours, TWICE | common))
    )


@pytest.mark.parametrize(("flags", "ours", "common"), EQUAL, ids=lambda one: str(one))
def test_trl_with_these_flags_is_ours(flags, ours, common, folder):
    (exact, their_log), (found, log) = both(flags, ours, common, folder)
    start = torch.cat([x.detach().flatten() for x in small_llama().parameters()])
    assert float((exact - start).abs().max()) > 0.1
    torch.testing.assert_close(found, exact, rtol=0, atol=2e-6)
    for theirs, row in zip(their_log[:-1], log[:-1], strict=True):
        for name in theirs.keys() - {"step_time", "cispo_clip_ratio", "vespo/phi_seq_mean"}:
            assert row[name] == pytest.approx(theirs[name], abs=1e-5), name


def test_apart(folder):
    for flags, ours, common, _ in APART:
        (exact, _), (found, _) = both(flags, ours, common, folder)
        start = torch.cat([x.detach().flatten() for x in small_llama().parameters()])
        print(flags, common, float((found - exact).norm() / (exact - start).norm()))
