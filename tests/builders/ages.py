"""How old the documents of short runs are: each step with its weights, and log-probs computed anew from these."""

from __future__ import annotations

import itertools

import pytest
import torch

from builders.runs import SHORT, built, once

PROMPTS, BATCH = 4, 16
"""Of a batch of rollouts in the short settings."""

CUTS = [(8, "short"), (16, "short"), (5, "short"), (5, "drop"), (12, "carry"), (40, "carry")]


def cut(docs_per_step, last_step):
    return f"accumulation.docs_per_step={docs_per_step}", f"accumulation.last_step={last_step}"


def trained(count, *overrides, prepare=lambda module, loader: None):
    """A module, copies of its weights before each of so many steps, and each step's documents and metrics."""
    module, loader = built(*once(*SHORT, "optimizer.learning_rate=0.02", "trainer.max_steps=99", *overrides))
    prepare(module, loader)
    versions, taken = [], []
    for number, step in enumerate(itertools.islice(loader, count)):
        versions.append({name: weight.detach().clone() for name, weight in module.model.state_dict().items()})
        taken.append((step.documents, module.training_step(step, number)["metrics"]))
    loader.source.close()
    return module, versions, taken


@torch.no_grad()
def log_probs(module, weights, document):
    """Of the completion's tokens, with these weights, by the model's own logits."""
    inputs = {"input_ids": document.tokens[None], "use_cache": False}
    logits = torch.func.functional_call(module.model, weights, (), inputs).logits[0, :-1]
    following = document.tokens[1:, None]
    return logits.log_softmax(-1).gather(-1, following)[document.loss_mask[1:], 0]


def assert_of_their_versions(module, versions, taken, version_of):
    """version_of(step that begins a batch) -> the version that has to have written it. Returns these, by batch."""
    began = {}
    for number, (documents, metrics) in enumerate(taken):
        ages, drifts = [], []
        for document in documents:
            version = version_of(began.setdefault(document.group // PROMPTS, number))
            expected = log_probs(module, versions[version], document)
            assert document.model_version == version
            torch.testing.assert_close(document.old_log_probs.double(), expected, rtol=0, atol=1e-5)
            ages.append(number - version)
            now = expected if version == number else log_probs(module, versions[number], document)
            drifts.append((now - expected).mean())
        assert metrics["staleness"] == pytest.approx(sum(ages) / len(ages))
        drift = metrics["new_logprobs"] - metrics["old_logprobs"]
        assert drift == pytest.approx(float(sum(drifts) / len(drifts)), abs=1e-5)
        if max(ages) == 0:
            assert metrics["ratio_new_old"] == pytest.approx(1, abs=1e-5)
            assert metrics["kl_new_old"] == pytest.approx(0, abs=1e-9)
        else:
            assert metrics["kl_new_old"] > 1e-6  # versions can be told apart by their log-probs
    return {batch: version_of(first) for batch, first in began.items()}
