"""Conversations with servers, in runs with a lag and with a teacher: the small server of the tests,
or vLLM itself.

As tests/sampling/test_vllm_servers.py; with vLLM they take about a minute, half of it for the
servers' start.
"""

from __future__ import annotations

import contextlib
import dataclasses

import pyarrow.parquet as pq
import pytest
import torch
from builders.rollout_rows import write_parquet
from builders.runs import checkpoint_of, metrics_of
from builders.shared_servers import SharedServers, save_guesser
from sampling.server_checks import update
from transformers import AutoModelForCausalLM

from pgtoolkit.batch import Document, pack
from pgtoolkit.completion import Prompt
from pgtoolkit.runs.records import read_evaluations
from pgtoolkit.sampling.vllm import Vllm
from pgtoolkit.tasks.environments import Guess
from pgtoolkit.tasks.shuffle import seed_of

TALK = ("task=guess", "rollout.max_completion_length=40", "optimizer.warmup_steps=0")
FLOAT32 = ("model.dtype=float32",)
OWN = "own"
"""A run of six steps with a server of its own, which on a GPU gives its memory back between
batches."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("small", marks=pytest.mark.slow),
        pytest.param("vllm", marks=pytest.mark.gpu),
    ],
)
def servers(request, tmp_path_factory):
    """One around a model in float32, so that log-probs can be compared closely."""
    folder, is_vllm = tmp_path_factory.mktemp(request.param), request.param == "vllm"
    with contextlib.closing(
        SharedServers(folder, is_vllm, ["float32"], save_guesser, TALK)
    ) as found:
        more = (
            "evaluation.every=3",
            "evaluation.prompts_per_set=6",
            "loss=grpo",
            "optimizer.learning_rate=0.003",
        )
        found.begin_run(OWN, *more, f"rollout.save_path={folder}/recorded")
        found.start_all()
        yield found


def noise(servers) -> float:
    """By which log-probs of the same weights in float32 may differ."""
    return 0.02 if servers.is_vllm else 1e-4


def turns_of(document: Document) -> list[tuple[list[int], list[int]]]:
    """Of each turn all tokens before it, and its own."""
    tokens = document.tokens.tolist()
    return [
        (tokens[:start], tokens[start:end])
        for start, end in places_of_turns(document.loss_mask.tolist())
    ]


def places_of_turns(mask: list[bool]) -> list[tuple[int, int]]:
    """Where each begins and ends."""
    drawn = [*mask, False]
    starts = [i for i, one in enumerate(drawn) if one and not drawn[i - 1]]
    return [
        *zip(starts, [i for i, one in enumerate(drawn) if not one and drawn[i - 1]], strict=True)
    ]


def documents_of(folder, step: int) -> list[Document]:
    """The batch in use, of the run's state after a step."""
    return [Document(**one) for one in checkpoint_of(folder, step)["data"]["source"]["documents"]][
        :16
    ]


def log_probs(module, weights: dict, documents: list[Document]) -> torch.Tensor:
    """Of all trained tokens, by the trainer's forward pass of these weights."""
    module.policy.load({name: tensor.to(module.device) for name, tensor in weights.items()})
    batch = pack(documents)
    return module.log_probs(batch).cpu()[batch.labels >= 0]


def distance(some: torch.Tensor, others: torch.Tensor) -> float:
    return float((some - others).abs().max())


def test_each_turn_is_asked_for_with_the_tokens_that_were_sampled(servers, tmp_path, monkeypatch):
    """By what the server says that it has read and written, of two versions of the weights, asleep
    between batches."""
    answers, choices = [], Vllm.choices

    def noted(self, answer):
        answers.extend(answer["choices"])
        return choices(self, answer)

    source = servers.rollouts_of(
        tmp_path, *FLOAT32, "rollout.old_log_probs=sampling", server="float32"
    )
    with contextlib.ExitStack() as opened:
        opened.enter_context(contextlib.closing(source))
        # awake for the next test
        opened.callback(lambda: source.sampler.publish(source.trained.policy.weights, 99))
        source.sampler._plan = dataclasses.replace(source.sampler._plan, sleeps=True)
        monkeypatch.setattr(Vllm, "choices", noted)
        for version in range(2):
            answers.clear()
            documents = [source.document(16 * version + place) for place in range(16)]
            turns = [turn for document in documents for turn in turns_of(document)]
            assert sorted(turns) == sorted(
                (one["prompt_token_ids"], one["token_ids"]) for one in answers
            )
            assert len(turns) > 16  # some have several
            assert {document.model_version for document in documents} == {version}
            batch, decode = pack(documents), source.task.tokenizer.decode
            found = source.trained.log_probs(batch).cpu()[batch.labels >= 0]
            assert distance(
                found, torch.cat([document.old_log_probs for document in documents])
            ) < noise(servers)
            for document in documents:
                (prompt, first), *later = turns_of(document)
                before = prompt + first
                assert decode(prompt) == "0-9?"
                for text, turn in later:
                    assert text[: len(before)] == before
                    assert decode(text[len(before) :]) in ("higher", "lower")
                    before = text + turn
                assert before == document.tokens.tolist()
                assert len(before) <= 4 + 40
            update(source.trained, 0.1)
            source.trained.num_updates = version + 1


