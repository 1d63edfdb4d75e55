"""The training step and whole short runs: cuts, skipped steps, learning."""

import contextlib
import dataclasses
import itertools
import json
import math
import re

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.rollout_rows import good_row, write_jsonl
from builders.runs import (
    SHORT,
    assert_equal,
    config_of,
    metrics_of,
    module_and_loader,
    run,
    some_documents,
    with_model,
)

from pgtoolkit.errors import DataError, Interrupted, NumericalError
from pgtoolkit.rollouts.stages import STAGES
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.runs.records import read_status
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.train import train


def gradient_of(module, step):
    """Of the step's micro-batches, one vector."""
    module.zero_grad()
    for micro_batch in step.micro_batches:
        module.micro_batch_loss(micro_batch, step.totals).loss.backward()
    return torch.cat([p.grad.flatten() for p in module.parameters()])


@pytest.mark.parametrize("tied", [False, True])
def test_the_fused_head_adds_its_gradient_to_that_of_the_weight(tied):
    """In the forward call already, and over micro-batches; the embedding's share, if tied, comes on
    top by autograd."""
    gradients = []
    for kernel in ("torch", "fused_linear"):
        module, _ = module_and_loader(
            *SHORT, "loss=gspo", f"kernel={kernel}", "loss.epsilon_low=0.1"
        )
        if tied:
            module.policy.head.weight = module.model.get_input_embeddings().weight
        gradients.append(gradient_of(module, make_step(some_documents(), 24, {})))
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-14)
    step = make_step(some_documents(), 24, {})
    module.zero_grad()
    module.micro_batch_loss(step.micro_batches[0], step.totals)
    assert module.policy.head.weight.grad.abs().max() > 0


@pytest.mark.gpu
def test_an_update_does_not_wait_for_the_gpu_before_its_last_micro_batch(tmp_path):
    """Where every ratio is 1 by construction; PyTorch raises where the host would wait."""
    model = save_with_tokenizer(
        small_llama(hidden_size=32, num_hidden_layers=2), tmp_path / "model"
    )
    more = (
        "loss=gspo",
        "kernel=fused_linear",
        "model.dtype=bfloat16",
        "model.gradient_checkpointing=true",
    )
    module, _ = module_and_loader(
        *with_model(model, *more, "model.compile=true", "trainer.device=cuda"), dtype=None
    )
    module.cuda()
    documents = [
        dataclasses.replace(d, old_log_probs=None, on_policy=True) for d in some_documents()
    ]
    step = make_step(documents, 24, {})
    assert len(step.micro_batches) == 3
    module.backward_of_all(step.micro_batches, step.totals)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.backward_of_all(step.micro_batches, step.totals)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_gradient_whose_norm_is_infinite_changes_no_weight():
    """Of a finite loss: squares of single gradients of 1e30 are out of float32's range."""
    module, _ = module_and_loader(*SHORT, "optimizer.max_grad_norm=1", dtype=None)
    before = [p.clone() for p in module.parameters()]
    documents = [dataclasses.replace(d, advantages=1e30 * d.advantages) for d in some_documents()]
    metrics = module.training_step(make_step(documents, 24, {}), 0)["metrics"]
    assert math.isfinite(metrics["loss"])
    assert metrics["grad_norm"] == math.inf
    assert (module.num_updates, metrics["num_skipped_steps"]) == (0, 1)
    assert_equal([p.detach() for p in module.parameters()], before)


def test_bad_steps_count_only_in_a_row():
    module, _ = module_and_loader(*SHORT, "trainer.max_bad_steps=3", dtype=None)
    good = make_step(some_documents(), 24, {})
    documents = [
        dataclasses.replace(d, advantages=torch.full_like(d.advantages, math.inf))
        for d in some_documents()
    ]
    bad = make_step(documents, 24, {})
    ends = []
    for number, step in enumerate([bad, bad, good, bad, bad, good, bad, bad, bad]):
        try:
            module.training_step(step, number)
        except NumericalError:
            ends.append(number)
    assert ends == [8]
    assert (module.num_skipped_steps, module.num_updates) == (7, 2)


def test_a_step_without_trained_tokens_is_skipped_and_counted():
    module, _ = module_and_loader(*SHORT, dtype=None)
    nothing = {"old_log_probs": torch.empty(0), "advantages": torch.empty(0)}
    documents = [
        dataclasses.replace(d, loss_mask=torch.zeros_like(d.loss_mask), **nothing)
        for d in some_documents()
    ]
    metrics = module.training_step(make_step(documents, 24, {}), 0)["metrics"]
    assert metrics["num_skipped_steps"] == 1
    assert module.num_updates == 0
    assert metrics["documents_seen"] == len(documents)


