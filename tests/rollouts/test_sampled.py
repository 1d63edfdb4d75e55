"""Rollouts of a sampler whose completions are fixed: the requests that it gets, and the documents
that are made of its completions."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from builders.parts import ACCUMULATION, LOSS, ROLLOUT, TASK, short_module
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.completion import Completion, Request
from pgtoolkit.rollouts.estimator import Estimator
from pgtoolkit.rollouts.sampled import SampledRollouts
from pgtoolkit.rollouts.settings import OldLogProbs
from pgtoolkit.tasks.prompts import END, TokenizedTask
from pgtoolkit.tasks.shuffle import seed_of
from pgtoolkit.tasks.tasks import Score, Task
from pgtoolkit.training.module import PolicyGradientModule

TEXTS = ("", "12", "4321", "123")
FINISHED = (True, False, False, True)


class FixedSampler:
    """Completes each prompt with TEXTS; log-probs count down over all tokens that it writes."""

    tolerance = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokens = [
            tokenizer(text).input_ids + [tokenizer.eos_token_id] * finished
            for text, finished in zip(TEXTS, FINISHED, strict=True)
        ]
        self.calls: list[object] = []
        self._version: int | None = None
        self._num_written = 0

    def publish(self, weights: Callable[[], dict[str, Tensor]], version: int) -> None:
        self._version = version
        self.calls.append(weights)

    def complete(self, requests: list[Request]) -> list[Completion]:
        self.calls.append(requests)
        return [
            self._completion(number % len(TEXTS))
            for request in requests
            for number in range(request.completions)
        ]

    def close(self) -> None:
        self.calls.append("close")

    def _completion(self, number: int) -> Completion:
        tokens = self._tokens[number]
        reason = "stop" if FINISHED[number] else "length"
        log_probs = log_probs_after(self._num_written, len(tokens))
        self._num_written += len(tokens)
        return Completion(torch.tensor(tokens), log_probs, reason, self._version)


def log_probs_after(num_written: int, count: int) -> Tensor:
    """Return the log-probs that FixedSampler gives after it has written `num_written` tokens."""
    return -torch.arange(num_written, num_written + count, dtype=torch.float32)


class Rollouts(NamedTuple):
    module: PolicyGradientModule
    task: Task
    sampler: FixedSampler
    source: SampledRollouts

    def documents(self, batch: int = 0) -> list:
        return [self.source.document(16 * batch + place) for place in range(16)]

    def score(self, place: int, batch: int = 0) -> Score:
        """Return the task's own score of the completion at this place of a batch."""
        prompt = self.task.prompt(4 * batch + place // 4)
        return self.task.score(prompt, TEXTS[place % 4], FINISHED[place % 4])


def rollouts(
    old_log_probs: OldLogProbs = OldLogProbs.training,
    estimator: str = "dr_grpo",
    max_tokens: int = 24,
) -> Rollouts:
    module = short_module(replace(LOSS, temperature=0.5), dtype=None)
    tokenizer = module.policy.tokenizer
    sampler = FixedSampler(tokenizer)
    task = make_task(TASK, 0)
    source = SampledRollouts(
        TokenizedTask(task, tokenizer, [tokenizer.eos_token_id]),
        sampler,
        module,
        replace(ROLLOUT, temperature=0.5, old_log_probs=old_log_probs),
        Estimator(estimator),
        replace(ACCUMULATION, max_tokens=max_tokens),
    )
    return Rollouts(module, task, sampler, source)


def test_each_batch_is_sampled_with_the_present_weights_and_its_own_seeds():
    run = rollouts()
    tokenizer = run.module.policy.tokenizer
    for batch, num_updates in ((0, 0), (1, 5)):
        run.module.num_updates = num_updates
        run.sampler.calls.clear()
        documents = run.documents(batch)
        weights, requests = run.sampler.calls
        expected_weights = dict(run.module.model.named_parameters())
        assert weights().keys() == expected_weights.keys()
        for name, weight in expected_weights.items():
            assert torch.equal(weights()[name], weight)
        prompts = [run.task.prompt(4 * batch + number) for number in range(4)]
        assert requests == [
            Request(tokenizer(prompt.text).input_ids, 4, seed_of(0, prompt.index), prompt=prompt)
            for prompt in prompts
        ]
        assert {document.model_version for document in documents} == {num_updates}


def test_documents_have_the_tokens_and_scores_of_their_prompts_and_completions():
    run = rollouts()
    decode = run.module.policy.tokenizer.decode
    for batch in (0, 1):
        for place, document in enumerate(run.documents(batch)):
            finished = FINISHED[place % 4]
            prompt = run.task.prompt(document.group)
            score = run.score(place, batch)
            assert document.group == 4 * batch + place // 4
            assert decode(document.tokens[~document.loss_mask]) == prompt.text
            completion = TEXTS[place % 4] + END * finished
            assert decode(document.tokens[document.loss_mask]) == completion
            assert document.reward == score.reward
            assert document.exact_match == score.exact_match
            assert document.truncated is not finished


def test_old_log_probs_may_be_those_of_the_sampler():
    run = rollouts(OldLogProbs.sampling, max_tokens=1024)
    num_written = 0
    for document in run.documents():
        expected = log_probs_after(num_written, document.num_trained)
        assert torch.equal(document.old_log_probs, expected)
        assert document.sampling_log_probs is None
        num_written += document.num_trained


def test_old_log_probs_of_training_are_computed_by_the_model_beside_the_samplers():
    """At the temperature of the rollouts, 0.5, but for the first update, whose pass gives them."""
    run = rollouts(OldLogProbs.training, max_tokens=1024)
    num_written = 0
    documents = run.documents()
    assert [document.on_policy for document in documents] == [True] * 8 + [False] * 8
    for document in documents:
        with torch.no_grad():
            logits = run.module.model(input_ids=document.tokens[None]).logits[0].double() / 0.5
        following = logits.log_softmax(-1)[:-1].gather(-1, document.tokens[1:, None])[:, 0]
        expected = following[document.loss_mask[1:]].float()
        if not document.on_policy:
            torch.testing.assert_close(document.old_log_probs, expected, rtol=0, atol=1e-5)
        sampled = log_probs_after(num_written, document.num_trained)
        assert torch.equal(document.sampling_log_probs, sampled)
        num_written += document.num_trained


@pytest.mark.parametrize("estimator", ["dr_grpo", "batch_std"])
def test_advantages_are_over_the_batch_and_rewards_stay_those_of_the_task(estimator):
    """Without a penalty for length, no document has a separate reward of the task."""
    run = rollouts(estimator=estimator)
    documents = run.documents()
    rewards = [run.score(place).reward for place in range(16)]
    assert [document.reward for document in documents] == rewards
    assert [document.task_reward for document in documents] == [None] * 16
    divisor = 1.0
    if estimator == "batch_std":
        divisor = statistics.stdev(rewards) + 1e-6
        assert abs(divisor - 1) > 0.5
    for place, document in enumerate(documents):
        start = place // 4 * 4
        centred = rewards[place] - statistics.fmean(rewards[start : start + 4])
        expected = [centred / divisor] * document.num_trained
        assert document.advantages.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_state_whose_vectors_do_not_fit_the_tokens_is_refused():
    source = rollouts().source
    source.document(0)
    state = source.state_dict()
    state["documents"][3]["old_log_probs"] = torch.zeros(9)
    with pytest.raises(ValueError, match="prompt 0, completion 3 has 8 tokens, 4 of them trained"):
        source.load_state_dict(state)


def test_seeds_of_prompts_differ_and_never_change():
    seeds = [seed_of(seed, number) for seed in (0, 1, 2**32 - 1) for number in (0, 1, 2, 10**12)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)
    # A change of these numbers would change every run of a configuration.
    assert [seed_of(0, number) for number in range(3)] == [2735729615, 3821399010, 347136604]
