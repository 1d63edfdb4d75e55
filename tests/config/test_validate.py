"""Rules of `validate` that look at more than overrides; golden_refusals.txt has all that can be
typed."""

from pgtoolkit.config.compose import compose
from pgtoolkit.config.validate import validated


def problems(overrides):
    return validated(compose(overrides.split()))[1].problems


def test_the_sizes_multiply_to_the_processes_that_a_launcher_started(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    found = problems("parallelism=ddp")
    assert (
        "2 = pipeline_parallel=1 x data_parallel=2 x sequence_data_parallel=1 x tensor_parallel=1"
        in found[0]
    )
    assert problems("parallelism=ddp parallelism.data_parallel=4") == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert problems("parallelism=ddp") == []


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "kernel=triton needs a GPU" in problems("kernel=triton trainer.device=cpu")[0]
    assert problems("kernel=triton") == []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert problems("kernel=triton trainer.device=cpu") == []


def test_a_password_is_not_repeated():
    (problem,) = problems("tracking.uri=postgresql://me:hunter2@host/db")
    assert problem.startswith("tracking.uri=postgresql://***@host/db needs to hold no secret")
