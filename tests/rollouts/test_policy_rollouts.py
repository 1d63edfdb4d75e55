"""Rollouts of a sampler that writes what it is told to: prompts in, documents out."""

import statistics

import pytest
import torch
from builders.runs import SHORT, config_of

from pgtoolkit.completion import Completion, Request
from pgtoolkit.config.schema import Config
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.rollouts.policy_rollouts import PolicyRollouts
from pgtoolkit.tasks.from_config import make_task
from pgtoolkit.tasks.prompts import END, TokenizedTask
from pgtoolkit.tasks.shuffle import seed_of
from pgtoolkit.training.build import build

TEXTS = ("", "12", "4321", "123")
FINISHED = (True, False, False, True)


class FixedSampler:
    """Of each prompt the completions TEXTS, in turn; its log-probs count the tokens that it has
    written."""

    tolerance = None

    def __init__(self, tokenizer):
        texts = zip(TEXTS, FINISHED, strict=True)
        self._tokens = [
            tokenizer(text).input_ids + [tokenizer.eos_token_id] * finished
            for text, finished in texts
        ]
        self.calls, self._version, self._written = [], None, 0

    def publish(self, weights, version):
        self._version = version
        self.calls.append(weights)

    def complete(self, requests):
        self.calls.append(requests)
        return [
            self._completion(i % len(TEXTS))
            for request in requests
            for i in range(request.completions)
        ]

    def close(self):
        self.calls.append("close")

    def _completion(self, number):
        tokens, reason = self._tokens[number], "stop" if FINISHED[number] else "length"
        log_probs = -torch.arange(self._written, self._written + len(tokens), dtype=torch.float32)
        self._written += len(tokens)
        return Completion(torch.tensor(tokens), log_probs, reason, self._version)


def rollouts(*overrides):
    config: Config = config_of(*SHORT, "rollout.temperature=0.5", *overrides)
    module, _ = build(config)
    tokenizer, sampler = module.policy.tokenizer, FixedSampler(module.policy.tokenizer)
    task = make_task(config.task, config.seed)
    tokenized = TokenizedTask(task, tokenizer, [tokenizer.eos_token_id])
    return module, task, sampler, PolicyRollouts(config, tokenized, sampler, module, ONE_PROCESS)


def test_every_prompt_is_sampled_with_the_weights_of_now():
    module, task, sampler, source = rollouts()
    tokenizer = module.policy.tokenizer
    for number, updates in ((0, 0), (1, 5)):
        module.num_updates, sampler.calls[:] = updates, []
        documents = [source.document(16 * number + place) for place in range(16)]
        weights, requests = sampler.calls
        assert weights().keys() == dict(module.model.named_parameters()).keys()
        assert all(
            torch.equal(weights()[name], weight) for name, weight in module.model.named_parameters()
        )
        prompts = [task.prompt(4 * number + i) for i in range(4)]
        assert requests == [
            Request(tokenizer(prompt.text).input_ids, 4, seed_of(0, prompt.index), prompt=prompt)
            for prompt in prompts
        ]
        assert {document.model_version for document in documents} == {updates}
        assert [document.group for document in documents] == [
            4 * number + i // 4 for i in range(16)
        ]
        for place, document in enumerate(documents):
            text = TEXTS[place % 4] + END * FINISHED[place % 4]
            assert (
                tokenizer.decode(document.tokens[~document.loss_mask])
                == task.prompt(document.group).text
            )
            assert tokenizer.decode(document.tokens[document.loss_mask]) == text
            score = task.score(task.prompt(document.group), TEXTS[place % 4], FINISHED[place % 4])
            assert (document.reward, document.exact_match) == (score.reward, score.exact_match)
            assert document.truncated is not FINISHED[place % 4]


@pytest.mark.parametrize("chosen", ["sampling", "training"])
def test_old_log_probs_are_those_of_the_sampler_or_of_training(chosen):
    module, _, _, source = rollouts(
        f"rollout.old_log_probs={chosen}", "accumulation.max_tokens=1024"
    )
    documents = [source.document(place) for place in range(16)]
    written = 0
    for document in documents:
        expected = -torch.arange(written, written + document.num_trained, dtype=torch.float32)
        written += document.num_trained
        if chosen == "training":
            with torch.no_grad():
                logits = module.model(input_ids=document.tokens[None]).logits[0].double() / 0.5
            following = logits.log_softmax(-1)[:-1].gather(-1, document.tokens[1:, None])[:, 0]
            expected = following[document.loss_mask[1:]].float()
        torch.testing.assert_close(document.old_log_probs, expected, rtol=0, atol=1e-5)
        if chosen == "training":
            own = -torch.arange(written - document.num_trained, written, dtype=torch.float32)
            assert document.sampling_log_probs is not None
            assert torch.equal(document.sampling_log_probs, own)
        else:
            assert document.sampling_log_probs is None


@pytest.mark.parametrize("estimator", ["dr_grpo", "batch_std"])
def test_the_whole_batch_divides_advantages_and_leaves_rewards_alone(estimator):
    """What is taken off for the length is known of no document where nothing is."""
    _, task, _, source = rollouts(f"advantage={estimator}", "aggregation=sample_mean")
    documents = [source.document(place) for place in range(16)]
    rewards = [
        task.score(task.prompt(i // 4), TEXTS[i % 4], FINISHED[i % 4]).reward for i in range(16)
    ]
    assert [(document.reward, document.task_reward) for document in documents] == [
        (r, None) for r in rewards
    ]
    divisor = statistics.stdev(rewards) + 1e-6 if estimator == "batch_std" else 1
    assert abs(divisor - 1) > 0.5 or estimator == "dr_grpo"
    for i, document in enumerate(documents):
        centred = rewards[i] - statistics.fmean(rewards[i // 4 * 4 : i // 4 * 4 + 4])
        assert document.advantages.tolist() == pytest.approx(
            [centred / divisor] * document.num_trained, rel=1e-6
        )


def test_a_state_that_does_not_fit_its_tokens_is_refused():
    _, _, _, source = rollouts()
    source.document(0)
    state = source.state_dict()
    state["documents"][3]["old_log_probs"] = torch.zeros(9)
    with pytest.raises(ValueError, match="prompt 0, completion 3 has 8 tokens, 4 of them trained"):
        source.load_state_dict(state)


def test_a_seed_is_the_prompts_own_in_this_run():
    seeds = [seed_of(seed, number) for seed in (0, 1, 2**32 - 1) for number in (0, 1, 2, 10**12)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert [seed_of(0, number) for number in range(3)] == [2735729615, 3821399010, 347136604]
