"""Conversations as documents: tokens, masks, log-probs by the model's own pass, and runs
that sample, resume and record them."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders.parallel_runs import assert_runs_close, run_on_ranks
from builders.runs import (
    SHORT,
    assert_equal,
    checkpoint_of,
    config_of,
    copy_as_of,
    last_of_each_key,
    metrics_of,
    module_and_loader,
    sampler_of,
)
from builders.vllm_servers import COMMAND

from pgtoolkit.assembly.train import train
from pgtoolkit.batch import pack
from pgtoolkit.comparison.tokens_step import make_again
from pgtoolkit.completion import Completion, Request
from pgtoolkit.config.validate import validate
from pgtoolkit.document import Document
from pgtoolkit.runs.completion_files import CompletionRow, read_completions
from pgtoolkit.runs.records import read_evaluations
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.tasks.shuffle import seed_of
from pgtoolkit.training.module import PolicyGradientModule

ENVIRONMENTS = "tasks.environments_for_tests"
STOPS = "abcdefghijklm012345"
"""Characters that end a turn; with so many of them conversations have several turns."""
CONVERSATION = (
    *(setting for setting in SHORT if not setting.startswith("task.")),
    "task=conversation",
    f"task.environment={ENVIRONMENTS}.Counting",
    "rollout.max_completion_length=16",
    "accumulation.max_tokens=64",
    f"rollout.stop={[*STOPS]}",
    "rollout.keep_completions=16",
    "task.options={rounds: 1}",
)


def first_batch(
    *overrides: str, device: str = "cpu"
) -> tuple[PolicyGradientModule, list[Document]]:
    """Return a module with the documents of its first batch. Its weights are larger than at the
    start of a run, so that completions depend on the messages before them."""
    settings = last_of_each_key(*CONVERSATION, *overrides)
    module, loader = module_and_loader(*settings, dtype=None)
    module.to(device)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(20 if weight.ndim > 1 else 1)
    try:
        return module, [loader.source.document(place) for place in range(16)]
    finally:
        loader.source.close()


@pytest.fixture(scope="module")
def sampled() -> tuple[PolicyGradientModule, list[Document]]:
    return first_batch("rollout.old_log_probs=sampling")


def test_a_conversation_is_one_document_of_which_the_completions_are_trained(sampled):
    """The messages of the environment, which follow each turn, are not trained."""
    module, documents = sampled
    decode = module.policy.tokenizer.decode
    turns_of_documents = []
    for document in documents:
        tokens = document.tokens.tolist()
        mask = document.loss_mask.tolist()
        runs = [
            [token for token, _ in run]
            for _, run in itertools.groupby(zip(tokens, mask, strict=True), lambda pair: pair[1])
        ]
        prompt, *messages = [decode(run) for run in runs]
        completions = messages[0::2]
        answers = messages[1::2]
        assert prompt == f"{seed_of(0, document.group) % 10}="
        assert answers == [f"+{1 + number}" for number in range(len(answers))]
        assert all(completion.endswith(("<end>", *STOPS)) for completion in completions[:-1])
        turns = len(completions)
        measures = document.measures
        assert measures["turns"] == measures["environment/answers"] == turns
        num_answer_tokens = sum(len(run) for run in runs[2::2])
        assert measures["environment_tokens"] == num_answer_tokens == 2 * (turns - 1)
        assert document.truncated is (measures["ended_by_length_fraction"] == 1)
        assert len(tokens) <= 2 + 16
        last = messages[-1].removesuffix("<end>").rstrip(STOPS)
        assert document.reward == len(last)
        turns_of_documents.append(turns)
    assert sum(turns > 1 for turns in turns_of_documents) >= 4
    assert {document.truncated for document in documents} == {True, False}


def test_each_token_has_the_log_prob_that_it_was_drawn_with(sampled):
    module, documents = sampled
    batch = pack(documents)
    log_probs = module.log_probs(batch).cpu()[batch.labels >= 0]
    expected = torch.cat([document.old_log_probs for document in documents])
    torch.testing.assert_close(log_probs, expected, rtol=1e-4, atol=1e-4)


def assert_same_conversations(documents: list[Document], expected: list[Document]) -> None:
    for document, expected_document in zip(documents, expected, strict=True):
        assert torch.equal(document.tokens, expected_document.tokens)
        assert torch.equal(document.loss_mask, expected_document.loss_mask)


@pytest.mark.parametrize(
    "overrides",
    [
        ["sampler.max_sequences=3"],
        ["sampler.static_cache=true"],
        ["task.environment_processes=2", "task.environment_seconds=30"],
    ],
    ids=["few sequences", "static cache", "processes"],
)
def test_turns_do_not_depend_on_how_they_are_sampled(sampled, overrides):
    _, expected = sampled
    _, documents = first_batch("rollout.old_log_probs=sampling", *overrides)
    assert_same_conversations(documents, expected)


def test_turns_do_not_depend_on_their_batch_if_the_model_has_no_further_position():
    overrides = ("rollout.old_log_probs=sampling", "model.max_positions=18")
    _, expected = first_batch(*overrides, "sampler.max_sequences=1")
    _, documents = first_batch(*overrides)
    assert_same_conversations(documents, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("static_cache", ["true", "false"])
def test_a_gpu_samples_the_conversations_of_a_cpu(static_cache):
    """In float32, by a CUDA graph for each token or by `generate`, with rows of different
    lengths."""
    overrides = (
        "rollout.old_log_probs=sampling",
        f"sampler.static_cache={static_cache}",
        "trainer.device=cpu",
    )
    _, expected = first_batch(*overrides, device="cpu")
    _, documents = first_batch(*overrides, device="cuda")
    for document, on_cpu in zip(documents, expected, strict=True):
        assert document.tokens.tolist() == on_cpu.tokens.tolist()
        torch.testing.assert_close(document.old_log_probs, on_cpu.old_log_probs, rtol=0, atol=1e-2)


def test_each_turn_is_requested_with_its_own_seed_and_the_tokens_before_it(monkeypatch):
    """`more` says that further turns of the batch follow; the last call has no requests."""
    complete = TransformersSampler.complete
    calls = []

    def noted_complete(
        self: TransformersSampler, requests: list[Request], more: bool = False
    ) -> list[Completion]:
        calls.append((requests, more))
        return complete(self, requests, more)

    monkeypatch.setattr(TransformersSampler, "complete", noted_complete)
    _, documents = first_batch()
    assert all(more is True for _, more in calls[:-1])
    assert calls[-1] == ([], False)
    first, *later = [requests for requests, _ in calls[:-1]]
    assert [request.completions for request in first] == [4] * 4
    assert [request.seed for request in first] == [seed_of(0, number) for number in range(4)]
    for turn, requests in enumerate(later, 1):
        document_of_seed = {
            seed_of(seed_of(0, document.group), (turn << 32) + place % 4): document
            for place, document in enumerate(documents)
        }
        assert len(document_of_seed) == 16
        for request in requests:
            tokens = document_of_seed[request.seed].tokens.tolist()
            assert request.tokens == tokens[: len(request.tokens)]
            assert request.completions == 1
            assert request.max_tokens == 16 - (len(request.tokens) - 2)


def test_a_shorter_limit_cuts_a_completion_off_without_changing_its_tokens():
    _, loader = module_and_loader(
        *last_of_each_key(
            *(setting for setting in SHORT if not setting.startswith("task.")),
            "rollout.max_completion_length=12",
            "accumulation.max_tokens=64",
        ),
        dtype=None,
    )
    sampler = sampler_of(loader)
    first = [1, 2]
    second = [3, 4, 5, 6]
    full = sampler.complete([Request(first, 2, 0), Request(second, 2, 1)])
    limited = sampler.complete([Request(first, 2, 0, 3), Request(second, 2, 1)])
    for completion, expected, limit in zip(limited, full, (3, 3, 12, 12), strict=True):
        assert torch.equal(completion.tokens, expected.tokens[:limit])
        is_complete = len(expected.tokens) <= limit and expected.finish_reason == "stop"
        assert completion.finish_reason == ("stop" if is_complete else "length")


@pytest.mark.parametrize(
    ("overrides", "ends", "max_turns"),
    [
        (["task.max_turns=2", "task.options={}"], {"max_turns", "length"}, 2),
        (["task.max_turns=99", "task.options={message: 'abcdefghijklmnop'}"], {"length"}, 1),
    ],
    ids=["by turns", "by length"],
)
def test_endless_conversations_are_bounded_by_turns_and_by_length(
    overrides, ends, max_turns, caplog
):
    """A message that no completion can follow is left out of the document, and noted."""
    _, documents = first_batch(f"task.environment={ENVIRONMENTS}.Endless", *overrides)
    reasons = set()
    for document in documents:
        of_document = {end for end in ends if document.measures[f"ended_by_{end}_fraction"]}
        assert len(of_document) == 1
        reasons |= of_document
        assert document.loss_mask[-1]
    assert reasons == ends
    assert max(len(document.tokens) for document in documents) <= 2 + 16
    assert max(document.measures["turns"] for document in documents) == max_turns
    note = "a message of 16 tokens, which leaves no room for an answer"
    assert (note in caplog.text) is (max_turns == 1)


FULL = (
    "rollout.prompts_per_batch=3",
    "rollout.group_size=2",
    "accumulation.docs_per_step=3",
    "rollout.max_sampling_rounds=3",
    "evaluation.every=2",
    "evaluation.prompts_per_set=5",
    "evaluation.completions_per_prompt=2",
    "kl=k3",
    "kl.coefficient=0.1",
    "optimizer.learning_rate=0.01",
    "task.options={rounds: 2}",
)
ASYNCHRONOUS = (
    "rollout.max_staleness=2",
    "rollout.old_log_probs=sampling",
    "optimizer.learning_rate=0.01",
)


def train_in(folder: Path, *overrides: str, resume: bool = False) -> Path:
    config = config_of(*CONVERSATION, *overrides)
    assert validate(config)[1].problems == []
    train(config, folder, resume=resume, overrides=list(overrides))
    return folder


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from overrides to the run directory of a run of one process with them."""
    return functools.cache(
        lambda *overrides: train_in(tmp_path_factory.mktemp("single") / "run", *overrides)
    )