def test_metrics_of_a_run_are_those_of_its_conversations(servers):
    run = servers.runs[OWN]
    assert run.process.wait(200) == 0, run.log.read_text()[-3000:]
    rows = metrics_of(run.directory)
    decode = servers.samplers["float32"][0].policy.tokenizer.decode
    ends = {*servers.samplers["float32"][1]._ways[0].ends}
    for row in rows:
        place = 8 * ((row["step"] - 1) % 2)
        documents = documents_of(run.directory, row["step"])[place : place + 8]
        expected = {"turns": [], "environment_tokens": [], "reward": [], "completion_length": []}
        for document in documents:
            turns = turns_of(document)
            guess = Guess(10)
            guess.start(Prompt("", "", document.group, "", seed=seed_of(0, document.group)))
            said = [decode([token for token in turn if token not in ends]) for _, turn in turns]
            replies = [guess.reply([{"content": text}]) for text in said]
            for (text, _), reply in zip(turns[1:], replies, strict=False):
                assert decode(text).endswith(reply["content"])
            expected["reward"].append(guess.score([{"content": said[-1]}])[0])
            expected["turns"].append(len(turns))
            expected["completion_length"].append(sum(len(turn) for _, turn in turns))
            expected["environment_tokens"].append(
                len(document.tokens) - 4 - expected["completion_length"][-1]
            )
        for name, values in expected.items():
            assert row[name] == pytest.approx(sum(values) / 8), name
        fractions = [
            row[f"ended_by_{end}_fraction"] for end in ("environment", "max_turns", "length")
        ]
        assert sum(fractions) == pytest.approx(1)
        assert row["difference_old_sampling"] < (0.05 if servers.is_vllm else 1e-5)
    assert len(rows) == 6
    assert max(row["turns"] for row in rows) > 1
    for row in rows[::2]:  # of the weights that have sampled
        assert abs(row["ratio_new_old"] - 1) < 0.05
    assert max(abs(row["max_ratio_new_old"] - 1) for row in rows[1::2]) > 1e-2
    evaluations = read_evaluations(run.directory)
    assert [row["step"] for row in evaluations] == [0, 3, 6]
    assert all(1 <= row["turns"] <= 4 for row in evaluations)


