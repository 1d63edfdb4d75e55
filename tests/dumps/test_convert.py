"""pgtk convert: each system's dump, as its own code writes it, becomes the rows of what was sampled."""

import json
import math
import os
import pickle

import pyarrow.parquet as pq
import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from dumps.writers import (
    WRITERS,
    Rollout,
    nemo_rl,
    open_instruct,
    pipeline_rl,
    prime_rl,
    sampled,
    slime,
    slime_training,
    verifiers,
)

from pgtoolkit.cli import main

WITH_BOTH = ("nemo-rl", "prime-rl", "slime training")
WITH_ADVANTAGE = (*WITH_BOTH, "open-instruct")
EVERY = {**WRITERS, "slime training": slime_training}
del EVERY["miles"]  # writes what slime does


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A folder with a model."""
    return save_with_tokenizer(small_llama(initializer_range=0.6), tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def rollouts(policy):
    return sampled(small_llama(initializer_range=0.6))


def convert(kind, folder, out, *more):
    return main(["convert", kind.split()[0], str(folder), str(out), *more])


def rows_of(path):
    return pq.read_table(path).to_pylist()


@pytest.mark.parametrize("kind", EVERY)
def test_a_dump_becomes_the_rollouts_that_it_was_made_of(kind, rollouts, tmp_path, capsys):
    """Whichever system wrote them; with both kinds of log-probs where the dump has them."""
    EVERY[kind](tmp_path, rollouts)
    out = tmp_path / "out.parquet"
    assert convert(kind, tmp_path, out) == 0
    said = capsys.readouterr().out
    assert ("sampling_log_probs stand at the tokens of old_log_probs" in said) == (kind in WITH_BOTH)
    rows = rows_of(out)
    assert len(rows) == len(rollouts)
    for row, one in zip(rows, rollouts, strict=True):
        assert row["token_ids"] == one.prompt + one.response
        assert row["loss_mask"] == [False] * len(one.prompt) + [True] * len(one.response)
        old = one.trainer if kind in WITH_BOTH else one.sampler
        assert row["old_log_probs"][len(one.prompt) :] == pytest.approx(old, rel=1e-6)
        if kind in WITH_BOTH:
            assert row["sampling_log_probs"][len(one.prompt) :] == pytest.approx(one.sampler, rel=1e-6)
        assert ("sampling_log_probs" in row) == (kind in WITH_BOTH)
        assert ("advantage" in row) == (kind in WITH_ADVANTAGE)
        if kind in WITH_ADVANTAGE:
            assert set(row["advantage"][len(one.prompt) :]) == {one.advantage}
        assert row.get("reward") == (None if kind == "prime-rl" else one.reward)
        assert row.get("group_id") == (None if kind == "prime-rl" else one.group)


def next_tokens(_, values):
    """A list of log-probs that says at each place what belongs to the next token."""
    return [[*values[0][1:], 0.0]] if isinstance(values[0], list) else [*values[1:], 0.0]


def tokens_before(_, values):
    return [0.0, *values[:-1]]


@pytest.mark.parametrize(
    ("kind", "column", "change", "whose"),
    [
        ("nemo-rl", "generation_logprobs", next_tokens, "of the next token"),
        ("prime-rl", "inference_logprobs", tokens_before, "of the token before"),
        ("slime", "rollout_log_probs", next_tokens, "of the next token"),
        ("open-instruct", "logprobs", tokens_before, "of the token before"),
    ],
)
def test_log_probs_one_place_off_are_refused(kind, column, change, whose, policy, rollouts, tmp_path, capsys):
    """Told by the other log-probs of the dump, or by the policy that sampled; nothing is left behind."""
    WRITERS[kind](tmp_path, rollouts, **{column: change})
    model = [] if kind in WITH_BOTH else ["model=huggingface", f"model.path={policy}"]
    assert convert(kind, tmp_path, tmp_path / "out.parquet", *model) == 3
    name = "sampling_log_probs beside old_log_probs" if kind in WITH_BOTH else "old_log_probs"
    said = capsys.readouterr().err
    assert f"{name} needs the log-prob of each token itself (got that {whose} (correlations at places" in said
    assert not list(tmp_path.glob("*.parquet*"))
    assert not list(tmp_path.glob(".*"))


def test_the_policy_that_sampled_has_ratios_of_one(policy, rollouts, tmp_path, capsys):
    nemo_rl(tmp_path, rollouts)
    model = ["model=huggingface", f"model.path={policy}"]
    assert convert("nemo-rl", tmp_path, tmp_path / "out.parquet", *model) == 0
    said = capsys.readouterr().out
    assert "old_log_probs are the model's (correlations at places -1, 0, +1: " in said
    assert "first document's mean ratio 1.0000" in said
    assert "are not the model's" not in said
    noise = sum(map(math.exp, (t - s for t, s in zip(rollouts[0].trainer, rollouts[0].sampler, strict=True))))
    mean = noise / len(rollouts[0].response)
    assert f"first document's mean ratio {mean:.4f}" in said.partition("sampling_log_probs are the model's")[2]
    gaps = [abs(t - s) for one in rollouts[:8] for t, s in zip(one.trainer, one.sampler, strict=True)]
    assert f"they differ by {sum(gaps) / len(gaps):.2g} a token" in said
    other = [*model, "rollout.temperature=2"]
    assert convert("nemo-rl", tmp_path, tmp_path / "other.parquet", *other) == 0
    assert "old_log_probs are not the model's" in capsys.readouterr().out


def test_what_nemo_rl_left_out_or_did_not_compute(rollouts, tmp_path, capsys):
    """prev_logprobs of zeros are no log-probs; sample_loss_mask and dynamic sampling's rewards."""
    lines = [json.loads(line) for line in nemo_rl(tmp_path, rollouts).read_text().splitlines()]
    for number, line in enumerate(lines):
        line["prev_logprobs"] = [[0.0] * len(line["prev_logprobs"][0])]
        line["filtered_rewards"], line["rewards"] = [number / 8], [-1.0]
    lines[2]["sample_loss_mask"] = [0.0]
    lines[5]["token_loss_mask"] = [[0] * len(lines[5]["token_ids"][0])]
    (tmp_path / "train_data_step3.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert convert("nemo-rl", tmp_path, tmp_path / "out.parquet") == 0
    said, rows = capsys.readouterr().out, rows_of(tmp_path / "out.parquet")
    assert "dropped   1 document: no token was generated" in said
    assert f"note      {len(rollouts) - 1} documents without prev_logprobs of NeMo-RL" in said
    assert "note      1 document left out of its loss by NeMo-RL" in said
    assert "groups    1 of 3, 15 of 4 documents" in said
    assert rows[1]["old_log_probs"] == rows[1]["sampling_log_probs"]
    assert [row["reward"] for row in rows[:6]] == [0, 0.125, 0.25, 0.375, 0.5, 0.75]
    assert not any(rows[2]["loss_mask"])
    assert all(rows[3]["loss_mask"][3:])


def test_what_open_instruct_does_not_say(rollouts, tmp_path, capsys):
    """Tools' tokens have a log-prob of exactly 0 and an empty completion NaN; a resumed run writes a step again."""
    path = open_instruct(
        tmp_path,
        rollouts,
        logprobs=lambda number, values: [float("nan")] * len(values) if number == 1 else [*values[:-1], 0.0],
        request_info=lambda number, _: {"num_calls": 1} if number == 0 else None,
    )
    assert convert("open-instruct", tmp_path, tmp_path / "out.parquet") == 0
    said, rows = capsys.readouterr().out, rows_of(tmp_path / "out.parquet")
    assert "dropped   1 document: an empty completion" in said
    assert "note      1 document with calls of tools" in said
    assert rows[0]["loss_mask"] == [False] * 3 + [True] * (len(rollouts[0].response) - 1) + [False]
    assert rows[1]["loss_mask"][-1]
    path.write_text(path.read_text() * 2)
    assert convert("open-instruct", tmp_path, tmp_path / "twice.parquet") == 3
    assert "is step and sample 5:0 again: a run that was resumed" in capsys.readouterr().err


def test_rewards_and_masks_of_slime(rollouts, tmp_path, capsys):
    slime(
        tmp_path,
        rollouts,
        reward=lambda number, value: {"acc": value, "format": 1.0},
        remove_sample=lambda number, _: number == 1,
        loss_mask=lambda number, _: [0] + [1] * (len(rollouts[2].response) - 1) if number == 2 else None,
        multimodal_inputs=lambda number, _: {"images": [1]} if number == 3 else None,
        group_index=lambda number, _: None,
    )
    assert convert("slime", tmp_path, tmp_path / "out.parquet") == 3
    assert "has several rewards (acc, format). Use --reward-key KEY" in capsys.readouterr().err
    assert convert("slime", tmp_path, tmp_path / "out.parquet", "--reward-key", "acc") == 0
    said, rows = capsys.readouterr().out, rows_of(tmp_path / "out.parquet")
    assert "dropped   1 document: pictures" in said
    assert "note      1 document not trained by slime" in said
    assert [row["group_id"] for row in rows[:4]] == [0, 0, 0, 1]
    assert not any(rows[1]["loss_mask"])
    assert rows[2]["loss_mask"][3:] == [False] + [True] * (len(rollouts[2].response) - 1)


@pytest.mark.parametrize("training", [False, True])
def test_samples_of_one_rollout_of_slime_are_a_trajectory(tmp_path, training, capsys):
    """Also where their context was rewritten, so that the prompts differ, and groups are told by prompts."""
    prompts, named = ([1, 2], [1, 9], [1, 2], [1, 2]), (7, 7, 5, None)
    made = [Rollout(prompt, [3, 4], [-0.5, -0.25], [-0.5, -0.25], 1.0, 0.5, 0) for prompt in prompts]
    path = (slime_training if training else slime)(tmp_path, made)
    dump = torch.load(path)
    for sample, rollout in zip(dump["samples"], named, strict=True):  # slime numbers the others before it trains
        sample |= {"rollout_ids": 0 if rollout is None else rollout} if training else {"rollout_id": rollout}
    torch.save(dump, path)
    assert convert("slime", tmp_path, tmp_path / "out.parquet") == 0
    assert "4 documents of 1 group, 3 trajectories," in capsys.readouterr().out
    rows = rows_of(tmp_path / "out.parquet")
    assert [(row["group_id"], row["trajectory"]) for row in rows] == [(0, 0), (0, 0), (0, 1), (0, 2)]


def test_steps_of_prime_rl(rollouts, tmp_path, capsys):
    path = prime_rl(tmp_path, rollouts, rl_weights=lambda number, v: [0.0] * len(v) if number == 1 else v)
    assert convert("prime-rl", tmp_path, tmp_path / "out.parquet") == 0
    assert "dropped   1 document: no token of the policy-gradient loss" in capsys.readouterr().out
    (path.parent / "STABLE").unlink()
    assert convert("prime-rl", tmp_path, tmp_path / "other.parquet") == 3
    assert "rank_0.jsonl needs the file STABLE beside it" in capsys.readouterr().err


def test_groups_of_pipeline_rl_are_its_lines(rollouts, tmp_path):
    """A run that was resumed counts its groups from 0 again."""
    path = pipeline_rl(tmp_path, rollouts)
    path.write_text(path.read_text() * 2)
    assert convert("pipelinerl", path, tmp_path / "out.parquet") == 0
    assert [row["group_id"] for row in rows_of(tmp_path / "out.parquet")][::4] == list(range(32))


def test_the_calls_of_a_rollout_of_pipeline_rl_are_a_trajectory(rollouts, tmp_path):
    """Four texts a group: two rollouts, one of which calls the model three times."""
    calls = ((0, 0), (0, 1), (0, 2), (1, 0))
    names = "rollout_index", "step_index"
    path = pipeline_rl(
        tmp_path, rollouts, metadata=lambda number, value: value | dict(zip(names, calls[number % 4], strict=True))
    )
    assert convert("pipelinerl", path, tmp_path / "out.parquet") == 0
    found = [(row["group_id"], row["trajectory"]) for row in rows_of(tmp_path / "out.parquet")]
    assert found[:8] == [(0, 0), (0, 0), (0, 0), (0, 1), (1, 2), (1, 2), (1, 2), (1, 3)]


def test_the_branches_of_a_trace_of_verifiers_are_a_trajectory(rollouts, tmp_path, capsys):
    """A message that branches have in common is trained in the first; so is no compaction that was not used."""

    def node(parent, tokens, sampled=True, links=()):
        log_probs = [-0.25] * len(tokens) if sampled else []
        links = [dict(zip(("node", "type"), link, strict=True)) for link in links]
        node = {"parent": parent, "token_ids": tokens, "mask": [sampled] * len(tokens), "logprobs": log_probs}
        return node | {"semantic_parents": links}

    graph = [
        node(None, [1, 2], sampled=False),
        *(node(0, [3, 4]), node(1, [11], links=[(1, "compaction_attempt")]), node(1, [5], sampled=False)),
        *(node(3, [6], links=[(1, "compaction_attempt")]), node(1, [7, 8])),
        *(node(None, [9], sampled=False), node(6, [10], links=[(4, "compaction")])),
    ]
    changes = {"nodes": lambda number, nodes: graph if number == 0 else nodes}
    scores = {"a": {"score": 0.5, "weight": 2.0}, "b": {"score": 0.25}, "c": None}
    changes["rewards"] = lambda number, _: {"a": None} if number == 2 else scores
    changes["ok"] = lambda number, _: number != 3
    verifiers(tmp_path, rollouts[:4], **changes)
    assert convert("verifiers", tmp_path, tmp_path / "out.parquet") == 0
    said, rows = capsys.readouterr().out, rows_of(tmp_path / "out.parquet")
    assert "4 documents of 1 group, 2 trajectories, " in said
    for reason in ("no reward: it was not scored", "of an attempt that failed"):
        assert f"1 document: {reason}" in said
    assert [(row["token_ids"], row["loss_mask"]) for row in rows[:3]] == [
        ([1, 2, 3, 4, 5, 6], [False, False, True, True, False, True]),
        ([1, 2, 3, 4, 7, 8], [False] * 4 + [True] * 2),
        ([9, 10], [False, True]),
    ]
    assert [row["old_log_probs"] for row in rows[1:3]] == [[0, 0, 0, 0, -0.25, -0.25], [0, -0.25]]
    assert [(row["id"], row["trajectory"], row["reward"]) for row in rows[:3]] == [
        *(("trace 0:4", 0, 1.25), ("trace 0:5", 0, 1.25), ("trace 0:7", 0, 1.25))
    ]


class Attack:
    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_that_would_run_code_is_refused(tmp_path, capsys):
    attack = Attack()
    attack.path = str(tmp_path / "was here")
    torch.save({"samples": [{"metadata": attack}]}, tmp_path / "1.pt")
    assert convert("slime", tmp_path, tmp_path / "out.parquet") == 3
    said = capsys.readouterr().err
    assert "1.pt needs plain numbers, texts, lists and tensors" in said
    assert "mkdir" in said
    assert not (tmp_path / "was here").exists()
    pickle.loads(pickle.dumps(attack))  # as torch.load would without weights_only
    assert (tmp_path / "was here").exists()


def test_another_file_of_torch_is_refused(tmp_path, capsys):
    torch.save({"rollout_data": {"tokens": []}, "rank": 0}, tmp_path / "1.pt")
    assert convert("miles", tmp_path, tmp_path / "out.parquet") == 3
    assert "needs a list of samples (got none). Use a file of --save-debug-rollout-data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["verl", ".", "o.parquet"], 2, "verl needs dumps with token ids and log-probs (got texts and scores"),
        (
            ["areal", ".", "o.parquet"],
            2,
            "one of nemo-rl, open-instruct, slime, prime-rl, pipelinerl, verifiers",
        ),
        (["nemo-rl", ".", "o.parquet"], 3, "needs files train_data_step*.jsonl (got a folder with none of them"),
        (["nemo-rl", "text.jsonl", "o.parquet"], 3, "its fields are input, output"),
        (["nemo-rl", ".", "o.jsonl"], 2, "needs a new .parquet file"),
        (["nemo-rl", ".", "o.parquet", "loss=grpo"], 2, "(got loss=grpo)"),
    ],
)
def test_what_cannot_be_converted_is_refused(arguments, status, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"input": "a", "output": "b", "score": 1.0}\n')
    assert main(["convert", *arguments]) == status
    assert says in capsys.readouterr().err
    assert not (tmp_path / "o.parquet").exists()


def test_dumps_of_two_kinds_are_not_mixed(rollouts, tmp_path, capsys):
    slime(tmp_path, rollouts)
    (tmp_path / "more").mkdir()
    slime_training(tmp_path / "more", rollouts)
    assert convert("slime", tmp_path, tmp_path / "out.parquet") == 3
    assert "needs the fields of the first document (got advantage, sampling_log_probs" in capsys.readouterr().err


def test_numbers_that_are_none_are_named_with_their_place(tmp_path, capsys):
    one = Rollout([1, 2], [3, 4], [-0.5, -0.25], [-0.5, -0.25], 1.0, 0.5, 0)
    prime_rl(tmp_path, [one], trainer_logprobs=lambda _, values: [*values[:-1], None])
    assert convert("prime-rl", tmp_path, tmp_path / "out.parquet") == 3
    assert "rank_0.jsonl:1:old_log_probs: is nan at position 3, which is trained" in capsys.readouterr().err