def assert_kept_conversations(path: Path) -> list[CompletionRow]:
    """Assert that some of the kept completions have several turns; return them all."""
    rows = read_completions(path)
    several = [row for row in rows if "+1" in row.completion]
    assert several
    assert all(row.tokens < len(row.completion) for row in several)
    return rows


def test_metrics_and_kept_completions_show_the_turns(run_of):
    run = run_of(*FULL)
    rows = metrics_of(run)
    for row in rows:
        assert 1 <= row["turns"] <= 3
        assert row["environment_tokens"] == pytest.approx(2 * (row["turns"] - 1))
        ends = [row[f"ended_by_{end}_fraction"] for end in ("environment", "max_turns", "length")]
        assert sum(ends) == pytest.approx(1)
        assert row["truncated_fraction"] == ends[2]
        assert row["environment/answers"] == row["turns"]
    assert len({row["turns"] for row in rows}) > 1
    assert max(row["dropped_prompt_fraction"] for row in rows) > 0
    for kept in assert_kept_conversations(run / "completions/steps_000001-000100.parquet"):
        assert kept.prompt == f"{kept.prompt[0]}="


def test_evaluations_show_the_turns(run_of):
    run = run_of(*FULL)
    evaluations = read_evaluations(run)
    assert [row["step"] for row in evaluations] == [0, 2, 4, 6]
    for row in evaluations:
        assert 1 < row["turns"] < 3
        assert row["environment/answers"] == row["turns"]
    assert_kept_conversations(run / "completions/evaluation_held_out_000000.parquet")


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [FULL, ASYNCHRONOUS], ids=["full", "asynchronous"])
def test_a_resumed_run_of_conversations_is_the_uninterrupted_one_to_the_bit(
    run_of, tmp_path, overrides
):
    uninterrupted = run_of(*overrides)
    resumed = copy_as_of(uninterrupted, 3, tmp_path / "run")
    train_in(resumed, *overrides, resume=True)
    assert metrics_of(resumed) == metrics_of(uninterrupted)
    assert_equal(checkpoint_of(resumed, 6)["model"], checkpoint_of(uninterrupted, 6)["model"])


