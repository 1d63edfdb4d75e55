"""Tests of single keys (see `keys`): the penalty against a reference, and the policy's entropy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.runs import module_and_loader

from keys import key_test
from keys.small_runs import labels_of, loss_as_specified, rows_file, settings, some_documents
from pgtoolkit.document import Document
from pgtoolkit.losses.kl import KINDS
from pgtoolkit.rollouts.steps import make_step

RECORDED_LOG_PROBS = [0, 0, -1, -1, -1]
"""Reference log-probs of each row of a rollouts file."""


def documents_with_reference() -> list[Document]:
    """Return documents whose reference log-probs are 0.4 above or below the old ones, in turn."""
    documents = []
    for number, document in enumerate(some_documents()):
        distance = 0.4 if number % 2 else -0.4
        ref_log_probs = document.old_log_probs + distance
        documents.append(replace(document, ref_log_probs=ref_log_probs))
    return documents


def loss_against_recorded_reference(folder: Path, *overrides: str, **choices: Any) -> float:
    """Return the loss on documents that bring reference log-probs, once it equals the
    specification."""
    documents = documents_with_reference()
    labels = labels_of(documents)
    trained = torch.cat([document.ref_log_probs for document in documents])
    ref_log_probs = torch.zeros(len(labels)).masked_scatter(labels >= 0, trained)
    path = rows_file(folder, ref_log_probs=RECORDED_LOG_PROBS)
    recorded = ["rollout=recorded", "kl.reference=recorded", f"rollout.path={path}"]
    return loss_as_specified(
        [*recorded, *overrides], documents, ref_log_probs=ref_log_probs, **choices
    )


@key_test("kl.kind")
def each_kind_of_kl_gives_the_loss_of_the_specification(tmp_path: Path):
    """The kinds over the whole vocabulary are in tests/training/test_reference.py."""
    losses = [loss_as_specified(["kl=none"])]
    for kind in KINDS:
        losses.append(
            loss_against_recorded_reference(tmp_path, f"kl={kind}", kl=kind, kl_coefficient=0.04)
        )
    assert len({round(loss, 8) for loss in losses}) == 5


@key_test("kl.coefficient")
def the_loss_grows_linearly_with_the_coefficient_of_the_kl(tmp_path: Path):
    losses = []
    for value in (0.1, 0.5, 0.9):
        overrides = ("kl=k3", f"kl.coefficient={value}")
        losses.append(
            loss_against_recorded_reference(tmp_path, *overrides, kl="k3", kl_coefficient=value)
        )
    assert losses[2] - losses[1] == pytest.approx(losses[1] - losses[0], rel=1e-9)
    assert losses[1] - losses[0] > 1e-3


@key_test("kl.reference")
def the_reference_is_the_initial_model_another_one_or_recorded(tmp_path: Path):
    """At the start of a run the policy has no distance from the initial model."""
    path = save_with_tokenizer(small_llama(0), tmp_path / "0")
    other = save_with_tokenizer(small_llama(1), tmp_path / "1")
    file = rows_file(tmp_path, ref_log_probs=RECORDED_LOG_PROBS)
    recorded = ("rollout=recorded", f"rollout.path={file}")
    step = make_step(documents_with_reference(), 1000, {})

    def distance(reference: str, *overrides: str) -> float:
        model = ("model=huggingface", f"model.path={path}")
        module, _ = module_and_loader(
            *settings(*model, "kl=k3", f"kl.reference={reference}", *overrides)
        )
        return module.training_step(step, 0)["metrics"]["kl_ref"]

    from_other = distance(str(other))
    from_recorded = distance("recorded", *recorded)
    assert distance("initial") == 0
    assert from_other > 1e-4
    assert from_recorded > 0.05
    assert from_other != from_recorded


@key_test("kl.reference_prompt")
def the_reference_reads_another_prompt():
    """The initial weights then differ from the policy, which has the same weights."""
    distances = []
    for value in ("null", "'{prompt}{answer}='", "'{answer}={prompt}'"):
        module, loader = module_and_loader(*settings("kl=k3", f"kl.reference_prompt={value}"))
        distances.append(module.training_step(next(iter(loader)), 0)["metrics"]["kl_ref"])
    assert distances[0] == 0
    assert min(distances[1:]) > 1e-6
    assert distances[1] != distances[2]


@key_test("kl.update_every", "kl.update_rate")
def the_reference_moves_towards_the_policy_by_the_rate_at_every_nth_update():
    """Compares the policy's distance from the reference before the third update."""

    def third_distance(*overrides: str) -> float:
        module, loader = module_and_loader(*settings("kl=k3", *overrides))
        steps = iter(loader)
        distances = [
            module.training_step(next(steps), number)["metrics"]["kl_ref"] for number in range(3)
        ]
        assert distances[0] == 0
        return distances[2]

    stays = third_distance("kl.update_every=null")
    halfway_each_time = third_distance("kl.update_every=1", "kl.update_rate=0.5")
    halfway_once = third_distance("kl.update_every=2", "kl.update_rate=0.5")
    replaced = third_distance("kl.update_every=2", "kl.update_rate=1")
    assert replaced == 0
    assert 0 < halfway_each_time < halfway_once < stays