def train_rows(folder, rows, *overrides, resume=False):
    settings = [s for s in SHORT if not s.startswith(("rollout.", "task.", "trainer.max_steps"))]
    path = write_jsonl(folder.parent / "rows.jsonl", rows)
    settings += [
        "rollout=recorded",
        f"rollout.path={path}",
        "aggregation.divisor=4",
        "accumulation.docs_per_step=2",
    ]
    train(config_of(*settings, *overrides), folder, resume=resume)


def untrained(number):
    return good_row(number, number // 2, token_ids=[1, 2, 3, 4, 5], loss_mask=[0] * 5)


def trained(number, log_probs=(0, 0, -2.5, -2.5, -2.5)):
    return good_row(number, number // 2, token_ids=[1, 2, 3, 4, 5], old_log_probs=list(log_probs))


def failure(folder):
    status = json.loads((folder / "status.json").read_text())
    return status["state"], status["reason"]


def test_a_run_without_an_update_is_not_done(tmp_path):
    """Its steps held no trained token; after it, some do."""
    rows = [*map(untrained, range(4)), *map(trained, range(4, 8))]
    message = (
        "nothing was trained: none of the 2 steps made an update. Their documents have no "
        "trained token."
    )
    for resume in (False, True):
        with pytest.raises(DataError) as caught:
            train_rows(tmp_path / "run", rows, "trainer.max_steps=2", resume=resume)
        assert str(caught.value) == message
        assert failure(tmp_path / "run") == ("failed", f"DataError: {message}")
    train_rows(tmp_path / "run", rows, "trainer.max_steps=3", resume=True)
    assert failure(tmp_path / "run") == ("done", None)
    assert [row["num_skipped_steps"] for row in metrics_of(tmp_path / "run")] == [1, 2, 2]


def test_recorded_log_probs_that_do_not_fit_the_policy_are_noted(tmp_path, capsys):
    """The tiny model before training is close to uniform over twelve tokens."""
    fitting = (0, 0, *[-math.log(12)] * 3)
    train_rows(tmp_path / "a", [trained(n, fitting) for n in range(4)], "metrics=none")
    assert "note: before its first update" not in capsys.readouterr().out
    rows = [trained(n, (0, 0, *[-0.5] * 3)) for n in range(4)]
    train_rows(tmp_path / "b", rows, "metrics=none", "rollout.temperature=0.7")
    found = metrics_of(tmp_path / "b")[0]["new_logprobs"] + 0.5
    assert found < -1.5
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("note: before")
    ]
    assert line == (
        "note: before its first update the policy's log-probs differ from the old ones by "
        f"{found:+.3g} a token, where 0 is expected (a ratio of 1): the rollouts may be of another "
        "model, of another temperature than rollout.temperature=0.7, or have old_log_probs that "
        "are one token off: see docs/data.md."
    )
    train_rows(
        tmp_path / "b", rows, "metrics=none", "rollout.epochs=2", "trainer.max_steps=4", resume=True
    )
    assert "note: before its first update" not in capsys.readouterr().out


def sampled(number, difference):
    """A row whose sampling log-probs lie so far below the old ones, whose own fit the policy."""
    fitting = [0, 0, *[-math.log(12)] * 3]
    return trained(number, fitting) | {
        "sampling_log_probs": [0, 0, *[x - difference for x in fitting[2:]]]
    }


def test_a_difference_to_the_sampler_beyond_the_clip_is_noted_once(tmp_path, capsys):
    """0.3 is more than GRPO's 0.2, at 4 of 4 documents; at 0 of 4 there is nothing to say."""
    for folder, difference, noted in (("a", 0.3, 1), ("b", 0.1, 0)):
        rows = [sampled(number, difference) for number in range(4)]
        train_rows(tmp_path / folder, rows, "loss=grpo", "correction=token_truncate")
        metrics = metrics_of(tmp_path / folder)
        assert len(metrics) == 2
        for row in metrics:
            assert row["difference_old_sampling"] == pytest.approx(difference, abs=1e-6)
            assert row["correction_factor"] == pytest.approx(math.exp(difference), abs=1e-6)
            assert row["clipped_sampling_fraction"] == noted
        lines = [
            line
            for line in capsys.readouterr().out.splitlines()
            if "the sampler's log-probs" in line
        ]
        assert len(lines) == noted
    train_rows(tmp_path / "c", [sampled(number, 1e-3) for number in range(4)], "loss=gspo")
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if "the sampler's log-probs" in line
    ]
    assert line == (
        "note: the sampler's log-probs differ from the trainer's by 0.001 a token. This gap alone "
        "would take 100% of the ratios out of the clip of loss=gspo, more than an update may. A "
        "correction weighs each token by it (docs/losses.md). This note is given once; the metrics "
        "difference_old_sampling and clipped_sampling_fraction follow the gap."
    )


