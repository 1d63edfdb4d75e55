"""The training step and short runs: gradients, skipped steps, notes on log-probs, learning."""

import contextlib
import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

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

from pgtoolkit.assembly.train import train
from pgtoolkit.batch import Step
from pgtoolkit.errors import DataError, Interrupted, NumericalError
from pgtoolkit.rollouts.stages import STAGES
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.runs.records import read_status
from pgtoolkit.sampling.samplers import TransformersSampler
from pgtoolkit.training.module import PolicyGradientModule


def gradient_of(module: PolicyGradientModule, step: Step) -> torch.Tensor:
    """Return the gradient of all micro-batches of a step as one vector."""
    module.zero_grad()
    for micro_batch in step.micro_batches:
        module.micro_batch_loss(micro_batch, step.totals).loss.backward()
    return torch.cat([p.grad.flatten() for p in module.parameters()])


@pytest.mark.parametrize("tied", [False, True])
def test_the_fused_head_has_the_gradient_of_plain_logits(tied):
    """It adds the weight's gradient in the forward call, over micro-batches; autograd adds the
    embedding's share if both are one matrix."""
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
@pytest.mark.parametrize("aggregation", ["sample_mean", "prompt_mean", "balanced"])
def test_an_update_does_not_wait_for_the_gpu_before_its_last_micro_batch(tmp_path, aggregation):
    """Every ratio is 1 by construction; PyTorch raises where the host would wait."""
    path = save_with_tokenizer(small_llama(hidden_size=32, num_hidden_layers=2), tmp_path / "model")
    overrides = (
        "loss=gspo",
        f"aggregation={aggregation}",
        "kernel=fused_linear",
        "model.dtype=bfloat16",
        "model.gradient_checkpointing=true",
        "model.compile=true",
        "trainer.device=cuda",
    )
    module, _ = module_and_loader(*with_model(path, *overrides), dtype=None)
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
    """The loss is finite; the squares of gradients of 1e30 are not in float32."""
    module, _ = module_and_loader(*SHORT, "optimizer.max_grad_norm=1", dtype=None)
    before = [p.clone() for p in module.parameters()]
    documents = [dataclasses.replace(d, advantages=1e30 * d.advantages) for d in some_documents()]
    metrics = module.training_step(make_step(documents, 24, {}), 0)["metrics"]
    assert math.isfinite(metrics["loss"])
    assert metrics["grad_norm"] == math.inf
    assert module.num_updates == 0
    assert metrics["num_skipped_steps"] == 1
    assert_equal([p.detach() for p in module.parameters()], before)


def test_only_bad_steps_in_a_row_end_a_run():
    module, _ = module_and_loader(*SHORT, "trainer.max_bad_steps=3", dtype=None)
    good = make_step(some_documents(), 24, {})
    documents = [
        dataclasses.replace(d, advantages=torch.full_like(d.advantages, math.inf))
        for d in some_documents()
    ]
    bad = make_step(documents, 24, {})
    for number, step in enumerate([bad, bad, good, bad, bad, good, bad, bad]):
        module.training_step(step, number)
    with pytest.raises(NumericalError):
        module.training_step(bad, 8)
    assert module.num_skipped_steps == 7
    assert module.num_updates == 2


def test_a_step_without_trained_tokens_is_skipped_and_counted():
    module, _ = module_and_loader(*SHORT, dtype=None)
    documents = [
        dataclasses.replace(
            d,
            loss_mask=torch.zeros_like(d.loss_mask),
            old_log_probs=torch.empty(0),
            advantages=torch.empty(0),
        )
        for d in some_documents()
    ]
    metrics = module.training_step(make_step(documents, 24, {}), 0)["metrics"]
    assert metrics["num_skipped_steps"] == 1
    assert module.num_updates == 0
    assert metrics["documents_seen"] == len(documents)


def train_rows(folder: Path, rows: list[dict], *overrides: str, resume: bool = False) -> None:
    """Train on recorded rows, two to a step."""
    settings = [
        setting
        for setting in SHORT
        if not setting.startswith(("rollout.", "task.", "trainer.max_steps"))
    ]
    path = write_jsonl(folder.parent / "rows.jsonl", rows)
    settings += [
        "rollout=recorded",
        f"rollout.path={path}",
        "aggregation.divisor=4",
        "accumulation.docs_per_step=2",
    ]
    train(config_of(*settings, *overrides), folder, resume=resume)


UNIFORM = -math.log(12)
"""About the log-prob of every token of the tiny model before training, which has twelve tokens."""


