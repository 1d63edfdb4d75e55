"""Rows of `config/test_keys.py`: the penalty against a reference, and the entropy bonus."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.runs import module_and_loader

from keys import key, loss_as_specified, rows_file, settings, some_documents
from pgtoolkit.losses.kl import KINDS
from pgtoolkit.rollouts.steps import make_step

RECORDED = ("rollout=recorded", "kl.reference=recorded")


def documents_with_reference():
    """Reference log-probs 0.4 above or below the old ones, in turn."""
    found = []
    for number, document in enumerate(some_documents()):
        found.append(
            replace(document, ref_log_probs=document.old_log_probs + (0.4 if number % 2 else -0.4))
        )
    return found


def specified_loss(tmp_path, *overrides: str, **choices) -> float:
    """By the specification, for documents that bring reference log-probs."""
    documents = documents_with_reference()
    path = rows_file(tmp_path, ref_log_probs=[0, 0, -1, -1, -1])
    given = torch.cat([document.ref_log_probs for document in documents])
    labels = torch.cat(
        [torch.where(document.loss_mask, document.tokens, -1)[1:] for document in documents]
    )
    ref = torch.zeros(len(labels)).masked_scatter(labels >= 0, given)
    typed = [*RECORDED, f"rollout.path={path}", *overrides]
    return loss_as_specified(typed, documents, ref_log_probs=ref, **choices)


@key("kl.kind")
def kind(tmp_path):
    """Those of the whole vocabulary: tests/training/test_reference.py."""
    options = {"kl_coefficient": 0.04}
    losses = [specified_loss(tmp_path, f"kl={one}", kl=one, **options) for one in KINDS]
    losses.append(loss_as_specified(["kl=none"]))
    assert len({round(loss, 8) for loss in losses}) == 5


@key("kl.coefficient")
def coefficient(tmp_path):
    typed = ("kl=k3", "kl.coefficient={}")
    losses = []
    for value in (0.1, 0.5, 0.9):
        overrides = [one.format(value) for one in typed]
        losses.append(specified_loss(tmp_path, *overrides, kl="k3", kl_coefficient=value))
    assert losses[2] - losses[1] == pytest.approx(losses[1] - losses[0], rel=1e-9)
    assert losses[1] - losses[0] > 1e-3


@key("kl.reference")
def reference(tmp_path):
    """At the start of a run: no distance from itself, that of another model, and recorded
    numbers."""
    path, other = (save_with_tokenizer(small_llama(seed), tmp_path / str(seed)) for seed in (0, 1))
    step, found = make_step(documents_with_reference(), 1000, {}), {}
    for chosen in ("initial", str(other), "recorded"):
        overrides = ["model=huggingface", f"model.path={path}", "kl=k3", f"kl.reference={chosen}"]
        if chosen == "recorded":
            overrides += [
                "rollout=recorded",
                f"rollout.path={rows_file(tmp_path, ref_log_probs=[0, 0, -1, -1, -1])}",
            ]
        module, _ = module_and_loader(*settings(*overrides))
        found[chosen] = module.training_step(step, 0)["metrics"]["kl_ref"]
    initial, folder, recorded = found.values()
    assert initial == 0
    assert folder > 1e-4
    assert recorded > 0.05
    assert len(set(map(json.dumps, found.values()))) == 3


@key("kl.reference_prompt")
def reference_prompt():
    """The initial weights read another prompt, and only then lie apart from the policy."""
    found = []
    for value in ("null", "'{prompt}{answer}='", "'{answer}={prompt}'"):
        module, loader = module_and_loader(*settings("kl=k3", f"kl.reference_prompt={value}"))
        found.append(module.training_step(next(iter(loader)), 0)["metrics"]["kl_ref"])
    assert found[0] == 0
    assert min(found[1:]) > 1e-6
    assert found[1] != found[2]


@key("kl.update_every", "kl.update_rate")
def moving_reference():
    """How far from the policy the reference stands before the third of three updates."""
    found = []
    for every, rate in (("null", 1), (1, 0.5), (2, 0.5), (2, 1)):
        typed = [
            "kl=k3",
            f"kl.update_every={every}",
            *([] if every == "null" else [f"kl.update_rate={rate}"]),
        ]
        module, loader = module_and_loader(*settings(*typed))
        steps = iter(loader)
        rows = [
            module.training_step(next(steps), number)["metrics"]["kl_ref"] for number in range(3)
        ]
        assert rows[0] == 0
        found.append(rows[2])
    stays, halfway_each_time, halfway, replaced = found
    assert replaced == 0
    assert 0 < halfway_each_time < halfway < stays


@key("kl.place")
def place(tmp_path):
    """On another reference than the policy: a term of the loss, or in the advantages."""
    path, other = (save_with_tokenizer(small_llama(seed), tmp_path / str(seed)) for seed in (0, 3))
    found = []
    for value in ("loss", "reward"):
        chosen = ["kl=k3", f"kl.reference={other}", f"kl.place={value}", "loss=reinforce"]
        module, loader = module_and_loader(
            *settings("model=huggingface", f"model.path={path}", *chosen)
        )
        step = next(iter(loader))
        found.append(
            (module.loss.kl is not None, {d.kl_reward is not None for d in step.documents})
        )
    assert found == [(True, {False}), (False, {True})]


@key("entropy.coefficient")
def entropy():
    losses = []
    for value in (0, 0.1, 0.3):
        losses.append(
            loss_as_specified([f"entropy.coefficient={value}"], entropy_coefficient=value)
        )
    assert losses[0] - losses[2] == pytest.approx(3 * (losses[0] - losses[1]), rel=1e-9)
    assert losses[0] - losses[1] > 1e-3
