"""Conversations sampled by servers, the small one of the tests or vLLM itself: tokens, log-probs
and losses against those of transformers and of the trainer.

The tests run as those of tests/sampling/test_vllm_servers.py do. With vLLM they take about a
minute, half of it for the start of the servers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from builders.rollout_rows import write_parquet
from builders.runs import checkpoint_of, metrics_of
from builders.shared_servers import SharedServers, save_guesser
from sampling.server_checks import update
from transformers import AutoModelForCausalLM

from pgtoolkit.batch import pack
from pgtoolkit.completion import Prompt
from pgtoolkit.document import Document
from pgtoolkit.runs.records import read_evaluations
from pgtoolkit.sampling.server_api import Choice
from pgtoolkit.sampling.vllm import Vllm
from pgtoolkit.tasks.environments import Guess
from pgtoolkit.tasks.shuffle import seed_of
from pgtoolkit.training.module import PolicyGradientModule

GUESS = ("task=guess", "rollout.max_completion_length=40", "optimizer.warmup_steps=0")
FLOAT32 = ("model.dtype=float32",)
RUN = "training"
"""A run of six steps that starts its own server, which on a GPU gives its memory back between
batches, and that records its rollouts."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("small", marks=pytest.mark.slow),
        pytest.param("vllm", marks=pytest.mark.gpu),
    ],
)
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServers]:
    """Start a server of a model in float32, so that log-probs can be compared closely."""
    folder = tmp_path_factory.mktemp(request.param)
    is_vllm = request.param == "vllm"
    shared = SharedServers(folder, is_vllm, ["float32"], save_guesser, GUESS)
    with contextlib.closing(shared):
        shared.begin_run(
            RUN,
            "evaluation.every=3",
            "evaluation.prompts_per_set=6",
            "loss=grpo",
            "optimizer.learning_rate=0.003",
            f"rollout.save_path={folder}/recorded",
        )
        shared.start_all()
        yield shared


def noise(servers: SharedServers) -> float:
    """Return by how much log-probs of the same weights in float32 may differ."""
    return 0.02 if servers.is_vllm else 1e-4


def turns_of(document: Document) -> list[tuple[list[int], list[int]]]:
    """Return the tokens before each turn, and those of the turn."""
    tokens = document.tokens.tolist()
    return [
        (tokens[:start], tokens[start:end])
        for start, end in places_of_turns(document.loss_mask.tolist())
    ]


def places_of_turns(mask: list[bool]) -> list[tuple[int, int]]:
    """Return the place at which each turn begins, and the one behind its end."""
    before = [False, *mask]
    after = [*mask, False]
    pairs = list(enumerate(zip(before, after, strict=True)))
    starts = [place for place, pair in pairs if pair == (False, True)]
    ends = [place for place, pair in pairs if pair == (True, False)]
    return list(zip(starts, ends, strict=True))


def documents_of(folder: Path, step: int) -> list[Document]:
    """Return the batch that a run trains on, from its checkpoint after a step."""
    documents = checkpoint_of(folder, step)["data"]["source"]["documents"]
    return [Document(**fields) for fields in documents[:16]]


def log_probs(
    module: PolicyGradientModule, weights: dict[str, torch.Tensor], documents: list[Document]
) -> torch.Tensor:
    """Return the log-probs of all trained tokens, by the trainer's pass of these weights."""
    module.policy.load({name: tensor.to(module.device) for name, tensor in weights.items()})
    batch = pack(documents)
    return module.log_probs(batch).cpu()[batch.labels >= 0]


def distance(log_probs: torch.Tensor, others: torch.Tensor) -> float:
    return float((log_probs - others).abs().max())


def finished_run(servers: SharedServers) -> Path:
    """Wait for the run that records its rollouts; return its directory."""
    run = servers.runs[RUN]
    assert run.process.wait(200) == 0, run.log.read_text()[-3000:]
    return run.directory