def row_without_trained_tokens(number: int) -> dict:
    return good_row(number, number // 2, token_ids=[1, 2, 3, 4, 5], loss_mask=[0] * 5)


def row_with_log_prob(number: int, log_prob: float = -2.5) -> dict:
    """Return a row of three trained tokens, each with this old log-prob."""
    log_probs = [0, 0, log_prob, log_prob, log_prob]
    return good_row(number, number // 2, token_ids=[1, 2, 3, 4, 5], old_log_probs=log_probs)


def row_with_sampling_log_prob(number: int, difference: float) -> dict:
    """Return a row whose sampling log-probs are `difference` below its old ones, which fit the
    policy."""
    sampling = UNIFORM - difference
    row = row_with_log_prob(number, UNIFORM)
    return row | {"sampling_log_probs": [0, 0, sampling, sampling, sampling]}


def state_and_reason(folder: Path) -> tuple[str, str | None]:
    status = read_status(folder)
    return status["state"], status["reason"]


def test_a_run_without_an_update_fails_until_a_step_trains_something(tmp_path):
    rows = [row_without_trained_tokens(number) for number in range(4)]
    rows += [row_with_log_prob(number) for number in range(4, 8)]
    message = (
        "nothing was trained: none of the 2 steps made an update. Their documents have no "
        "trained token."
    )
    for resume in (False, True):
        with pytest.raises(DataError) as refused:
            train_rows(tmp_path / "run", rows, "trainer.max_steps=2", resume=resume)
        assert str(refused.value) == message
        assert state_and_reason(tmp_path / "run") == ("failed", f"DataError: {message}")
    train_rows(tmp_path / "run", rows, "trainer.max_steps=3", resume=True)
    assert state_and_reason(tmp_path / "run") == ("done", None)
    assert [row["num_skipped_steps"] for row in metrics_of(tmp_path / "run")] == [1, 2, 2]


def lines_with(words: str, capsys) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if words in line]


def test_old_log_probs_that_do_not_fit_the_policy_are_noted_at_the_first_step(tmp_path, capsys):
    opening = "note: before its first update"
    fitting = [row_with_log_prob(number, UNIFORM) for number in range(4)]
    train_rows(tmp_path / "fitting", fitting, "metrics=none")
    assert lines_with(opening, capsys) == []
    folder = tmp_path / "other"
    rows = [row_with_log_prob(number, -0.5) for number in range(4)]
    train_rows(folder, rows, "metrics=none", "rollout.temperature=0.7")
    difference = metrics_of(folder)[0]["new_logprobs"] + 0.5
    assert difference < -1.5
    assert lines_with(opening, capsys) == [
        f"{opening} the policy's log-probs differ from the old ones by {difference:+.3g} a token, "
        "where 0 is expected (a ratio of 1): the rollouts may be of another model, of another "
        "temperature than rollout.temperature=0.7, or have old_log_probs that are one token off: "
        "see docs/data.md."
    ]
    more = ("metrics=none", "rollout.epochs=2", "trainer.max_steps=4")
    train_rows(folder, rows, *more, resume=True)
    assert lines_with(opening, capsys) == []


@pytest.mark.parametrize(("difference", "noted"), [(0.3, 1), (0.1, 0)])
def test_a_gap_to_the_sampler_is_measured_and_noted_once_where_it_exceeds_the_clip(
    tmp_path, capsys, difference, noted
):
    """The clip of GRPO is 0.2; all four documents have the same gap."""
    rows = [row_with_sampling_log_prob(number, difference) for number in range(4)]
    train_rows(tmp_path / "run", rows, "loss=grpo", "correction=token_truncate")
    metrics = metrics_of(tmp_path / "run")
    assert len(metrics) == 2
    for row in metrics:
        assert row["difference_old_sampling"] == pytest.approx(difference, abs=1e-6)
        assert row["correction_factor"] == pytest.approx(math.exp(difference), abs=1e-6)
        assert row["clipped_sampling_fraction"] == noted
    assert len(lines_with("the sampler's log-probs", capsys)) == noted


def test_the_note_on_the_gap_to_the_sampler_has_its_size_and_the_clipped_share(tmp_path, capsys):
    rows = [row_with_sampling_log_prob(number, 1e-3) for number in range(4)]
    for row in rows[1::2]:  # which the metrics count as 0, and the note leaves out
        row["loss_mask"] = [0, 0, 0, 0, 0]
    train_rows(tmp_path / "run", rows, "loss=gspo")
    (line,) = lines_with("the sampler's log-probs", capsys)
    assert line == (
        "note: the sampler's log-probs differ from the trainer's by 0.001 a token. This gap alone "
        "would take 100% of the ratios out of the clip of loss=gspo, more than an update may. A "
        "correction weighs each token by it (docs/losses.md). This note is given once; the metrics "
        "difference_old_sampling and clipped_sampling_fraction follow the gap."
    )


def test_a_correction_needs_sampling_log_probs_that_differ_from_the_old_ones(tmp_path):
    without = [row_with_log_prob(number) for number in range(4)]
    equal = [row_with_sampling_log_prob(number, 0) for number in range(4)]
    for name, rows, message in (
        ("without", without, "rows.jsonl:1:sampling_log_probs: is missing; the row has token_ids"),
        (
            "equal",
            equal,
            "needs sampling_log_probs other than old_log_probs (got the same in every row).",
        ),
    ):
        with pytest.raises(DataError, match=re.escape(message)):
            train_rows(tmp_path / name, rows, "correction=token_mask")
    train_rows(tmp_path / "off_policy_mask", without, "correction=off_policy_mask")
    other = [row_with_sampling_log_prob(number, 1e-6) for number in (1, 2, 3)]
    train_rows(tmp_path / "token_mask", [equal[0], *other], "correction=token_mask")


def test_a_batch_sampled_before_a_correction_was_set_is_refused(tmp_path):
    """The second step on a batch has no sampling log-probs where the first did not need them."""
    run(tmp_path, "rollout.old_log_probs=sampling", "trainer.max_steps=1")
    with pytest.raises(
        DataError, match="correction=token_mask needs sampling_log_probs of every document"
    ):
        run(tmp_path, "correction=token_mask", resume=True)
    assert len(metrics_of(run(tmp_path, "correction=off_policy_mask", resume=True))) == 6


@pytest.mark.slow
def test_the_reward_rises_from_chance(tmp_path):
    """Three digits backwards: the reward rises from chance to three times that in 80 steps."""
    overrides = (
        "loss=gspo",
        "rollout.prompts_per_batch=32",
        "rollout.group_size=8",
        "accumulation.docs_per_step=64",
        "accumulation.max_tokens=1024",
        "model.hidden_size=64",
        "trainer.max_steps=80",
        "trainer.checkpoint_every=1000",
    )
    rewards = [row["reward"] for row in metrics_of(run(tmp_path / "run", *overrides))]
    assert sum(rewards[:8]) / 8 < 0.12  # chance: one of twelve tokens
    assert sum(rewards[-8:]) / 8 > 0.25


@pytest.mark.parametrize(
    ("error", "raised", "state"),
    [
        (None, contextlib.nullcontext(), "done"),
        (KeyboardInterrupt, pytest.raises(Interrupted), "interrupted"),
        (RuntimeError, pytest.raises(RuntimeError), "failed"),
    ],
    ids=["done", "interrupted", "failed"],
)
def test_the_sampler_is_closed_once_before_the_run_says_that_it_ended(
    tmp_path, monkeypatch, error, raised, state
):
    states_at_close = []
    training_step = PolicyGradientModule.training_step

    def fail_in_the_third_step(self, step, index):
        if error is not None and self.num_updates == 2:
            raise error("in the third step")
        return training_step(self, step, index)

    def record_state(self):
        states_at_close.append(read_status(tmp_path / "run")["state"])

    monkeypatch.setattr(PolicyGradientModule, "training_step", fail_in_the_third_step)
    monkeypatch.setattr(TransformersSampler, "close", record_state)
    with raised:
        run(tmp_path / "run")
    assert states_at_close == ["running"]
    assert read_status(tmp_path / "run")["state"] == state


def rows_with_clock(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_first_step_of_a_batch_has_the_seconds_of_its_rollouts(short, tmp_path):
    """A batch makes two steps; seconds of all stages are less than those between two rows."""
    stages = [f"seconds_{stage}" for stage in STAGES]
    for before, row in itertools.pairwise(rows_with_clock(short)):
        is_first_of_batch = row["step"] % 2 == 1
        assert all((row[stage] > 0) == is_first_of_batch for stage in stages)
        seconds_of_step = row["num_tokens"] / row["tokens_per_second"]
        assert 0 < row["seconds_update"] <= seconds_of_step * (1 + 1e-9)
        seconds_of_stages = sum(row[stage] for stage in stages) + row["seconds_update"]
        assert seconds_of_stages < row["time"] - before["time"] + 0.01
    folder = tmp_path / "sampling"
    run(folder, "rollout.old_log_probs=sampling", "trainer.max_steps=1")
    (row,) = rows_with_clock(folder)
    assert row["seconds_old_log_probs"] == 0
    assert row["seconds_sampling"] > 0
