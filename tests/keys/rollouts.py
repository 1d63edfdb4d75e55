"""Tests of single keys (see `keys`): the seed, and where rollouts come from."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path

import torch
from builders.runs import assert_equal, config_of, sampler_of

from keys import key_test
from keys.small_runs import (
    logits_of,
    loss_as_specified,
    module_and_steps,
    recorded_steps,
    rows_file,
    settings,
)
from pgtoolkit.assembly.machine import check_machine
from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.config.counts import copies_of
from pgtoolkit.document import Document
from pgtoolkit.system.report import Report
from pgtoolkit.tasks.settings import ReverseTaskSettings
from pgtoolkit.training.module import PolicyGradientModule


def module_and_first_batch(*overrides: str) -> tuple[PolicyGradientModule, list[Document]]:
    """Return the module of a small run, and its first step, which is a batch of rollouts."""
    module, loader = module_and_steps(*overrides, "accumulation.docs_per_step=1000")
    return module, next(iter(loader)).documents


def first_batch(*overrides: str) -> list[Document]:
    _, documents = module_and_first_batch(*overrides)
    return documents


def prompt_of(module: PolicyGradientModule, document: Document) -> str:
    return module.policy.tokenizer.decode(document.tokens[~document.loss_mask])


@key_test("seed")
def the_seed_decides_weights_prompts_and_completions():
    module, documents = module_and_first_batch("seed=7")
    same_module, same_documents = module_and_first_batch("seed=7")
    other_module, other_documents = module_and_first_batch("seed=8")
    assert_equal([d.tokens for d in documents], [d.tokens for d in same_documents])
    assert torch.equal(module.policy.head.weight, same_module.policy.head.weight)
    assert not torch.equal(module.policy.head.weight, other_module.policy.head.weight)
    for seed, batch in ((7, documents), (8, other_documents)):
        task = make_task(ReverseTaskSettings(num_digits=3), seed)
        prompts = [prompt_of(module, document) for document in batch[::4]]
        assert prompts == [task.prompt(i).text for i in range(4)]


@key_test("rollout/policy.name", "rollout/recorded.name")
def documents_are_sampled_or_read_from_a_file(tmp_path: Path):
    assert first_batch("rollout=policy")[0].name == "prompt 0, completion 0"
    assert recorded_steps(tmp_path)[0][0].name == "rollouts.jsonl:1"


@key_test("rollout/policy.prompts_per_batch", "rollout/policy.group_size")
def a_batch_has_as_many_prompts_and_completions_of_each_as_asked():
    for num_prompts, group_size in ((2, 3), (3, 5)):
        documents = first_batch(
            f"rollout.prompts_per_batch={num_prompts}", f"rollout.group_size={group_size}"
        )
        expected = [i // group_size for i in range(num_prompts * group_size)]
        assert [document.group for document in documents] == expected


@key_test("rollout/policy.max_completion_length")
def completions_end_by_themselves_or_are_truncated_at_the_limit():
    for limit in (4, 9):
        module, documents = module_and_first_batch(f"rollout.max_completion_length={limit}")
        eos = module.policy.tokenizer.eos_token_id
        assert max(document.num_trained for document in documents) == limit
        for document in documents:
            ends_by_itself = int(document.tokens[-1]) == eos
            assert ends_by_itself or document.num_trained == limit
            assert document.truncated is not ends_by_itself


@key_test("rollout/policy.overlong_buffer", "rollout/policy.overlong_penalty")
def the_overlong_penalty_grows_over_the_buffer_before_the_limit():
    """Completions have at most 4 tokens. The reward without the penalty stays in task_reward."""
    plain = first_batch()
    assert len({document.num_trained for document in plain}) > 2
    for buffer, penalty, penalty_by_length in (
        (2, 1.0, {3: 0.5, 4: 1.0}),
        (4, 3.0, {1: 0.75, 2: 1.5, 3: 2.25, 4: 3.0}),
    ):
        penalised = first_batch(
            f"rollout.overlong_buffer={buffer}", f"rollout.overlong_penalty={penalty}"
        )
        for document, original in zip(penalised, plain, strict=True):
            expected = original.reward - penalty_by_length.get(document.num_trained, 0)
            assert document.task_reward == original.reward
            assert document.reward == expected
    assert {document.task_reward for document in plain} == {None}


@key_test("rollout/policy.mixed")
def a_group_is_mixed_by_its_rewards_or_by_its_exact_matches():
    """No completion is right. By exact matches no group is mixed: the prompts of two of three
    rounds are dropped, and the earliest are kept."""
    overrides = ("rollout.max_sampling_rounds=3", "rollout.mixed={}")
    by_match = first_batch(overrides[0], overrides[1].format("exact_match"))
    by_reward = first_batch(overrides[0], overrides[1].format("reward"))
    assert not any(document.exact_match for document in [*by_match, *by_reward])
    assert {document.group for document in by_match} == {0, 1, 2, 3}
    assert {document.group for document in by_reward} != {0, 1, 2, 3}
    assert by_match[0].dropped_prompt_fraction == 8 / 12
    assert by_reward[0].dropped_prompt_fraction != 8 / 12


@key_test("rollout/policy.uninformative")
def documents_of_groups_with_equal_rewards_are_left_out_if_asked():
    def left_out_and_equal(value: str) -> tuple[list[bool], list[bool]]:
        """Return for each document whether it is left out, and whether its group has one reward."""
        _, loader = module_and_steps(f"rollout.uninformative={value}")
        source = loader.source
        documents = [source.document(place) for place in range(source.batch_size)]
        rewards = defaultdict(set)
        for document in documents:
            rewards[document.group].add(document.reward)
        equal = [len(rewards[document.group]) == 1 for document in documents]
        return [document.left_out for document in documents], equal

    left_out, _ = left_out_and_equal("train")
    assert not any(left_out)
    left_out, equal = left_out_and_equal("drop")
    assert left_out == equal
    assert any(left_out)


@key_test("rollout/policy.passes", "rollout/policy.pass_order")
def a_batch_is_trained_as_often_as_asked_in_the_same_order_or_in_others():
    def names(*overrides: str) -> list[list[str]]:
        """Return the documents of each step; a batch is one step of a pass."""
        _, loader = module_and_steps("accumulation.docs_per_step=16", *overrides)
        return [[document.name for document in step.documents] for step in loader]

    once = names()
    assert len({tuple(step) for step in once}) == 6
    assert names("rollout.passes=3") == [once[0]] * 3 + [once[1]] * 3
    shuffled = names("rollout.passes=3", "rollout.pass_order=shuffled")
    assert [sorted(step) for step in shuffled] == [sorted(once[0])] * 3 + [sorted(once[1])] * 3
    assert len({tuple(step) for step in shuffled}) > 2


@key_test("sampler/transformers.name")
def the_sampler_is_that_of_its_name():
    _, loader = module_and_steps("sampler=transformers")
    assert type(sampler_of(loader)).__name__ == "TransformersSampler"


@key_test("sampler/transformers.gpus")
def each_gpu_of_the_sampler_gets_a_copy_and_must_exist():
    for gpus in ([1], [2, 1]):
        override = f"sampler.gpus={gpus}".replace(" ", "")
        config = config_of(*settings(override, "trainer.device=auto"))
        assert copies_of(config) == gpus
        report = Report()
        check_machine(config, report)
        assert "needs GPUs of this machine (got 0 of them)" in " ".join(report.problems)


@key_test("sampler/transformers.max_sequences")
def at_most_max_sequences_pass_the_model_at_once_and_all_are_completed():
    """A batch has 16 completions. Their log-probs are those of the model's logits."""
    for value, expected in (("null", {16}), ("5", {5, 1}), ("16", {16}), ("17", {16})):
        module, loader = module_and_steps(
            f"sampler.max_sequences={value}", "rollout.old_log_probs=sampling"
        )
        sizes = set()

        def record_size(_: object, inputs: object, out: torch.Tensor, sizes: set = sizes) -> None:
            sizes.add(len(out))

        module.policy.head.register_forward_hook(record_size)
        steps = [*itertools.islice(loader, 2)]
        documents = [document for step in steps for document in step.documents]
        assert sizes == expected
        names = [f"prompt {i // 4}, completion {i % 4}" for i in range(16)]
        assert [document.name for document in documents] == names
        for document in documents:
            log_probs = logits_of(module, document)[:-1].detach().log_softmax(-1)
            completion = document.tokens[document.loss_mask]
            expected_log_probs = log_probs[document.loss_mask[1:]].gather(-1, completion[:, None])
            torch.testing.assert_close(
                document.old_log_probs.double(), expected_log_probs[:, 0], rtol=0, atol=1e-5
            )


@key_test("rollout/recorded.path")
def recorded_documents_are_those_of_the_path(tmp_path: Path):
    for name, tokens in (("a", [5, 1, 2, 3, 4]), ("b", [6, 1, 2, 3, 4])):
        (tmp_path / name).mkdir()
        steps = recorded_steps(tmp_path / name, token_ids=tokens)
        documents = [document for step in steps for document in step]
        assert len(documents) == 10
        assert all(document.tokens.tolist() == tokens for document in documents)


@key_test("rollout/recorded.temperature")
def logits_are_divided_by_the_temperature_of_the_recorded_rollouts(tmp_path: Path):
    recorded = ("rollout=recorded", f"rollout.path={rows_file(tmp_path)}")
    losses = []
    for temperature in (0.5, 1.0, 2.0):
        overrides = [*recorded, f"rollout.temperature={temperature}"]
        losses.append(loss_as_specified(overrides, temperature=temperature))
    assert len({round(loss, 6) for loss in losses}) == 3
