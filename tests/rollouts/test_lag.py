"""Batches sampled ahead, by `rollout.lag` and by `rollout.max_staleness`, which samples them while
others are trained: the weights that wrote a document are found by the model's own logits."""

import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest
import torch
from builders.parts import ACCUMULATION, LOSS, ROLLOUT, short_loader, short_module
from builders.runs import assert_equal, checkpoint_of, metrics_of, run, sampler_of
from torch import Tensor

from pgtoolkit.completion import Completion, Request
from pgtoolkit.document import Document
from pgtoolkit.errors import NumericalError
from pgtoolkit.losses.corrections import Correction, TokenTruncate
from pgtoolkit.losses.families import Grpo
from pgtoolkit.rollouts.batch_counts import steps_before, steps_of
from pgtoolkit.rollouts.settings import (
    AccumulationSettings,
    LastStep,
    OldLogProbs,
    PolicyRolloutSettings,
)
from pgtoolkit.rollouts.source import Source
from pgtoolkit.rollouts.step_loader import StepLoader
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.settings import OptimizerSettings

PROMPTS = 4
DOCUMENTS = 16
"""Prompts and documents of a batch of rollouts in the short settings."""

CORRECTION = TokenTruncate(high=1.001)

TIMEOUT_SECONDS = 60

Weights = dict[str, Tensor]


def accumulation(docs_per_step: int, last_step: str) -> AccumulationSettings:
    return AccumulationSettings(
        docs_per_step=docs_per_step, max_tokens=24, last_step=LastStep(last_step)
    )


class TrainedSteps(NamedTuple):
    """Some steps of a run. weights: before each step. steps: the documents and metrics of each."""

    module: PolicyGradientModule
    weights: list[Weights]
    steps: list[tuple[list[Document], dict[str, float]]]


def train_steps(
    num_steps: int,
    rollout: PolicyRolloutSettings,
    documents_of_steps: AccumulationSettings,
    correction: Correction | None = None,
    prepare: Callable[[PolicyGradientModule, StepLoader], None] = lambda module, loader: None,
) -> TrainedSteps:
    """Train the first steps of a run; prepare: called with its module and loader before them."""
    optimizer = OptimizerSettings(learning_rate=0.02)
    loss = replace(LOSS, family=Grpo(), correction=correction)
    module = short_module(loss, optimizer=optimizer, max_steps=99)
    loader = short_loader(module, rollout, documents_of_steps)
    prepare(module, loader)
    weights = []
    steps = []
    for number, step in enumerate(itertools.islice(loader, num_steps)):
        state = module.model.state_dict()
        weights.append({name: weight.detach().clone() for name, weight in state.items()})
        steps.append((step.documents, module.training_step(step, number)["metrics"]))
    loader.source.close()
    return TrainedSteps(module, weights, steps)


@torch.no_grad()
def log_probs(module: PolicyGradientModule, weights: Weights, document: Document) -> Tensor:
    """Return the log-probs of the trained tokens under these weights, by the model's own logits."""
    inputs = {"input_ids": document.tokens[None], "use_cache": False}
    logits = torch.func.functional_call(module.model, weights, (), inputs).logits[0, :-1]
    following = document.tokens[1:, None]
    return logits.log_softmax(-1).gather(-1, following)[document.loss_mask[1:], 0]


def batch_of(document: Document) -> int:
    return document.group // PROMPTS


def first_steps(steps: list[tuple[list[Document], dict[str, float]]]) -> dict[int, int]:
    """Return the step that begins each batch of rollouts."""
    first: dict[int, int] = {}
    for number, (documents, _) in enumerate(steps):
        for document in documents:
            first.setdefault(batch_of(document), number)
    return first


def assert_sampled_by(trained: TrainedSteps, version_of: Callable[[int], int]) -> set[int]:
    """Assert that each batch was sampled by the version `version_of(step that begins the batch)`,
    with its log-probs as the old ones, and that metrics say so. Return these versions."""
    module, weights, steps = trained
    first = first_steps(steps)
    for number, (documents, metrics) in enumerate(steps):
        ages = []
        drifts = []
        for document in documents:
            version = version_of(first[batch_of(document)])
            expected = log_probs(module, weights[version], document)
            assert document.model_version == version
            torch.testing.assert_close(document.old_log_probs.double(), expected, rtol=0, atol=1e-5)
            ages.append(number - version)
            if version == number:
                drifts.append(torch.tensor(0.0))
            else:
                drifts.append((log_probs(module, weights[number], document) - expected).mean())
        assert metrics["staleness"] == pytest.approx(sum(ages) / len(ages))
        drift = metrics["new_logprobs"] - metrics["old_logprobs"]
        assert drift == pytest.approx(float(sum(drifts) / len(drifts)), abs=1e-5)
        if max(ages) == 0:
            assert metrics["ratio_new_old"] == pytest.approx(1, abs=1e-5)
            assert metrics["kl_new_old"] == pytest.approx(0, abs=1e-9)
        else:
            assert metrics["kl_new_old"] > 1e-6  # versions can be told apart by their log-probs
    return {version_of(step) for step in first.values()}