def test_recorded_conversations_train_as_the_sampled_ones(tmp_path):
    """A batch of two updates: one run samples it, the other reads what was recorded."""
    overrides = ("trainer.max_steps=2", "optimizer.learning_rate=0.01")
    folder = tmp_path / "recorded"
    sampled_run = train_in(tmp_path / "sampled run", *overrides, f"rollout.save_path={folder}")
    config = config_of(
        *(setting for setting in SHORT if not setting.startswith(("task.", "rollout."))),
        *overrides,
        "rollout=recorded",
        f"rollout.path={folder}",
        "rollout.shuffle=false",
        "advantage=given",
        "task=conversation",
        f"task.environment={ENVIRONMENTS}.Counting",
        "accumulation.max_tokens=64",
        "aggregation.divisor=16",
    )
    assert validate(config)[1].problems == []
    recorded_run = tmp_path / "recorded run"
    train(config, recorded_run)
    losses = [row["loss"] for row in metrics_of(recorded_run)]
    expected = [row["loss"] for row in metrics_of(sampled_run)]
    assert losses == pytest.approx(expected, abs=1e-9)
    last = checkpoint_of(sampled_run, 2)
    assert_equal(checkpoint_of(recorded_run, 2)["model"], last["model"])
    lengths = {len(document["tokens"]) for document in last["data"]["source"]["documents"]}
    assert len(lengths) > 1


