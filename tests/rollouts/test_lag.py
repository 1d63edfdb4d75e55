"""Batches sampled ahead: `rollout.lag`, and `rollout.max_staleness`, which samples them while
others are trained."""

import itertools
import json
import random
import threading
import time
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from builders.runs import (
    SHORT,
    assert_equal,
    checkpoint_of,
    last_of_each_key,
    metrics_of,
    module_and_loader,
    run,
    sampler_of,
)

from pgtoolkit.config.counts import steps_before, steps_of
from pgtoolkit.config.schema_step import AccumulationConfig, LastStep
from pgtoolkit.errors import NumericalError
from pgtoolkit.rollouts.steps import StepLoader
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.training.module import PolicyGradientModule

PROMPTS, BATCH = 4, 16
"""Of a batch of rollouts in the short settings."""

CORRECTED = ("correction=token_truncate", "correction.high=1.001")

SECONDS = 60
"""After which what waits in vain is given up."""


def cut(docs_per_step, last_step):
    return f"accumulation.docs_per_step={docs_per_step}", f"accumulation.last_step={last_step}"


def trained(count, *overrides, prepare=lambda module, loader: None):
    """A module, copies of its weights before each of so many steps, and each step's documents and
    metrics."""
    module, loader = module_and_loader(
        *last_of_each_key(
            *SHORT, "optimizer.learning_rate=0.02", "trainer.max_steps=99", *overrides
        )
    )
    prepare(module, loader)
    versions, taken = [], []
    for number, step in enumerate(itertools.islice(loader, count)):
        versions.append(
            {name: weight.detach().clone() for name, weight in module.model.state_dict().items()}
        )
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
    """version_of(step that begins a batch) -> the version that has to have written it. Returns
    these, by batch."""
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


@pytest.mark.parametrize(
    ("lag", "docs", "last", "old", "count"),
    [
        (1, 8, "short", "training", 5),
        (3, 8, "short", "training", 7),
        (5, 5, "drop", "training", 8),
        (5, 12, "carry", "sampling", 8),
    ],
)
def test_a_batch_is_of_the_weights_of_so_many_updates_ago(lag, docs, last, old, count):
    """Sampled with them, and with their log-probs as old ones; of the first weights while there are
    no others."""
    trained_steps = trained(
        count, f"rollout.lag={lag}", f"rollout.old_log_probs={old}", "loss=grpo", *cut(docs, last)
    )
    assert_of_their_versions(*trained_steps, lambda first: max(0, first - lag))