@pytest.mark.parametrize(
    ("lag", "docs_per_step", "last_step", "old_log_probs", "num_steps"),
    [
        (1, 8, "short", "training", 5),
        (3, 8, "short", "training", 7),
        (5, 5, "drop", "training", 8),
        (5, 12, "carry", "sampling", 8),
    ],
)
def test_a_batch_is_sampled_by_the_weights_of_lag_updates_ago(
    lag, docs_per_step, last_step, old_log_probs, num_steps
):
    """The first weights sample as long as there are no others."""
    rollout = replace(ROLLOUT, lag=lag, old_log_probs=OldLogProbs(old_log_probs))
    trained = train_steps(num_steps, rollout, accumulation(docs_per_step, last_step))
    assert_sampled_by(trained, lambda first: max(0, first - lag))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampled_ahead", "last_step", "docs_per_step", "updates", "correction"),
    [
        ({"lag": 1}, "short", 8, 1, None),
        ({"lag": 5}, "carry", 12, 5, None),
        ({"max_staleness": 3}, "short", 8, 2, None),
        ({"lag": 3}, "short", 8, 3, CORRECTION),
        ({"max_staleness": 3}, "short", 8, 2, CORRECTION),
    ],
)
def test_proximal_log_probs_are_of_the_weights_that_a_batch_begins_with(
    sampled_ahead, last_step, docs_per_step, updates, correction
):
    """updates: between sampling a batch and training on it. The sampler's log-probs are kept beside
    the proximal ones, and a correction acts on the difference. Without a correction the first
    update's own forward pass gives them, where it is made of whole micro-batches."""
    rollout = replace(ROLLOUT, old_log_probs=OldLogProbs.proximal, **sampled_ahead)
    module, weights, steps = train_steps(
        8, rollout, accumulation(docs_per_step, last_step), correction
    )
    first = first_steps(steps)
    largest_move = 0.0
    num_without = 0
    for number, (documents, metrics) in enumerate(steps):
        factors = []
        for document in documents:
            begin = first[batch_of(document)]
            version = max(0, begin - updates)
            sampled = log_probs(module, weights[version], document)
            proximal = log_probs(module, weights[begin], document)
            assert document.model_version == version
            torch.testing.assert_close(
                document.sampling_log_probs.double(), sampled, rtol=0, atol=1e-5
            )
            if document.on_policy:
                assert begin == number
                assert document.old_log_probs is None
                num_without += 1
            else:
                torch.testing.assert_close(
                    document.old_log_probs.double(), proximal, rtol=0, atol=1e-5
                )
            largest_move = max(largest_move, float((proximal - sampled).abs().max()))
            factors.append((proximal - sampled).exp().clamp(max=1.001).mean())
        if all(first[batch_of(document)] == number for document in documents):
            assert metrics["ratio_new_old"] == pytest.approx(1, abs=1e-5)
        if correction:
            expected = float(sum(factors) / len(factors))
            assert metrics["correction_factor"] == pytest.approx(expected, abs=1e-5)
    assert largest_move > 0.1
    assert (num_without > 0) is (not correction and last_step == "short")


