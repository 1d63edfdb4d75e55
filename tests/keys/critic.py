"""Tests of single keys (see `keys`): advantages by a critic, and the critic."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.runs import module_and_loader

from keys import key_test
from keys.small_runs import settings
from pgtoolkit.document import Document
from pgtoolkit.rollouts.gae import gae, whitened


def documents_of_the_first_step(*overrides: str) -> list[Document]:
    """Return those of more than one trained token. The critic's values are all 0 then."""
    _, loader = module_and_loader(*settings("advantage=gae", *overrides))
    return [document for document in next(iter(loader)).documents if document.num_trained > 1]


@key_test("advantage.gamma", "advantage.gae_lambda")
def the_reward_decays_by_gamma_and_by_lambda_towards_the_first_token(key: str):
    """With values of 0, gamma and lambda have the same effect; with others they differ."""
    for decay in (0.5, 1.0):
        decays = {"advantage.gamma": 1.0, "advantage.gae_lambda": 1.0} | {key: decay}
        overrides = [f"{name}={value}" for name, value in decays.items()]
        for document in documents_of_the_first_step("advantage.whiten=false", *overrides):
            expected = document.reward * decay ** (document.num_trained - 1)
            assert float(document.advantages[0]) == pytest.approx(expected, rel=1e-6)
    assert gae([0.0, 1.0], [0.2, 0.5], 0.5, 1.0) != gae([0.0, 1.0], [0.2, 0.5], 1.0, 0.5)


@key_test("advantage.whiten")
def whitened_advantages_are_those_of_the_whole_batch_scaled():
    _, loader = module_and_loader(*settings("advantage=gae", "advantage.whiten=false"))
    plain = [loader.source.document(place).advantages.tolist() for place in range(16)]
    _, loader = module_and_loader(*settings("advantage=gae"))
    white = [loader.source.document(place).advantages.tolist() for place in range(16)]
    for advantages, expected in zip(white, whitened(plain), strict=True):
        assert advantages == pytest.approx(expected, abs=1e-5)
    assert white != plain


@key_test("critic.path")
def the_critic_starts_from_the_policys_weights_or_from_those_of_a_path(tmp_path: Path):
    path = save_with_tokenizer(small_llama(0), tmp_path / "0")
    other = save_with_tokenizer(small_llama(3), tmp_path / "3")
    model = ("model=huggingface", f"model.path={path}", "advantage=gae")
    for critic_path, seed in (("null", 0), (other, 3)):
        module, _ = module_and_loader(*settings(*model, f"critic.path={critic_path}"))
        embeddings = module.critic.body.model.get_input_embeddings().weight
        assert torch.equal(embeddings.float(), small_llama(seed).get_input_embeddings().weight)


@key_test("critic.learning_rate")
def the_first_update_of_the_critic_is_as_large_as_its_learning_rate():
    for rate in (0.01, 0.03):
        module, loader = module_and_loader(
            *settings("advantage=gae", f"critic.learning_rate={rate}", "optimizer.warmup_steps=0")
        )
        metrics = module.training_step(next(iter(loader)), 0)["metrics"]
        assert metrics["critic_learning_rate"] == rate
        bias = module.critic.body.model.get_output_embeddings().bias
        assert abs(bias.item()) == pytest.approx(rate, rel=1e-4)  # the first step of AdamW


@key_test("critic.clip")
def values_that_moved_by_more_than_the_clip_are_clipped():
    """By the second step of a batch all values have moved, by more than 1e-6 and less than 100."""
    fractions = []
    for clip in ("null", 1e-6, 100):
        module, loader = module_and_loader(
            *settings(
                "advantage=gae",
                "critic.learning_rate=0.05",
                f"critic.clip={clip}",
                "optimizer.warmup_steps=0",
            )
        )
        steps = itertools.islice(loader, 2)
        rows = [module.training_step(step, number)["metrics"] for number, step in enumerate(steps)]
        fractions.append(rows[1]["value_clipped_fraction"])
    assert fractions == [0, 1, 0]


@key_test("critic.steps_before_policy")
def the_first_steps_train_the_critic_alone():
    for num_steps in (0, 1, 2):
        module, loader = module_and_loader(
            *settings("advantage=gae", f"critic.steps_before_policy={num_steps}")
        )
        steps = itertools.islice(loader, 3)
        rows = [module.training_step(step, number)["metrics"] for number, step in enumerate(steps)]
        without_loss = [number for number, row in enumerate(rows) if "loss" not in row]
        assert without_loss == [*range(num_steps)]