@pytest.mark.parametrize(
    ("late", "last", "docs", "ahead", "correction"),
    [
        ("lag=1", "short", 8, 1, ()),
        ("lag=5", "carry", 12, 5, ()),
        ("max_staleness=3", "short", 8, 2, ()),
        ("lag=3", "short", 8, 3, CORRECTED),
        ("max_staleness=3", "short", 8, 2, CORRECTED),
    ],
)
def test_proximal_log_probs_are_of_the_weights_that_a_batch_begins_with(
    late, last, docs, ahead, correction
):
    """The sampler's stay beside them, and a correction acts on the difference; without one the
    first update's own forward pass gives them, where it is made of whole micro-batches."""
    chosen = (
        f"rollout.{late}",
        "rollout.old_log_probs=proximal",
        "loss=grpo",
        *cut(docs, last),
        *correction,
    )
    module, versions, taken = trained(8, *chosen)
    began, moved, missing = {}, 0, 0
    for number, (documents, metrics) in enumerate(taken):
        factors = []
        for document in documents:
            first = began.setdefault(document.group // PROMPTS, number)
            sampled = log_probs(module, versions[max(0, first - ahead)], document)
            expected = log_probs(module, versions[first], document)
            assert document.model_version == max(0, first - ahead)
            assert document.sampling_log_probs is not None
            torch.testing.assert_close(
                document.sampling_log_probs.double(), sampled, rtol=0, atol=1e-5
            )
            if document.on_policy:
                assert first == number
                assert document.old_log_probs is None
                missing += 1
            else:
                assert document.old_log_probs is not None
                torch.testing.assert_close(
                    document.old_log_probs.double(), expected, rtol=0, atol=1e-5
                )
            moved = max(moved, float((expected - sampled).abs().max()))
            factors.append((expected - sampled).exp().clamp(max=1.001).mean())
        if {began[document.group // PROMPTS] for document in documents} == {number}:
            assert metrics["ratio_new_old"] == pytest.approx(1, abs=1e-5)
        if correction:
            assert metrics["correction_factor"] == pytest.approx(
                float(sum(factors) / len(factors)), abs=1e-5
            )
    assert moved > 0.1
    assert (missing > 0) is (not correction and last == "short")


def test_a_lag_makes_documents_so_many_updates_old():
    """Two steps per batch; the numbers in full."""
    ages = {
        lag: [metrics["staleness"] for _, metrics in trained(8, f"rollout.lag={lag}")[2]]
        for lag in (1, 3)
    }
    assert ages == {1: [0, 1, 1, 2, 1, 2, 1, 2], 3: [0, 1, 2, 3, 3, 4, 3, 4]}


class Begun:
    """An endless source of batches; notes at which step each of them, and each step, begins."""

    num_documents = None

    def __init__(self):
        self.positions, self.batches = [], {}

    def before_step(self, position):
        self.positions.append(position)

    def document(self, position):
        self.batches.setdefault(position // BATCH, len(self.positions) - 1)
        return SimpleNamespace(trajectory=None, left_out=False)

    def batch_end(self, position):
        return (position // BATCH + 1) * BATCH


@pytest.mark.parametrize("last", ["short", "drop", "carry"])
@pytest.mark.parametrize("docs", [1, 3, 5, 8, 15, 16, 17, 40])
def test_when_a_batch_begins_is_known_ahead(docs, last):
    if last == "drop" and docs > BATCH:
        return
    accumulation, source = AccumulationConfig(docs, 8, None, LastStep(last)), Begun()
    loader = StepLoader(source, accumulation, False, 99)
    for _ in range(40):
        loader._next_documents()
    assert len(source.batches) > 2
    for now, position in enumerate(source.positions):
        for batch, first in source.batches.items():
            if batch > position // BATCH:
                assert steps_before(batch, position, BATCH, accumulation) == first - now
    if last != "carry":
        assert source.batches[2] == 2 * steps_of(BATCH, accumulation)


def test_a_step_without_an_update_makes_what_was_sampled_before_it_less_old():
    module, loader = module_and_loader(*SHORT, "rollout.lag=3")
    ages = []
    for number, step in enumerate(loader):
        if number == 2:  # as if its loss had not been finite
            module.num_skipped_steps += 1
        else:
            ages.append(module.training_step(step, number)["metrics"]["staleness"])
    assert ages == [0, 1, 2, 2, 3]


def test_batches_are_recorded_once_they_are_used_with_the_version_that_wrote_them(tmp_path):
    saved = tmp_path / "saved"
    run(tmp_path / "run", "rollout.lag=3", f"rollout.save_path={saved}", "trainer.max_steps=7")
    versions = {}
    for path in sorted(saved.iterdir()):
        column = pq.read_table(path)["model_version"].to_pylist()
        assert len(column) == BATCH
        (versions[path.name],) = {*column}
    assert versions == {
        f"batch-00000{number}.parquet": version for number, version in enumerate([0, 0, 1, 3])
    }


def overlap(most):
    return f"rollout.max_staleness={most}", "rollout.old_log_probs=sampling"


@pytest.mark.parametrize(
    ("how", "lasts", "most"),
    [((16, "short"), 1, 1), ((8, "short"), 2, 8), ((5, "drop"), 3, 5)],
)
def test_no_document_is_trained_later_than_allowed(how, lasts, most):
    """lasts: steps of a batch. The first weights write what is begun before there are others."""
    trained_steps = trained(3 * lasts + 2, *overlap(most), "loss=grpo", *cut(*how))
    ahead = min(most - lasts + 1, lasts)
    versions = assert_of_their_versions(*trained_steps, lambda first: max(0, first - ahead))
    ages = [
        number - d.model_version
        for number, (documents, _) in enumerate(trained_steps[2])
        for d in documents
    ]
    assert max(ages) == min(most, 2 * lasts - 1)
    assert len(set(versions.values())) > 2


def test_a_batch_is_sampled_while_another_is_trained():
    """All but the first are sampled only after an update that came later than they began, with
    weights from before."""

    def prepare(module, loader):
        sampler = sampler_of(loader)
        publish, complete, begun = sampler.publish, sampler.complete, []

        def note(weights, version):
            begun.append(version)
            publish(weights, version)

        def late(requests):
            end = time.monotonic() + SECONDS
            while len(begun) > 1 and module.num_updates == begun[-1]:
                assert time.monotonic() < end, "there was no update meanwhile"
                time.sleep(0.001)
            return complete(requests)

        sampler.publish, sampler.complete = note, late

    trained_steps = trained(8, *overlap(3), "loss=grpo", prepare=prepare)
    assert_of_their_versions(*trained_steps, lambda first: max(0, first - 2))


def test_no_timing_and_nobody_elses_random_numbers_change_a_run(tmp_path, monkeypatch):
    plain = run(tmp_path / "plain", *overlap(3))
    complete, update = TransformersSampler.complete, PolicyGradientModule.before_update

    def slow(self, requests):
        time.sleep(random.choice([0, 0.05]))
        return complete(self, requests)

    def drawing(self):
        time.sleep(random.choice([0, 0.05]))
        torch.rand(7)
        return update(self)

    monkeypatch.setattr(TransformersSampler, "complete", slow)
    monkeypatch.setattr(PolicyGradientModule, "before_update", drawing)
    disturbed = run(tmp_path / "disturbed", *overlap(3))
    assert metrics_of(disturbed) == metrics_of(plain)
    for part in ("model", "optimizer", "data"):
        assert_equal(checkpoint_of(disturbed, 6)[part], checkpoint_of(plain, 6)[part])


@pytest.mark.parametrize("call", [1, 2])
def test_an_error_while_sampling_ends_the_run_as_it_does_without_overlap(
    tmp_path, monkeypatch, call
):
    complete, calls = TransformersSampler.complete, []

    def failing(self, requests):
        calls.append(threading.current_thread())
        if len(calls) == call:
            raise NumericalError("the policy's probabilities are not finite")
        return complete(self, requests)

    monkeypatch.setattr(TransformersSampler, "complete", failing)
    with pytest.raises(NumericalError, match=r"^the policy's probabilities are not finite$"):
        run(tmp_path / "run", *overlap(3), "trainer.checkpoint_every=99")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["reason"] == "NumericalError: the policy's probabilities are not finite"
    assert len(calls) == call
    assert threading.main_thread() not in calls