class BatchRecorder(Source):
    """An endless source of batches; notes the position before each step, and the step that begins
    each batch."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.first_steps: dict[int, int] = {}

    def before_step(self, position: int, number: int = 0) -> None:
        self.positions.append(position)

    def document(self, position: int) -> SimpleNamespace:
        self.first_steps.setdefault(position // DOCUMENTS, len(self.positions) - 1)
        return SimpleNamespace(trajectory=None, left_out=False)

    def batch_end(self, position: int) -> int:
        return (position // DOCUMENTS + 1) * DOCUMENTS


@pytest.mark.parametrize(
    ("last_step", "docs_per_step"),
    [
        (last_step, docs_per_step)
        for last_step in ("short", "drop", "carry")
        for docs_per_step in (1, 3, 5, 8, 15, 16, 17, 40)
        if not (last_step == "drop" and docs_per_step > DOCUMENTS)  # there would be no step
    ],
)
def test_steps_before_counts_the_steps_until_a_batch_begins(last_step, docs_per_step):
    source = BatchRecorder()
    config = AccumulationSettings(
        docs_per_step=docs_per_step, max_tokens=8, last_step=LastStep(last_step)
    )
    loader = StepLoader(source, config, False, 99)
    for _ in range(40):
        loader._next_documents()
    assert len(source.first_steps) > 2
    for step, position in enumerate(source.positions):
        for batch, first in source.first_steps.items():
            if batch > position // DOCUMENTS:
                assert steps_before(batch, position, DOCUMENTS, config) == first - step
    if last_step != "carry":
        assert source.first_steps[2] == 2 * steps_of(DOCUMENTS, config)


def test_a_skipped_step_makes_documents_sampled_before_it_an_update_younger():
    module = short_module()
    loader = short_loader(module, replace(ROLLOUT, lag=3))
    staleness = []
    for number, step in enumerate(loader):
        if number == 2:  # as if its loss had not been finite
            module.num_skipped_steps += 1
        else:
            staleness.append(module.training_step(step, number)["metrics"]["staleness"])
    assert staleness == [0, 1, 2, 2, 3]


def test_batches_are_recorded_once_they_are_used_with_the_version_that_wrote_them(tmp_path):
    folder = tmp_path / "saved"
    run(tmp_path / "run", "rollout.lag=3", f"rollout.save_path={folder}", "trainer.max_steps=7")
    versions = {
        path.name: pq.read_table(path)["model_version"].to_pylist()
        for path in sorted(folder.iterdir())
    }
    assert versions == {
        "batch-000000.parquet": [0] * DOCUMENTS,
        "batch-000001.parquet": [0] * DOCUMENTS,
        "batch-000002.parquet": [1] * DOCUMENTS,
        "batch-000003.parquet": [3] * DOCUMENTS,
    }


def sampled_asynchronously(max_staleness: int) -> PolicyRolloutSettings:
    return replace(ROLLOUT, max_staleness=max_staleness, old_log_probs=OldLogProbs.sampling)


ASYNCHRONOUS = ("rollout.max_staleness=3", "rollout.old_log_probs=sampling")


@pytest.mark.parametrize(
    ("docs_per_step", "last_step", "steps_of_batch", "max_staleness"),
    [(16, "short", 1, 1), (8, "short", 2, 8), (5, "drop", 3, 5)],
)
def test_no_document_is_trained_later_than_allowed(
    docs_per_step, last_step, steps_of_batch, max_staleness
):
    """The first weights sample what begins before there are others."""
    trained = train_steps(
        3 * steps_of_batch + 2,
        sampled_asynchronously(max_staleness),
        accumulation(docs_per_step, last_step),
    )
    updates = min(max_staleness - steps_of_batch + 1, steps_of_batch)
    versions = assert_sampled_by(trained, lambda first: max(0, first - updates))
    assert len(versions) > 2
    ages = [
        number - document.model_version
        for number, (documents, _) in enumerate(trained.steps)
        for document in documents
    ]
    assert max(ages) == min(max_staleness, 2 * steps_of_batch - 1)


def test_a_batch_is_sampled_while_another_is_trained():
    """The sampler waits, for every batch but the first, until there was an update since it got its
    weights: a trainer that waited for the sampler would never make one."""

    def prepare(module: PolicyGradientModule, loader: StepLoader) -> None:
        sampler = sampler_of(loader)
        publish = sampler.publish
        complete = sampler.complete
        versions = []

        def noted_publish(weights: Callable[[], Weights], version: int) -> None:
            versions.append(version)
            publish(weights, version)

        def late_complete(requests: list[Request]) -> list[Completion]:
            end = time.monotonic() + TIMEOUT_SECONDS
            while len(versions) > 1 and module.num_updates == versions[-1]:
                assert time.monotonic() < end, "there was no update while the batch was sampled"
                time.sleep(0.001)
            return complete(requests)

        sampler.publish = noted_publish
        sampler.complete = late_complete

    trained = train_steps(8, sampled_asynchronously(3), ACCUMULATION, prepare=prepare)
    assert_sampled_by(trained, lambda first: max(0, first - 2))


def test_a_run_depends_neither_on_timing_nor_on_torchs_random_numbers(tmp_path, monkeypatch):
    undisturbed = run(tmp_path / "undisturbed", *ASYNCHRONOUS)
    complete = TransformersSampler.complete
    before_update = PolicyGradientModule.before_update

    def slow_complete(self: TransformersSampler, requests: list[Request]) -> list[Completion]:
        time.sleep(random.choice([0, 0.05]))
        return complete(self, requests)

    def drawing_before_update(self: PolicyGradientModule) -> dict[str, float]:
        time.sleep(random.choice([0, 0.05]))
        torch.rand(7)
        return before_update(self)

    monkeypatch.setattr(TransformersSampler, "complete", slow_complete)
    monkeypatch.setattr(PolicyGradientModule, "before_update", drawing_before_update)
    disturbed = run(tmp_path / "disturbed", *ASYNCHRONOUS)
    assert metrics_of(disturbed) == metrics_of(undisturbed)
    last = checkpoint_of(disturbed, 6)
    expected = checkpoint_of(undisturbed, 6)
    for part in ("model", "optimizer", "data"):
        assert_equal(last[part], expected[part])


@pytest.mark.parametrize("failing_call", [1, 2])
def test_an_error_while_sampling_asynchronously_ends_the_run(tmp_path, monkeypatch, failing_call):
    complete = TransformersSampler.complete
    threads = []

    def failing_complete(self: TransformersSampler, requests: list[Request]) -> list[Completion]:
        threads.append(threading.current_thread())
        if len(threads) == failing_call:
            raise NumericalError("the policy's probabilities are not finite")
        return complete(self, requests)

    monkeypatch.setattr(TransformersSampler, "complete", failing_complete)
    with pytest.raises(NumericalError, match=r"^the policy's probabilities are not finite$"):
        run(tmp_path / "run", *ASYNCHRONOUS, "trainer.checkpoint_every=99")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["reason"] == "NumericalError: the policy's probabilities are not finite"
    assert len(threads) == failing_call
    assert threading.main_thread() not in threads
