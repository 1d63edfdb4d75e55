"""Conversations as documents: tokens in, tokens out, drawn alike however turns are batched, trained
as far as drawn."""

import functools

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

from pgtoolkit.batch import pack
from pgtoolkit.comparison.tokens_step import make_again
from pgtoolkit.completion import Request
from pgtoolkit.config.validate import validate
from pgtoolkit.runs.completion_files import read_completions
from pgtoolkit.runs.records import read_evaluations
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.tasks.shuffle import seed_of
from pgtoolkit.training.train import train

ENVIRONMENTS = "tasks.environments_for_tests"
KEPT = [setting for setting in SHORT if not setting.startswith("task.")]
STOPS = "abcdefghijklm012345"
TALK = (
    *(
        "task=conversation",
        f"task.environment={ENVIRONMENTS}.Counting",
        "rollout.max_completion_length=16",
    ),
    *("accumulation.max_tokens=64", f"rollout.stop={[*STOPS]}", "rollout.keep_completions=16"),
    "task.options={rounds: 1}",
)


def documents_of(*overrides, device="cpu"):
    """Of the first batch of small settings; larger weights, so that what was said before
    matters."""
    module, loader = module_and_loader(*last_of_each_key(*KEPT, *TALK, *overrides), dtype=None)
    module.to(device)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(20 if weight.ndim > 1 else 1)
    try:
        return module, [loader.source.document(place) for place in range(16)]
    finally:
        loader.source.close()


@pytest.fixture(scope="module")
def sampled():
    return documents_of("rollout.old_log_probs=sampling")


