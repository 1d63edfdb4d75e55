"""`rollout.max_staleness`: batches are sampled while others are trained, by a schedule that no timing changes."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from builders.ages import assert_of_their_versions, cut, trained
from builders.parallel_runs import run_on_ranks
from builders.runs import SHORT, assert_equal, built, checkpoint_of, copy_as_of, metrics_of, once, run, sampler_of

from pgtoolkit.errors import NumericalError
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.tasks.completion import Request
from pgtoolkit.training.module import PolicyGradientModule

SECONDS = 60
"""After which what waits in vain is given up."""


def overlap(most):
    return f"rollout.max_staleness={most}", "rollout.old_log_probs=sampling"


@pytest.mark.parametrize(
    ("how", "lasts", "most"),
    [
        *(((16, "short"), 1, most) for most in (1, 2)),
        *(((8, "short"), 2, most) for most in (2, 3, 8)),
        *(((5, "short"), 4, most) for most in (4, 6, 7)),
        *(((5, "drop"), 3, most) for most in (3, 5)),
    ],
)
def test_no_document_is_trained_later_than_allowed(how, lasts, most):
    """lasts: steps of a batch. The first weights write what is begun before there are others."""
    found = trained(3 * lasts + 2, *overlap(most), "loss=grpo", *cut(*how))
    ahead = min(most - lasts + 1, lasts)
    versions = assert_of_their_versions(*found, lambda first: max(0, first - ahead))
    ages = [number - d.model_version for number, (documents, _) in enumerate(found[2]) for d in documents]
    assert max(ages) == min(most, 2 * lasts - 1)
    assert len(set(versions.values())) > 2


def test_a_batch_is_sampled_while_another_is_trained():
    """All but the first are sampled only after an update that came later than they began, with weights from before."""

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

    found = trained(8, *overlap(3), "loss=grpo", prepare=prepare)
    assert_of_their_versions(*found, lambda first: max(0, first - 2))


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


def test_the_global_random_state_stays_as_it_is():
    _, loader = built(*SHORT, *overlap(3))
    before = torch.get_rng_state()
    batches = [[d.tokens.tolist() for d in step.documents] for step in loader]
    assert torch.equal(torch.get_rng_state(), before)
    assert len({str(batch) for batch in batches}) == 6


@pytest.mark.parametrize("top_p", ["null", "0.8"])
def test_tokens_are_as_frequent_as_the_distribution_says(top_p):
    module, loader = built(*SHORT, *overlap(3), "rollout.temperature=0.7", f"rollout.top_p={top_p}")
    with torch.no_grad():
        module.policy.head.weight.mul_(40)
    sampler, prompt, count = sampler_of(loader), [4, 8, 2, 10], 4000
    sampler.publish(module.policy.weights, 3)
    completions = sampler.complete([Request(prompt, count, 5)])
    probabilities = (module.model(input_ids=torch.tensor([prompt])).logits[0, -1] / 0.7).softmax(-1).detach()
    if top_p != "null":
        ordered, order = probabilities.sort(descending=True)
        probabilities[order[ordered.cumsum(0) - ordered >= 0.8]] = 0
        probabilities /= probabilities.sum()
    assert probabilities.max() > 0.2
    for token, probability in enumerate(probabilities.tolist()):
        having = [c for c in completions if c.tokens[0] == token]
        assert abs(len(having) / count - probability) <= 5 * (probability * (1 - probability) / count) ** 0.5
        for completion in having:
            assert completion.log_probs[0].exp().item() == pytest.approx(probability, abs=1e-5)
    assert {c.model_version for c in completions} == {3}


@pytest.mark.parametrize("call", [1, 2])
def test_an_error_while_sampling_ends_the_run_as_it_does_without_overlap(tmp_path, monkeypatch, call):
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


def test_ranks_sample_their_shares_and_continue_bit_for_bit(tmp_path):
    settings = [*SHORT, *overlap(3), "trainer.max_steps=5"]
    whole = run_on_ranks(tmp_path / "whole", settings, data_parallel=2)
    assert [row["staleness"] for row in metrics_of(whole)] == [0, 1, 2, 3, 2]
    resumed = copy_as_of(whole, 3, tmp_path / "resumed")
    run_on_ranks(resumed, settings, resume=True, data_parallel=2)
    assert metrics_of(resumed) == metrics_of(whole)
    assert_equal(checkpoint_of(resumed, 5), checkpoint_of(whole, 5))


ENDLESS = """
import sys, time
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.cli import main

generated, calls = TransformersSampler._generated, []

def endless(self, prompts):
    calls.append(prompts)
    while len(calls) > 1:
        self._check_open()
        time.sleep(0.01)
    return generated(self, prompts)

TransformersSampler._generated = endless
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait_for_what_is_being_sampled(tmp_path):
    overrides = once(*SHORT, *overlap(3), "trainer.checkpoint_every=99", f"hydra.run.dir={tmp_path / 'run'}")
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, *overrides],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    lines = iter(process.stdout.readline, "")
    assert any(line.startswith("step 2/") for line in lines)  # the next one waits for its documents
    process.send_signal(signal.SIGINT)
    assert any("finishing this step" in line for line in lines)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 75, errors
    assert [line for line in errors.splitlines() if not line.startswith("note: ")] == errors.splitlines()[-1:]
    assert "SIGINT after step 2; saved up to step 0. Continue with: " in errors
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "interrupted"