@key_test("kl.target", "kl.horizon")
def the_coefficient_moves_towards_the_target_by_the_horizon():
    """The policy begins at its reference, so that the KL of the first batch is far too small."""

    def second_coefficient(*overrides: str) -> float:
        module, loader = module_and_loader(*settings("kl=k3", "kl.coefficient=0.5", *overrides))
        steps = iter(loader)
        for number in range(2):  # a batch
            module.training_step(next(steps), number)
        metrics = module.training_step(next(steps), 2)["metrics"]
        return metrics.get("kl_coefficient", 0.5)

    assert second_coefficient("kl.target=null") == 0.5
    for horizon in (50, 200):
        lower = second_coefficient("kl.target=9", f"kl.horizon={horizon}")
        assert lower == pytest.approx(0.5 * (1 - 0.2 * 16 / horizon), rel=1e-12)
    assert second_coefficient("kl.target=1e-9", "kl.horizon=200") > 0.5


@key_test("kl.place")
def the_kl_is_a_term_of_the_loss_or_a_part_of_the_rewards(tmp_path: Path):
    path = save_with_tokenizer(small_llama(0), tmp_path / "0")
    other = save_with_tokenizer(small_llama(3), tmp_path / "3")
    for place, in_loss in (("loss", True), ("reward", False)):
        overrides = ("kl=k3", f"kl.reference={other}", f"kl.place={place}", "loss=reinforce")
        module, loader = module_and_loader(
            *settings("model=huggingface", f"model.path={path}", *overrides)
        )
        documents = next(iter(loader)).documents
        assert (module.loss.kl is not None) is in_loss
        assert {document.kl_reward is None for document in documents} == {in_loss}


@key_test("entropy.coefficient")
def the_loss_falls_linearly_with_the_coefficient_of_the_entropy():
    losses = []
    for value in (0, 0.1, 0.3):
        losses.append(
            loss_as_specified([f"entropy.coefficient={value}"], entropy_coefficient=value)
        )
    assert losses[0] - losses[2] == pytest.approx(3 * (losses[0] - losses[1]), rel=1e-9)
    assert losses[0] - losses[1] > 1e-3


@key_test("entropy.top_fraction")
def the_surrogate_of_the_most_uncertain_tokens_alone_counts():
    losses = [
        loss_as_specified(
            ["entropy.coefficient=0.1", f"entropy.top_fraction={value}"],
            entropy_coefficient=0.1,
            entropy_top_fraction=None if value == "null" else value,
        )
        for value in ("null", 0.6, 0.2, 1)
    ]
    assert len({round(loss, 8) for loss in losses}) == 3
    assert losses[0] == losses[3]