def test_a_conversation_is_one_document(sampled):
    """Its tokens are those of the messages; what the environment said is not trained, and begins
    after each turn."""
    module, documents = sampled
    decode, several = module.policy.tokenizer.decode, 0
    for document in documents:
        runs, mask = [], document.loss_mask.tolist()
        for place, drawn in enumerate(mask):
            if not runs or mask[place - 1] != drawn:
                runs.append([])
            runs[-1].append(place)
        prompt, *rest = (decode(document.tokens[places]) for places in runs)
        assert prompt == f"{seed_of(0, document.group) % 10}="
        assert rest[1::2] == [f"+{1 + i}" for i in range(len(rest) // 2)]
        assert all(text.endswith(("<end>", *STOPS)) for text in rest[:-1:2])
        turns, answer_tokens = (len(rest) + 1) // 2, sum(map(len, runs[2::2]))
        assert document.measures["turns"] == document.measures["environment/answers"] == turns
        assert document.measures["environment_tokens"] == answer_tokens == 2 * (turns - 1)
        assert document.truncated is (document.measures["ended_by_length_fraction"] == 1)
        assert len(document.tokens) <= 2 + 16
        last = rest[-1].removesuffix("<end>").rstrip(STOPS)
        assert document.reward == len(last)
        several += turns > 1
    assert several >= 4
    assert {document.truncated for document in documents} == {True, False}


def test_each_token_has_the_log_prob_that_it_was_drawn_with(sampled):
    module, documents = sampled
    batch = pack(documents)
    log_probs = module.log_probs(batch).cpu()[batch.labels >= 0]
    torch.testing.assert_close(
        log_probs, torch.cat([d.old_log_probs for d in documents]), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "more",
    [
        ["sampler.max_sequences=3"],
        ["sampler.static_cache=true"],
        ["model.max_positions=18"],
        ["task.environment_processes=2", "task.environment_seconds=30"],
    ],
    ids=["few at once", "static", "no position to spare", "processes"],
)
def test_turns_do_not_depend_on_what_is_sampled_beside_them(sampled, more):
    positions = any(setting.startswith("model.") for setting in more)
    alone = "sampler.max_sequences=1"
    _, expected = (
        documents_of("rollout.old_log_probs=sampling", more[0], alone) if positions else sampled
    )
    _, documents = documents_of("rollout.old_log_probs=sampling", *more)
    assert_equal([d.tokens for d in documents], [d.tokens for d in expected])
    assert_equal([d.loss_mask for d in documents], [d.loss_mask for d in expected])


@pytest.mark.gpu
@pytest.mark.parametrize("static", ["true", "false"])
def test_a_gpu_says_what_a_cpu_says(static):
    """In float32, in a CUDA graph of each token or in `generate`, with rows that go on further than
    others."""
    chosen = (
        "rollout.old_log_probs=sampling",
        f"sampler.static_cache={static}",
        "trainer.device=cpu",
    )
    expected, on_gpu = (documents_of(*chosen, device=device)[1] for device in ("cpu", "cuda"))
    for document, on_cpu in zip(on_gpu, expected, strict=True):
        assert document.tokens.tolist() == on_cpu.tokens.tolist()
        torch.testing.assert_close(document.old_log_probs, on_cpu.old_log_probs, rtol=0, atol=1e-2)


def test_each_turn_has_a_seed_of_its_own_and_the_tokens_so_far(monkeypatch):
    calls, complete = [], TransformersSampler.complete

    def noted(self, requests, more=False):
        calls.append((requests, more))
        return complete(self, requests, more)

    monkeypatch.setattr(TransformersSampler, "complete", noted)
    _, documents = documents_of()
    (first, _), *later, (last, more) = calls
    assert [request.completions for request in first] == [4] * 4
    assert [request.seed for request in first] == [seed_of(0, number) for number in range(4)]
    assert (last, more) == ([], False)
    assert [more for _, more in calls[:-1]] == [True] * (len(calls) - 1)
    for turn, (requests, _) in enumerate(later, 1):
        for request in requests:
            places = [
                (document.group, i % 4)
                for i, document in enumerate(documents)
                if request.seed == seed_of(seed_of(0, document.group), (turn << 32) + i % 4)
            ]
            assert len(places) == 1
            group, place = places[0]
            tokens = documents[4 * group + place].tokens.tolist()
            assert request.tokens == tokens[: len(request.tokens)]
            assert (request.completions, request.max_tokens) == (1, 16 - (len(request.tokens) - 2))


def test_completions_that_must_end_early_are_those_of_their_own_seed():
    _, loader = module_and_loader(
        *last_of_each_key(*KEPT, "rollout.max_completion_length=12", "accumulation.max_tokens=64"),
        dtype=None,
    )
    sampler, prompts = sampler_of(loader), [[1, 2], [3, 4, 5, 6]]
    full = sampler.complete([Request(prompt, 2, seed) for seed, prompt in enumerate(prompts)])
    cut = [Request(prompts[0], 2, 0, 3), Request(prompts[1], 2, 1)]
    for completion, expected, limit in zip(
        sampler.complete(cut), full, (3, 3, 12, 12), strict=True
    ):
        assert torch.equal(completion.tokens, expected.tokens[:limit])
        ended = len(expected.tokens) < limit or (
            expected.finish_reason == "stop" and len(expected.tokens) == limit
        )
        assert completion.finish_reason == ("stop" if ended else "length")


def test_conversations_without_end_are_bounded():
    endless = f"task.environment={ENVIRONMENTS}.Endless"
    for more, ends in (
        (["task.max_turns=2", "task.options={}"], {"max_turns", "length"}),
        (["task.max_turns=99", "task.options={message: 'abcdefghijklmnop'}"], {"length"}),
    ):
        _, documents = documents_of(endless, *more)
        fractions = [{k for k in ends if d.measures[f"ended_by_{k}_fraction"]} for d in documents]
        assert all(len(ended_by) == 1 for ended_by in fractions)
        assert set().union(*fractions) == ends
        assert max(len(d.tokens) for d in documents) <= 2 + 16
        assert max(d.measures["turns"] for d in documents) == (2 if len(ends) == 2 else 1)
        # a message that nobody can answer is no part of it
        assert all(d.loss_mask[-1] for d in documents)


FULL = (
    *("rollout.prompts_per_batch=3", "rollout.group_size=2", "accumulation.docs_per_step=3"),
    "rollout.max_sampling_rounds=3",
    *("evaluation.every=2", "evaluation.prompts_per_set=5", "evaluation.completions_per_prompt=2"),
    *("kl=k3", "kl.coefficient=0.1", "optimizer.learning_rate=0.01", "task.options={rounds: 2}"),
)
STALE = (
    "rollout.max_staleness=2",
    "rollout.old_log_probs=sampling",
    "optimizer.learning_rate=0.01",
)


def trained(folder, *overrides, resume=False):
    config = config_of(*KEPT, *TALK, *overrides)
    assert validate(config)[1].problems == []
    train(config, folder, resume=resume, overrides=list(overrides))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs of one process, by their settings."""
    return functools.cache(
        lambda *settings: trained(tmp_path_factory.mktemp("one") / "run", *settings)
    )


def rows_of(path):
    """Completions as they were read, and seen to be of several turns."""
    rows = read_completions(path)
    assert any("+1" in row.completion for row in rows)
    assert all(row.tokens < len(row.completion) for row in rows if "+1" in row.completion)
    return rows


def test_metrics_and_kept_completions_tell_of_turns(whole):
    rows = metrics_of(whole(*FULL))
    for row in rows:
        assert 1 <= row["turns"] <= 3
        assert row["environment_tokens"] == pytest.approx(2 * (row["turns"] - 1))
        ends = [row[f"ended_by_{end}_fraction"] for end in ("environment", "max_turns", "length")]
        assert sum(ends) == pytest.approx(1)
        assert row["truncated_fraction"] == ends[2]
        assert row["environment/answers"] == row["turns"]
    assert len({row["turns"] for row in rows}) > 1
    assert max(row["dropped_prompt_fraction"] for row in rows) > 0
    for kept in rows_of(whole(*FULL) / "completions/steps_000001-000100.parquet"):
        assert kept.prompt == f"{kept.prompt[0]}="
    measured = read_evaluations(whole(*FULL))
    assert [row["step"] for row in measured] == [0, 2, 4, 6]
    assert all(
        1 < row["turns"] < 3 and row["environment/answers"] == row["turns"] for row in measured
    )
    rows_of(whole(*FULL) / "completions/evaluation_held_out_000000.parquet")


@pytest.mark.parametrize("settings", [FULL, STALE], ids=["full", "staleness"])
def test_a_resumed_run_goes_on_to_the_last_bit(whole, tmp_path, settings):
    cut = copy_as_of(whole(*settings), 3, tmp_path / "run")
    trained(cut, *settings, resume=True)
    assert metrics_of(cut) == metrics_of(whole(*settings))
    assert_equal(*(checkpoint_of(folder, 6)["model"] for folder in (cut, whole(*settings))))


def test_recorded_conversations_train_the_same(tmp_path):
    """A batch of two updates: the first trains on it as it was sampled, the second run reads it."""
    settings = ("trainer.max_steps=2", "optimizer.learning_rate=0.01")
    sampled_run = trained(tmp_path / "one", *settings, f"rollout.save_path={tmp_path / 'recorded'}")
    without = [s for s in KEPT if not s.startswith("rollout.")]
    recorded = [
        "rollout=recorded",
        f"rollout.path={tmp_path / 'recorded'}",
        "advantage=given",
        "task=conversation",
    ]
    recorded += [
        f"task.environment={ENVIRONMENTS}.Counting",
        "accumulation.max_tokens=64",
        "aggregation.divisor=16",
    ]
    config = config_of(*without, *settings, *recorded, "rollout.shuffle=false")
    assert validate(config)[1].problems == []
    train(config, tmp_path / "two")
    losses, expected = (
        [row["loss"] for row in metrics_of(tmp_path / name)] for name in ("two", "one")
    )
    assert losses == pytest.approx(expected, abs=1e-9)
    assert_equal(*(checkpoint_of(tmp_path / name, 2)["model"] for name in ("two", "one")))
    assert (
        len(
            {
                len(document["tokens"])
                for document in checkpoint_of(sampled_run, 2)["data"]["source"]["documents"]
            }
        )
        > 1
    )


def test_a_step_is_made_again_with_its_conversations(whole):
    config = config_of(*KEPT, *TALK, *FULL)
    made = make_again(config, None, 1)
    (kept,) = [row for row in metrics_of(whole(*FULL)) if row["step"] == 1]
    assert {name: made.metrics[name] for name in ("loss", "reward", "turns")} == pytest.approx(
        {name: kept[name] for name in ("loss", "reward", "turns")}, rel=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "sizes", "more"),
    [
        (STALE, {"data_parallel": 2}, []),
        (FULL, {"data_parallel": 2}, ["parallelism.shard=true"]),
        (("evaluation.every=3",), {"tensor_parallel": 2}, []),
    ],
    ids=["ddp, staleness", "fsdp", "tensor"],
)
def test_ranks_make_the_run_of_one_process(whole, tmp_path, settings, sizes, more):
    on_ranks = run_on_ranks(tmp_path / "run", [*KEPT, *TALK, *settings, *more], **sizes)
    expected = whole(*settings)
    assert_runs_close(on_ranks, expected, 1e-6)
    for step in (2, 6):
        batches = [
            checkpoint_of(folder, step)["data"]["source"]["documents"]
            for folder in (on_ranks, expected)
        ]
        assert_equal(*([document["tokens"] for document in batch] for batch in batches))
        assert_equal(*([document["loss_mask"] for document in batch] for batch in batches))
    for path in (expected / "completions").glob("evaluation_*"):
        assert read_completions(on_ranks / "completions" / path.name) == read_completions(path)


@pytest.mark.slow
def test_a_server_is_asked_for_each_turn_with_its_room(tmp_path):
    """The strict server of the tests: it refuses what vLLM would, and the trainer checks each
    log-prob."""
    sampler = (
        "sampler=vllm",
        f"sampler.executable={COMMAND} --marks {tmp_path}/marks",
        "trainer.device=cpu",
    )
    rows = metrics_of(trained(tmp_path / "run", *sampler, "evaluation.every=3"))
    assert max(row["turns"] for row in rows) > 1
    for row in rows[::2]:
        assert abs(row["max_ratio_new_old"] - 1) < 1e-4
    for document in checkpoint_of(tmp_path / "run", 1)["data"]["source"]["documents"]:
        assert len(document["tokens"]) <= 2 + 16
        assert int(document["loss_mask"].sum()) == len(document["advantages"])
