"""Rows of `config/test_keys.py`: the seed, and where rollouts come from."""

from __future__ import annotations

import itertools

import torch
from builders.runs import assert_equal, config_of, sampler_of

from keys import (
    key,
    logits_of,
    loss_as_specified,
    module_and_steps,
    recorded,
    rows_file,
    settings,
)
from pgtoolkit.config.counts import copies_of
from pgtoolkit.system.report import Report
from pgtoolkit.tasks.from_config import make_task
from pgtoolkit.training.machine import check_machine


def sampled(*overrides):
    """The module and the documents of its first step, which is a whole batch."""
    module, loader = module_and_steps(*overrides, "accumulation.docs_per_step=1000")
    return module, next(iter(loader)).documents


def prompt_of(module, document) -> str:
    return module.policy.tokenizer.decode(document.tokens[~document.loss_mask])


@key("seed")
def seed():
    (module, documents), (same, again), (other, others) = (sampled(f"seed={s}") for s in (7, 7, 8))
    assert_equal([d.tokens for d in documents], [d.tokens for d in again])
    assert torch.equal(module.policy.head.weight, same.policy.head.weight)
    assert not torch.equal(module.policy.head.weight, other.policy.head.weight)
    for number, found in ((7, documents), (8, others)):
        task = make_task(module.config.task, number)
        assert [prompt_of(module, d) for d in found[::4]] == [task.prompt(i).text for i in range(4)]


@key("rollout/policy.name", "rollout/recorded.name")
def rollout_name(tmp_path):
    assert sampled("rollout=policy")[1][0].name == "prompt 0, completion 0"
    assert recorded(tmp_path)[0][0].name == "rollouts.jsonl:1"


@key("rollout/policy.prompts_per_batch", "rollout/policy.group_size")
def batch():
    for prompts_per_batch, size in ((2, 3), (3, 5)):
        chosen = [f"rollout.prompts_per_batch={prompts_per_batch}", f"rollout.group_size={size}"]
        _, documents = sampled(*chosen)
        assert [document.group for document in documents] == [
            i // size for i in range(prompts_per_batch * size)
        ]


@key("rollout/policy.max_completion_length")
def max_completion_length():
    for length in (4, 9):
        module, documents = sampled(f"rollout.max_completion_length={length}")
        ends = [
            int(document.tokens[-1]) == module.policy.tokenizer.eos_token_id
            for document in documents
        ]
        assert max(document.num_trained for document in documents) == length
        assert all(
            end or document.num_trained == length
            for end, document in zip(ends, documents, strict=True)
        )
        assert [not end for end in ends] == [document.truncated for document in documents]


def log_probs_of(module, document, temperature=1.0):
    """(completion's tokens, V), by the model's own logits."""
    return (
        (logits_of(module, document)[:-1] / temperature)
        .log_softmax(-1)[document.loss_mask[1:]]
        .detach()
    )


def completion_of(document):
    return document.tokens[document.loss_mask][:, None]


def assert_old_log_probs(document, expected):
    found = document.old_log_probs.double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@key("rollout/policy.overlong_buffer", "rollout/policy.overlong_penalty")
def overlong():
    """Of completions of at most 4 tokens; their own rewards stay known."""
    plain = sampled()[1]
    assert len({document.num_trained for document in plain}) > 2
    for buffer, most, expected in (
        (2, 1.0, {3: 0.5, 4: 1.0}),
        (4, 3.0, {1: 0.75, 2: 1.5, 3: 2.25, 4: 3.0}),
    ):
        chosen = [f"rollout.overlong_buffer={buffer}", f"rollout.overlong_penalty={most}"]
        for document, other in zip(sampled(*chosen)[1], plain, strict=True):
            assert document.task_reward == other.reward
            assert document.reward == other.reward - expected.get(document.num_trained, 0)
    assert {document.task_reward for document in plain} == {None}


@key("rollout/policy.mixed")
def mixed():
    """Nothing is right yet: by exact matches all prompts but the earliest are dropped, in each of
    three rounds."""
    for chosen, groups in (("exact_match", {0, 1, 2, 3}), ("reward", None)):
        documents = sampled("rollout.max_sampling_rounds=3", f"rollout.mixed={chosen}")[1]
        found = {document.group for document in documents}
        assert not any(document.exact_match for document in documents)
        assert (found == groups) is (chosen == "exact_match")
        assert (documents[0].dropped_prompt_fraction == 8 / 12) is (chosen == "exact_match")


@key("rollout/policy.uninformative")
def uninformative():
    """Prompts whose completions all have the same reward are in no step."""
    kept = []
    for chosen in ("train", "drop"):
        _, loader = module_and_steps(f"rollout.uninformative={chosen}")
        source = loader.source
        documents = [source.document(place) for place in range(source.batch_size)]
        kept.append([document.left_out for document in documents])
        of_group = {}
        for document in documents:
            of_group.setdefault(document.group, set()).add(document.reward)
        alike = [len(of_group[document.group]) == 1 for document in documents]
        assert kept[-1] == (alike if chosen == "drop" else [False] * len(documents))
    assert any(kept[1])


@key("sampler/transformers.name")
def sampler_name():
    assert (
        type(sampler_of(module_and_steps("sampler=transformers")[1])).__name__
        == "TransformersSampler"
    )


@key("sampler/transformers.gpus")
def sampler_gpus():
    """A process for each, that sees this GPU alone; where there is none, it is refused."""
    for numbers in ([1], [2, 1]):
        config = config_of(
            *settings(f"sampler.gpus={numbers}".replace(" ", ""), "trainer.device=auto")
        )
        assert copies_of(config) == numbers
        report = Report()
        check_machine(config, report)
        assert "needs GPUs of this machine (got 0 of them)" in " ".join(report.problems)


@key("sampler/transformers.max_sequences")
def max_sequences():
    """Of 16 completions so many pass the model at once, and all are there, by prompt."""
    for value, expected in (("null", {16}), ("5", {5, 1}), ("16", {16}), ("17", {16})):
        module, loader = module_and_steps(
            f"sampler.max_sequences={value}", "rollout.old_log_probs=sampling"
        )
        found = set()
        module.policy.head.register_forward_hook(
            lambda _, inputs, out, found=found: found.add(len(out))
        )
        documents = [
            document for step in itertools.islice(loader, 2) for document in step.documents
        ]
        assert found == expected
        assert [document.name for document in documents] == [
            f"prompt {i // 4}, completion {i % 4}" for i in range(16)
        ]
        for document in documents:
            assert_old_log_probs(
                document, log_probs_of(module, document).gather(-1, completion_of(document))[:, 0]
            )


@key("rollout/recorded.path")
def recorded_path(tmp_path):
    for name, tokens in (("a", [5, 1, 2, 3, 4]), ("b", [6, 1, 2, 3, 4])):
        (tmp_path / name).mkdir()
        steps = recorded(tmp_path / name, token_ids=tokens)
        assert all(document.tokens.tolist() == tokens for step in steps for document in step)


@key("rollout/recorded.temperature")
def recorded_temperature(tmp_path):
    path = f"rollout.path={rows_file(tmp_path)}"
    losses = [
        loss_as_specified(
            ["rollout=recorded", path, f"rollout.temperature={value}"], temperature=value
        )
        for value in (0.5, 1.0, 2.0)
    ]
    assert len({round(loss, 6) for loss in losses}) == 3