def test_a_correction_needs_sampling_log_probs_that_differ(tmp_path):
    without, same = (
        [trained(number) for number in range(4)],
        [sampled(number, 0) for number in range(4)],
    )
    for name, rows, message in (
        ("without", without, "rows.jsonl:1:sampling_log_probs: is missing; the row has token_ids"),
        (
            "same",
            same,
            "needs sampling_log_probs other than old_log_probs (got the same in every row).",
        ),
    ):
        with pytest.raises(DataError, match=re.escape(message)):
            train_rows(tmp_path / name, rows, "correction=token_mask")
    train_rows(tmp_path / "masked", without, "correction=off_policy_mask")
    train_rows(
        tmp_path / "one",
        [sampled(0, 0), *(sampled(n, 1e-6) for n in (1, 2, 3))],
        "correction=token_mask",
    )


def test_a_batch_of_rollouts_from_before_a_correction_is_refused(tmp_path):
    """The second step on a batch, in a run that is continued with other settings."""
    run(tmp_path, "rollout.old_log_probs=sampling", "trainer.max_steps=1")
    with pytest.raises(
        DataError, match="correction=token_mask needs sampling_log_probs of every document"
    ):
        run(tmp_path, "correction=token_mask", resume=True)
    assert len(metrics_of(run(tmp_path, "correction=off_policy_mask", resume=True))) == 6


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["gspo", "cispo", "reinforce"])
def test_the_reward_rises_from_chance(tmp_path, loss):
    """A smaller main job: the reward of three digits rises from chance to three times that in a few
    seconds."""
    batches = (
        "rollout.prompts_per_batch=32",
        "rollout.group_size=8",
        "accumulation.docs_per_step=64",
    )
    sizes = ("model.hidden_size=64", "accumulation.max_tokens=1024")
    steps = ("trainer.max_steps=80", "trainer.checkpoint_every=1000")
    rows = metrics_of(run(tmp_path / "run", f"loss={loss}", *batches, *sizes, *steps))
    first = sum(row["reward"] for row in rows[:8]) / 8
    last = sum(row["reward"] for row in rows[-8:]) / 8
    assert first < 0.12  # chance: one of twelve tokens
    assert last > 0.25


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, RuntimeError])
def test_the_sampler_is_closed_however_a_run_ends(tmp_path, monkeypatch, end):
    """Once, and while the run's state still says that it is running."""
    closed, training_step = [], PolicyGradientModule.training_step

    def ending(self, step, index):
        if end is not None and index == 2:
            raise end("in the third step")
        return training_step(self, step, index)

    def noting(self):
        closed.append(read_status(tmp_path / "run")["state"])

    monkeypatch.setattr(PolicyGradientModule, "training_step", ending)
    monkeypatch.setattr(TransformersSampler, "close", noting)
    with (
        pytest.raises(Interrupted if end is KeyboardInterrupt else end)
        if end
        else contextlib.nullcontext()
    ):
        run(tmp_path / "run")
    assert closed == ["running"]
    expected = {None: "done", KeyboardInterrupt: "interrupted", RuntimeError: "failed"}[end]
    assert read_status(tmp_path / "run")["state"] == expected


def test_the_first_step_of_a_batch_says_how_long_its_rollouts_took(short, tmp_path):
    """Two steps to a batch; scoring has its share, and all of it is less than what lies between two
    rows."""
    rows = [json.loads(line) for line in (short / "metrics.jsonl").read_text().splitlines()]
    stages = [f"seconds_{stage}" for stage in STAGES]
    for before, row in itertools.pairwise(rows):
        made = row["step"] % 2 == 1
        assert all((row[stage] > 0) == made for stage in stages)
        assert (
            0 < row["seconds_update"] <= row["num_tokens"] / row["tokens_per_second"] * (1 + 1e-9)
        )
        assert (
            sum(row[stage] for stage in stages) + row["seconds_update"]
            < row["time"] - before["time"] + 0.01
        )
    run(tmp_path / "sampling", "rollout.old_log_probs=sampling", "trainer.max_steps=1")
    (row,) = [
        json.loads(line)
        for line in (tmp_path / "sampling" / "metrics.jsonl").read_text().splitlines()
    ]
    assert row["seconds_old_log_probs"] == 0 < row["seconds_sampling"]