def test_each_turn_is_requested_with_the_tokens_that_were_sampled_before(
    servers, tmp_path, monkeypatch
):
    """The server's answers hold the tokens that it has read and written. It samples from two
    versions of the weights, and sleeps between batches."""
    choices = Vllm.choices
    answers = []

    def noted_choices(self: Vllm, answer: dict) -> list[Choice]:
        answers.extend(answer["choices"])
        return choices(self, answer)

    source = servers.rollouts_of(
        tmp_path, *FLOAT32, "rollout.old_log_probs=sampling", server="float32"
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(source))
        # Publishing wakes the server for the next test.
        stack.callback(lambda: source.sampler.publish(source.trained.policy.weights, 99))
        source.sampler._plan = dataclasses.replace(source.sampler._plan, sleeps=True)
        monkeypatch.setattr(Vllm, "choices", noted_choices)
        for version in range(2):
            answers.clear()
            documents = [source.document(16 * version + place) for place in range(16)]
            turns = [turn for document in documents for turn in turns_of(document)]
            answered = [(choice["prompt_token_ids"], choice["token_ids"]) for choice in answers]
            assert sorted(turns) == sorted(answered)
            assert len(turns) > 16  # some documents have several
            assert {document.model_version for document in documents} == {version}
            batch = pack(documents)
            of_trainer = source.trained.log_probs(batch).cpu()[batch.labels >= 0]
            of_server = torch.cat([document.old_log_probs for document in documents])
            assert distance(of_trainer, of_server) < noise(servers)
            decode = source.task.tokenizer.decode
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
    directory = finished_run(servers)
    rows = metrics_of(directory)
    module, sampler = servers.samplers["float32"]
    decode = module.policy.tokenizer.decode
    ends = sampler._ways[0].ends
    for row in rows:
        place = 8 * ((row["step"] - 1) % 2)  # a batch has two steps
        documents = documents_of(directory, row["step"])[place : place + 8]
        expected = {"turns": [], "environment_tokens": [], "reward": [], "completion_length": []}
        for document in documents:
            turns = turns_of(document)
            guess = Guess(10)
            guess.start(Prompt("", "", document.group, "", seed=seed_of(0, document.group)))
            guesses = [decode([token for token in turn if token not in ends]) for _, turn in turns]
            replies = [guess.reply([{"content": text}]) for text in guesses]
            for (text, _), reply in zip(turns[1:], replies, strict=False):
                assert decode(text).endswith(reply["content"])
            length = sum(len(turn) for _, turn in turns)
            expected["reward"].append(guess.score([{"content": guesses[-1]}])[0])
            expected["turns"].append(len(turns))
            expected["completion_length"].append(length)
            expected["environment_tokens"].append(len(document.tokens) - 4 - length)
        for name, values in expected.items():
            assert row[name] == pytest.approx(sum(values) / 8), name
        fractions = [
            row[f"ended_by_{end}_fraction"] for end in ("environment", "max_turns", "length")
        ]
        assert sum(fractions) == pytest.approx(1)
        assert row["difference_old_sampling"] < (0.05 if servers.is_vllm else 1e-5)
    assert len(rows) == 6
    assert max(row["turns"] for row in rows) > 1
    for row in rows[::2]:  # the weights are those that sampled the batch
        assert abs(row["ratio_new_old"] - 1) < 0.05
    assert max(abs(row["max_ratio_new_old"] - 1) for row in rows[1::2]) > 1e-2
    evaluations = read_evaluations(directory)
    assert [row["step"] for row in evaluations] == [0, 3, 6]
    assert all(1 <= row["turns"] <= 4 for row in evaluations)