def test_turns_as_the_documents_of_a_trajectory_teach_what_the_conversation_teaches(
    servers, tmp_path
):
    """What was sampled, recorded and cut into a document for each turn; the policy is measured by
    the server."""
    run = servers.runs[OWN]
    assert run.process.wait(200) == 0, run.log.read_text()[-3000:]
    files = sorted((run.directory.parents[1] / "recorded").rglob("*.parquet"))
    rows, turns = [row for file in files for row in pq.read_table(file).to_pylist()], []
    for number, row in enumerate(rows):
        for start, end in places_of_turns(row["loss_mask"]):
            part = {name: row[name][:end] for name in ("token_ids", "old_log_probs")}
            part |= {name: row[name] for name in ("reward", "group_id")}
            turns.append(
                part | {"loss_mask": [start <= i < end for i in range(end)], "trajectory": number}
            )
    chosen = (
        "rollout=recorded",
        "rollout.epochs=1",
        "aggregation=sample_mean",
        "trainer.max_steps=1",
        "loss=grpo",
    )
    chosen += (
        "accumulation.docs_per_step=1000",
        "evaluation.every=1",
        "evaluation.prompts_per_set=6",
    )
    chosen += ("evaluation.max_completion_length=40", *FLOAT32)
    found = {}
    for name, written in {"whole": rows, "turns": turns}.items():
        path = write_parquet(tmp_path / f"{name}.parquet", written)
        folder = servers.train(tmp_path / name, *chosen, f"rollout.path={path}", server="float32")
        ((found[name],), measured) = metrics_of(folder), read_evaluations(folder)
        assert [row["step"] for row in measured] == [0, 1]
        assert all(1 <= row["turns"] <= 4 for row in measured)
    assert found["turns"]["num_trajectories"] == len(rows) == 48 < len(turns)
    for name in ("loss", "grad_norm", "reward", "num_tokens"):
        assert found["turns"][name] == pytest.approx(found["whole"][name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("late", ["rollout.lag=2", "rollout.max_staleness=3"])
def test_proximal_ratios_are_to_the_weights_that_a_batch_begins_with(servers, tmp_path, late):
    """The third batch was sampled by the weights of two updates before its first step, which the
    correction sees."""
    chosen = (
        "rollout.old_log_probs=proximal",
        "correction=token_truncate",
        "loss=grpo",
        "optimizer.learning_rate=0.003",
    )
    run = servers.train(tmp_path / "run", *FLOAT32, late, *chosen, server="float32")
    rows, documents = metrics_of(run), documents_of(run, 5)
    assert [row["staleness"] for row in rows] == [0, 1, 2, 3, 2, 3]
    for row in rows[::2]:
        assert abs(row["max_ratio_new_old"] - 1) < noise(servers)
    assert {document.model_version for document in documents} == {2}
    sampled, old = (
        [vars(one)[f"{name}_log_probs"] for one in documents] for name in ("sampling", "old")
    )
    with servers.joined_sampler(tmp_path, *FLOAT32, names=("float32",)) as (module, _):
        first, begun = (
            log_probs(module, checkpoint_of(run, step)["model"], documents) for step in (2, 4)
        )
    assert distance(first, torch.cat(sampled)) < noise(servers)
    assert distance(begun, torch.cat(old)) < noise(servers)
    assert distance(begun, first) > 5 * noise(servers)
    factors = [
        (one - other).exp().clamp(max=2).mean()
        for one, other in zip(old[:8], sampled[:8], strict=True)
    ]
    assert rows[4]["correction_factor"] == pytest.approx(float(sum(factors)) / 8, abs=1e-4)


@pytest.mark.parametrize("kind", ["k3_ratio", "full_reverse"])
def test_a_student_comes_to_say_what_its_teacher_says(servers, tmp_path, kind):
    """Of each step the distance by the rows of both models, which transformers alone gives; the
    environment's tokens have no part in it."""
    teacher = save_guesser(tmp_path / "teacher", seed=3)
    chosen = "experiment=distillation", f"kl={kind}", "kl.coefficient=1", f"kl.reference={teacher}"
    chosen += ("aggregation=token_mean", "trainer.max_steps=12", "optimizer.learning_rate=0.003")
    run = servers.train(tmp_path / "run", *FLOAT32, *chosen, server="float32")
    rows, documents = metrics_of(run), documents_of(run, 1)[:8]
    student = AutoModelForCausalLM.from_pretrained(servers.model, dtype=torch.float32)
    models, total, mean, count = (
        (student, AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)),
        0,
        0,
        0,
    )
    for document in documents:
        mask = document.loss_mask[1:]
        with torch.no_grad():
            new, wanted = (
                one(document.tokens[None]).logits[0, :-1].log_softmax(-1)[mask] for one in models
            )
        if kind == "full_reverse":
            values = (new.exp() * (new - wanted)).sum(-1)
        else:
            gap = (wanted - new).gather(-1, document.tokens[1:][mask][:, None])
            values = gap.exp() - gap - 1
        total, mean, count = (
            total + float(values.sum()),
            mean + float(values.mean()) / 8,
            count + len(values),
        )
    assert rows[0]["kl_ref"] == pytest.approx(mean, rel=0.03 if servers.is_vllm else 1e-4)
    assert rows[0]["loss"] == pytest.approx(total / count, rel=0.03 if servers.is_vllm else 1e-4)
    if kind == "full_reverse":  # k3 of so few tokens is too noisy to tell after twelve steps
        distances = [row["kl_ref"] for row in rows]
        assert sum(distances[-4:]) / 4 < 0.8 * sum(distances[:2]) / 2
    assert max(row["turns"] for row in rows) > 1
