"""Rows of `config/test_keys.py`: advantages by a critic, and the critic."""

from __future__ import annotations

import itertools

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.runs import module_and_loader

from keys import key, settings
from pgtoolkit.rollouts.gae import gae, whitened

GAE = ("advantage=gae", "critic.learning_rate=0.05")


def first_documents(*overrides: str):
    """Of the first batch, when every value is 0."""
    _, loader = module_and_loader(*settings("advantage=gae", *overrides))
    return [document for document in next(iter(loader)).documents if document.num_trained > 1]


@key("advantage.gamma", "advantage.gae_lambda")
def decay(key):
    """What the last token's reward is worth at the first: with values of 0 both come to the
    same."""
    for value in (0.5, 1.0):
        chosen = {"advantage.gamma": 1.0, "advantage.gae_lambda": 1.0} | {key: value}
        typed = [f"{name}={x}" for name, x in chosen.items()]
        for document in first_documents("advantage.whiten=false", *typed):
            expected = document.reward * value ** (document.num_trained - 1)
            assert float(document.advantages[0]) == pytest.approx(expected, rel=1e-6)
    assert gae([0.0, 1.0], [0.2, 0.5], 0.5, 1.0) != gae([0.0, 1.0], [0.2, 0.5], 1.0, 0.5)


@key("advantage.whiten")
def whiten():
    _, loader = module_and_loader(*settings("advantage=gae", "advantage.whiten=false"))
    plain = [loader.source.document(place).advantages.tolist() for place in range(16)]
    _, loader = module_and_loader(*settings("advantage=gae"))
    white = [loader.source.document(place).advantages.tolist() for place in range(16)]
    for found, expected in zip(white, whitened(plain), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    assert white != plain


@key("critic.path")
def path(tmp_path):
    path, other = (save_with_tokenizer(small_llama(seed), tmp_path / str(seed)) for seed in (0, 3))
    model = ("model=huggingface", f"model.path={path}", "advantage=gae")
    for value, seed in (("null", 0), (other, 3)):
        module, _ = module_and_loader(*settings(*model, f"critic.path={value}"))
        found = module.critic.body.model.get_input_embeddings().weight
        assert torch.equal(found.float(), small_llama(seed).get_input_embeddings().weight)


@key("critic.learning_rate")
def learning_rate():
    for value in (0.01, 0.03):
        module, loader = module_and_loader(
            *settings("advantage=gae", f"critic.learning_rate={value}", "optimizer.warmup_steps=0")
        )
        metrics = module.training_step(next(iter(loader)), 0)["metrics"]
        assert metrics["critic_learning_rate"] == value
        bias = module.critic.body.model.get_output_embeddings().bias
        assert abs(bias.item()) == pytest.approx(value, rel=1e-4)  # the first step of AdamW


@key("critic.clip")
def clip():
    """By the second step of a batch values have moved by more than a narrow bound, and by less than
    a wide one."""
    shares = []
    for value in ("null", 1e-6, 100):
        module, loader = module_and_loader(
            *settings(*GAE, f"critic.clip={value}", "optimizer.warmup_steps=0")
        )
        steps = itertools.islice(loader, 2)
        rows = [module.training_step(step, number)["metrics"] for number, step in enumerate(steps)]
        shares.append(rows[1]["value_clipped_fraction"])
    assert shares == [0, 1, 0]


@key("critic.steps_before_policy")
def steps_before_policy():
    for value in (0, 1, 2):
        module, loader = module_and_loader(
            *settings("advantage=gae", f"critic.steps_before_policy={value}")
        )
        rows = [
            module.training_step(step, n)["metrics"]
            for n, step in enumerate(itertools.islice(loader, 3))
        ]
        assert [n for n, row in enumerate(rows) if "loss" not in row] == [*range(value)]