def test_turns_as_documents_of_a_trajectory_train_as_the_conversation_does(servers, tmp_path):
    """The recorded rollouts are trained as they are, and cut into a document for each turn. The
    server samples the evaluations."""
    directory = finished_run(servers)
    files = sorted((directory.parents[1] / "recorded").rglob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    turns = []
    for number, row in enumerate(rows):
        for start, end in places_of_turns(row["loss_mask"]):
            turns.append(
                {
                    "token_ids": row["token_ids"][:end],
                    "old_log_probs": row["old_log_probs"][:end],
                    "loss_mask": [start <= place < end for place in range(end)],
                    "reward": row["reward"],
                    "group_id": row["group_id"],
                    "trajectory": number,
                }
            )
    overrides = (
        "rollout=recorded",
        "rollout.epochs=1",
        "aggregation=sample_mean",
        "trainer.max_steps=1",
        "loss=grpo",
        "accumulation.docs_per_step=1000",
        "evaluation.every=1",
        "evaluation.prompts_per_set=6",
        "evaluation.max_completion_length=40",
        *FLOAT32,
    )

    def step_of(name: str, recorded: list[dict]) -> dict:
        """Return the metrics of the step that trains on these rows."""
        path = write_parquet(tmp_path / f"{name}.parquet", recorded)
        run = servers.train(tmp_path / name, *overrides, f"rollout.path={path}", server="float32")
        evaluations = read_evaluations(run)
        assert [row["step"] for row in evaluations] == [0, 1]
        assert all(1 <= row["turns"] <= 4 for row in evaluations)
        (step,) = metrics_of(run)
        return step

    of_conversations = step_of("conversations", rows)
    of_turns = step_of("turns", turns)
    assert of_turns["num_trajectories"] == len(rows) == 48 < len(turns)
    for name in ("loss", "grad_norm", "reward", "num_tokens"):
        assert of_turns[name] == pytest.approx(of_conversations[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("sampled_ahead", ["rollout.lag=2", "rollout.max_staleness=3"])
def test_proximal_ratios_are_to_the_weights_that_a_batch_begins_with(
    servers, tmp_path, sampled_ahead
):
    """The third batch was sampled by the weights of two updates before its first step; the
    correction sees the difference."""
    run = servers.train(
        tmp_path / "run",
        *FLOAT32,
        sampled_ahead,
        "rollout.old_log_probs=proximal",
        "correction=token_truncate",
        "loss=grpo",
        "optimizer.learning_rate=0.003",
        server="float32",
    )
    rows = metrics_of(run)
    assert [row["staleness"] for row in rows] == [0, 1, 2, 3, 2, 3]
    for row in rows[::2]:
        assert abs(row["max_ratio_new_old"] - 1) < noise(servers)
    documents = documents_of(run, 5)
    assert {document.model_version for document in documents} == {2}
    sampling = [document.sampling_log_probs for document in documents]
    old = [document.old_log_probs for document in documents]
    with servers.joined_sampler(tmp_path, *FLOAT32, names=("float32",)) as (module, _):
        of_step_2 = log_probs(module, checkpoint_of(run, 2)["model"], documents)
        of_step_4 = log_probs(module, checkpoint_of(run, 4)["model"], documents)
    assert distance(of_step_2, torch.cat(sampling)) < noise(servers)
    assert distance(of_step_4, torch.cat(old)) < noise(servers)
    assert distance(of_step_4, of_step_2) > 5 * noise(servers)
    factors = [
        (old_of_document - sampling_of_document).exp().clamp(max=2).mean()
        for old_of_document, sampling_of_document in zip(old[:8], sampling[:8], strict=True)
    ]
    assert rows[4]["correction_factor"] == pytest.approx(float(sum(factors)) / 8, abs=1e-4)


@pytest.mark.parametrize("kl", ["k3_ratio", "full_reverse"])
def test_distillation_trains_on_the_divergence_from_the_teacher(servers, tmp_path, kl):
    """The divergence of the first step is that of the logits of both models, by transformers alone,
    over the tokens of the student; those of the environment do not count."""
    teacher_path = save_guesser(tmp_path / "teacher", seed=3)
    run = servers.train(
        tmp_path / "run",
        *FLOAT32,
        "experiment=distillation",
        f"kl={kl}",
        "kl.coefficient=1",
        f"kl.reference={teacher_path}",
        "aggregation=token_mean",
        "trainer.max_steps=12",
        "optimizer.learning_rate=0.003",
        server="float32",
    )
    rows = metrics_of(run)
    student = AutoModelForCausalLM.from_pretrained(servers.model, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(teacher_path, dtype=torch.float32)
    divergences = []
    for document in documents_of(run, 1)[:8]:
        mask = document.loss_mask[1:]
        inputs = document.tokens[None]
        with torch.no_grad():
            new = student(inputs).logits[0, :-1].log_softmax(-1)[mask]
            ref = teacher(inputs).logits[0, :-1].log_softmax(-1)[mask]
        if kl == "full_reverse":
            divergences.append((new.exp() * (new - ref)).sum(-1))
        else:
            gap = (ref - new).gather(-1, document.tokens[1:][mask][:, None])[:, 0]
            divergences.append(gap.exp() - gap - 1)
    tolerance = 0.03 if servers.is_vllm else 1e-4
    mean_of_documents = sum(float(values.mean()) for values in divergences) / 8
    mean_of_tokens = float(torch.cat(divergences).mean())
    assert rows[0]["kl_ref"] == pytest.approx(mean_of_documents, rel=tolerance)
    assert rows[0]["loss"] == pytest.approx(mean_of_tokens, rel=tolerance)
    if kl == "full_reverse":  # k3 of so few tokens is too noisy to fall visibly in twelve steps
        distances = [row["kl_ref"] for row in rows]
        assert sum(distances[-4:]) / 4 < 0.8 * sum(distances[:2]) / 2
    assert max(row["turns"] for row in rows) > 1
