"""Rules of `validate` that depend on the environment of the process; golden_refusals.txt has those
that depend on overrides alone."""

import pytest

from pgtoolkit.config.compose import compose
from pgtoolkit.config.validate import validated
from pgtoolkit.system.report import near_path


def problems(overrides: str) -> list[str]:
    return validated(compose(overrides.split()))[1].problems


def test_parallel_sizes_that_do_not_multiply_to_the_started_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    (problem,) = problems("parallelism=ddp")
    assert (
        "2 = pipeline_parallel=1 x data_parallel=2 x sequence_data_parallel=1 x tensor_parallel=1"
        in problem
    )
    assert problems("parallelism=ddp parallelism.data_parallel=4") == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert problems("parallelism=ddp") == []


def test_triton_without_a_gpu_or_its_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "kernel=triton needs a GPU" in problems("kernel=triton trainer.device=cpu")[0]
    assert problems("kernel=triton") == []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert problems("kernel=triton trainer.device=cpu") == []


def test_a_refusal_does_not_repeat_a_password():
    (problem,) = problems("tracking.uri=postgresql://me:hunter2@host/db")
    assert problem.startswith("tracking.uri=postgresql://***@host/db needs to hold no secret")


def test_the_interpreter_of_triton_needs_its_package(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("pgtoolkit.config.rules.named._is_installed", lambda module: False)
    [problem] = validated(compose(["kernel=triton"]))[1].problems
    assert problem.startswith("kernel=triton needs the package triton (got not installed).")
    assert problem.endswith('Use pip install "pgtk[triton]".')


def test_top_p_of_one_is_the_configuration_without_it():
    assert compose(["rollout.top_p=1"]).config == compose([]).config
    assert compose(["rollout.top_p=0.9"]).config != compose([]).config


def test_a_share_of_one_by_entropy_is_the_configuration_without_it():
    assert compose(["entropy.top_fraction=1"]).config == compose([]).config
    assert compose(["entropy.top_fraction=0.9"]).config != compose([]).config


def test_a_bound_below_every_factor_is_noted():
    for correction in ("token_truncate", "token_mask", "sequence_mask"):
        overrides = [f"correction={correction}", "correction.low=0"]
        notes = validated(compose(overrides))[1].notes
        assert "correction.low=0 bounds nothing, as null: no factor is smaller." in notes
    assert validated(compose(["correction=token_mask"]))[1].notes == []


def test_a_reference_that_is_always_the_policy_is_noted():
    """Only such a one has a distance of 0: not one that moves later, in part, or reads more."""
    penalty = ["kl=k3", "kl.coefficient=0.1", "kl.update_every=1"]
    for more, stays in (
        ((), True),
        (("kl.update_rate=0.5",), False),
        (("kl.update_every=2",), False),
        (("kl.reference_prompt='{prompt} {answer}'",), False),
    ):
        notes = validated(compose([*penalty, *more]))[1].notes
        assert any("so the penalty stays 0. Use " in note for note in notes) == stays


@pytest.mark.parametrize(
    ("prompts", "docs", "more", "batches"),
    [
        (8, 64, (), "batch"),
        (3, 64, (), "batch"),  # a step of 24 documents, its 64 are never reached
        (10, 64, ("accumulation.last_step=drop",), "batch"),  # 16 of 80 are not trained on
        (10, 64, (), None),  # a step of 64 and one of 16
        (16, 64, (), None),
        (16, 64, ("accumulation.last_step=drop",), None),
        (8, 64, ("accumulation.last_step=carry",), "batch"),
        (4, 64, ("accumulation.last_step=carry",), "2 batches"),  # both sampled before the step
        (6, 64, ("accumulation.last_step=carry",), None),  # 48 documents, then 16 of the next
        (3, 64, ("rollout.passes=2",), None),
        (3, 64, ("rollout.lag=1",), None),
    ],
)
def test_one_step_per_batch_of_rollouts_is_noted_however_the_batch_fits_in_it(
    prompts, docs, more, batches
):
    """Every ratio is 1 then: losses that differ in their clips alone cannot be told apart."""
    size = [f"rollout.prompts_per_batch={prompts}", "rollout.group_size=8"]
    overrides = ["loss=grpo", *size, f"accumulation.docs_per_step={docs}", *more]
    report = validated(compose(overrides))[1]
    notes = [note for note in report.notes if "every ratio is 1" in note]
    assert [note.partition(" of rollouts:")[0] for note in notes] == (
        [] if batches is None else [f"one optimizer step per {batches}"]
    )


def test_a_missing_file_is_answered_with_a_file_of_a_similar_name_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("new.jsonl", "prompts.jsonl", "prompts.parquet"):
        (tmp_path / name).write_text("")
    assert near_path("nope.jsonl") is None
    assert near_path("x.jsonl") is None
    assert near_path("promts.jsonl") == "prompts.jsonl"
    assert near_path(f"{tmp_path}/prompts.json") == f"{tmp_path}/prompts.jsonl"
    assert near_path("prompt.parquet") == "prompts.parquet"