def test_pgtk_tokens_makes_a_step_of_conversations_again(run_of):
    step = make_again(config_of(*CONVERSATION, *FULL), None, 1)
    first = metrics_of(run_of(*FULL))[0]
    assert first["step"] == 1
    for name in ("loss", "reward", "turns"):
        assert step.metrics[name] == pytest.approx(first[name], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "ranks", "of_ranks"),
    [
        (ASYNCHRONOUS, {"data_parallel": 2}, []),
        (FULL, {"data_parallel": 2}, ["parallelism.shard=true"]),
        (("evaluation.every=3", "evaluation.prompts_per_set=5"), {"tensor_parallel": 2}, []),
    ],
    ids=["ddp, asynchronous", "fsdp", "tensor"],
)
def test_ranks_train_conversations_as_one_process_does(
    run_of, tmp_path, overrides, ranks, of_ranks
):
    settings = [*CONVERSATION, *overrides, *of_ranks, "trainer.checkpoint_every=2"]
    on_ranks = run_on_ranks(tmp_path / "run", settings, **ranks)
    single = run_of(*overrides)
    assert_runs_close(on_ranks, single, 1e-6)
    for step in (2, 6):
        documents = checkpoint_of(on_ranks, step)["data"]["source"]["documents"]
        expected = checkpoint_of(single, step)["data"]["source"]["documents"]
        for name in ("tokens", "loss_mask"):
            assert_equal(
                [document[name] for document in documents],
                [document[name] for document in expected],
            )
    for path in (single / "completions").glob("evaluation_*"):
        assert read_completions(on_ranks / "completions" / path.name) == read_completions(path)


@pytest.mark.slow
def test_a_server_is_asked_for_each_turn_with_the_tokens_that_are_left(tmp_path):
    """The stand-in for vLLM refuses what vLLM would, and the trainer checks each log-prob."""
    run = train_in(
        tmp_path / "run",
        "sampler=vllm",
        f"sampler.executable={COMMAND} --marks {tmp_path}/marks",
        "trainer.device=cpu",
        "trainer.max_steps=2",
        "evaluation.every=2",
        "evaluation.prompts_per_set=5",
    )
    rows = metrics_of(run)
    assert max(row["turns"] for row in rows) > 1
    for row in rows[::2]:
        assert abs(row["max_ratio_new_old"] - 1) < 1e-4
    for document in checkpoint_of(run, 1)["data"]["source"]["documents"]:
        assert len(document["tokens"]) <= 2 + 16
        assert int(document["loss_mask"].sum()) == len(document["advantages"])
