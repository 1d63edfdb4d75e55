"""Rules of `validate` that depend on the environment of the process; golden_refusals.txt has those
that depend on overrides alone."""

from pgtoolkit.config.compose import compose
from pgtoolkit.config.validate import validated


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
